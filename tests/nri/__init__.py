"""The NRI protocol, against a runtime that the tests play."""
