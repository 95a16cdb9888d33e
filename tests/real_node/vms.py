"""VMs small enough for a node that is this machine."""

from __future__ import annotations

from typing import Any

SMALL_DOMAIN: dict[str, Any] = {
    "memory": {"guest": "64Mi"},
    "devices": {"autoattachGraphicsDevice": False},
    # QEMU 7.2 cannot migrate through several connections at once, which KubeVirt chooses without this limit.
    "resources": {"limits": {"cpu": "1"}},
}
