"""What doctor finds in an installation."""
