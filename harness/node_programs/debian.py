"""What Debian has installed on this machine, as far as it decides what an image contains."""

from __future__ import annotations

import hashlib
from pathlib import Path

_STATUS = Path("/var/lib/dpkg/status")


def installed_packages() -> str:
    """Return a digest that changes when any Debian package is installed, updated or removed."""
    return hashlib.sha256(_STATUS.read_bytes()).hexdigest() if _STATUS.exists() else "no Debian"
