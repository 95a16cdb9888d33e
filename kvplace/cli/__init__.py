"""The command line: the argument tree, what is printed, and exit codes. It decides nothing."""
