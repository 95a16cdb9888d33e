"""What kvplace reads of libvirt."""
