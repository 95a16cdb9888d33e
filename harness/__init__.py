"""The real programs that tests and benchmarks run against: started here, and gone with who started them."""
