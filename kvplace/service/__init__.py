"""What every long-running process shares: TLS, JSON log lines, listening, health and metrics."""
