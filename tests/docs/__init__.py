"""The documentation agrees with the code."""
