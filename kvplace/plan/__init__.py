"""`kvplace plan`: many VMs placed together on the nodes of a cluster, with an upper bound."""
