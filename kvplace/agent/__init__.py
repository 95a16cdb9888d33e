"""The node agent: makes the ledger true on its node, reads the kernel's answer back, and keeps it true.

It runs once on every node, needs only the objects of that node, and never moves a VM by itself: `serve`
decides, the agent carries out and reports.
"""
