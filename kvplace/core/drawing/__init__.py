"""Whose the CPUs of a machine are, as a map for the terminal, SVG and programs."""
