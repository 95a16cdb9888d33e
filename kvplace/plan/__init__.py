"""`kvplace plan`: many VMs placed together on the nodes of a cluster, and the bound that no plan exceeds."""
