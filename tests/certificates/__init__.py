"""The certificates of an installation."""
