"""The documents of libvirt that kvplace reads."""
