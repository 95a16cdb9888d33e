"""`kvplace serve`: extender, admission webhooks and controller in one process on one loop.

Puts the rooms together and has no rules of its own.
"""
