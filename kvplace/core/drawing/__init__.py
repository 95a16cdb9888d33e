"""The core map: which VM has which CPUs of a machine, for the terminal, SVG and programs."""
