"""What of an installation in a cluster is missing or wrong, each with its fix: `kvplace doctor`."""
