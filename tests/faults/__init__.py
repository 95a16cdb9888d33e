"""Faults between the real processes: `python -m tests.faults` plays them all and prints a table."""
