"""The fingerprint of the pods on a node: schedulers check with it that a NodeResourceTopology is current.

As github.com/k8stopologyawareschedwg/podfingerprint v001 defines it: XXH64 over the sorted XXH64 of every
pod's name, each with the XXH64 of its namespace as seed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from xxhash import xxh64_hexdigest, xxh64_intdigest

_PREFIX = "pfp0v001"


def pod_fingerprint(pods: Iterable[tuple[str, str]]) -> str:
    """Compute the fingerprint of pods, given as (namespace, name) in any order."""
    hashes = sorted(_pod_hash(namespace, name) for namespace, name in pods)
    return _PREFIX + xxh64_hexdigest(struct.pack(f"<{len(hashes)}Q", *hashes))


def _pod_hash(namespace: str, name: str) -> int:
    return xxh64_intdigest(name.encode(), xxh64_intdigest(namespace.encode()))
