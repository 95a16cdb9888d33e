"""The cost and speed of kvplace, measured beside a cluster without it."""
