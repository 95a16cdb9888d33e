"""Checks of an installation in a cluster; every finding has a fix: `kvplace doctor`."""
