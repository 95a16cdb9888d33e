"""What kvplace costs and how fast it is, measured beside what a cluster has without it."""
