"""The controller on a cluster in memory."""
