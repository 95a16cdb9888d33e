"""The real programs that tests and benchmarks run against: started here, ended with their starter."""
