"""The parts that all long-running processes share."""
