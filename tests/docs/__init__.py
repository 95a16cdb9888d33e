"""The documentation says what the code does."""
