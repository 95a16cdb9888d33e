"""The tools for a developer's machine, made by one command: nothing here is installed with kvplace.

Runs on the system's own Python with the standard library alone, because it makes the
virtual environment that everything else runs in.
"""
