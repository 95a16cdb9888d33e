"""The documentation states what the code does."""
