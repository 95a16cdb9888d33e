"""Faults between real processes: a reverse proxy with a script, and an address that holds and cuts."""
