"""Tests against a real libvirt daemon and QEMU."""
