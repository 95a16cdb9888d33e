"""The command line: the argument tree, the output, and exit codes. It decides nothing."""
