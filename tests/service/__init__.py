"""What every long-running process shares."""
