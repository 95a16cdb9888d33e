"""Reads and writes of libvirt."""
