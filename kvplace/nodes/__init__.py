"""Every node as the watches report it: its machine, its ledger and what is free there."""
