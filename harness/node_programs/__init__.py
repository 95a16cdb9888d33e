"""The programs and container images of a real node in the tests."""
