"""The findings of doctor in an installation."""
