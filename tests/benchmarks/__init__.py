"""The benchmarks' own arithmetic, and whether the peers they compare with are what they claim to be."""
