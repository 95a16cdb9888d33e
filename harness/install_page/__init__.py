"""docs/install.md as a newcomer follows it: its own commands, in its order, on real nodes of this machine."""
