"""What of an installation in a cluster is missing or wrong, each with its mend: `kvplace doctor`."""
