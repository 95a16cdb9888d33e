"""Machines, virtual machines and the demo that come with kvplace."""
