"""What long-running processes share."""
