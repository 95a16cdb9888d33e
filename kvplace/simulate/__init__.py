"""kvplace without a cluster: simulated loads and the demo, decided by the code that runs in a cluster."""
