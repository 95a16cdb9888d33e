"""The files of a release, made from this checkout, each with its digest."""
