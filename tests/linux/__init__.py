"""The files of a Linux host that kvplace reads."""
