"""Common parts of every long-running process: TLS, JSON log lines, listening, health and metrics."""
