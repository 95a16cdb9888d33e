"""Reads and writes of a Linux host."""
