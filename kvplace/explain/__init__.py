"""Reasons why a VM fits on no node, changes that help, and the cores and neighbours of a running VM."""
