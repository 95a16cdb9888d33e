"""Nodes as the watches report them."""
