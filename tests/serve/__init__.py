"""The process `kvplace serve`, with its listeners, on a cluster in memory."""
