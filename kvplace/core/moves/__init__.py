"""Moves of running VMs that make room for another VM, and suggestions for a VM that does not fit."""
