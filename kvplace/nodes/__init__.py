"""Every node as the watches report it: its machine, its ledger and its free resources."""
