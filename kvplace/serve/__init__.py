"""`kvplace serve`: the extender, admission webhooks and controller in one process."""
