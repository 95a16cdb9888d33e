"""Which of two resource versions is newer: watches and answers of writes report one object in any order."""

from __future__ import annotations


def is_newer(version: str, known: str) -> bool:
    """Whether a version is newer than another one of the same kind, even of an object that is gone.

    Resource versions are numbers that grow over all objects of a kind (KEP-5504); of others only equality is
    known. An empty one stands for none, which is older than all.
    """
    if not version or not known:
        return bool(version)
    if version.isdigit() and known.isdigit():
        return int(version) > int(known)
    return version != known


def is_older(version: str, known: str) -> bool:
    """Whether a version is certainly older than another one of the same kind."""
    return version.isdigit() and known.isdigit() and int(version) < int(known)
