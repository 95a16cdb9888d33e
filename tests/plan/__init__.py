"""Plans and the bound that they are compared with."""
