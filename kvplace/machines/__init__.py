"""Descriptions of machines: files, archives, well-known server types, and this one."""
