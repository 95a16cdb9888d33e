"""Documents that people write."""
