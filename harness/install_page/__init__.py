"""docs/install.md and docs/quickstart.md as a newcomer follows them, on real nodes of this machine."""
