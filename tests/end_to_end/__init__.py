"""The whole way of a VM, with real parts on both sides of every contract."""
