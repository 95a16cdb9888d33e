"""Descriptions of machines: files, archives, well-known server types, and the one that we run on."""
