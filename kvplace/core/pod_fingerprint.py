"""The fingerprint of the pods on a node: schedulers check with it that a NodeResourceTopology is current.

As github.com/k8stopologyawareschedwg/podfingerprint v001 defines it: XXH64 over the sorted XXH64 of every
pod's name, each with the XXH64 of its namespace as seed (https://github.com/Cyan4973/xxHash, XXH64).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from functools import lru_cache

_PREFIX = "pfp0v001"
_BITS = (1 << 64) - 1
_P1, _P2, _P3, _P4, _P5 = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
_STRIPE = 32
_REMEMBERED = 1024
"""Pods with a cached hash; a node has a quarter of it."""


def pod_fingerprint(pods: Iterable[tuple[str, str]]) -> str:
    """Compute the fingerprint of pods, given as (namespace, name) in any order."""
    hashes = sorted(_pod_hash(namespace, name) for namespace, name in pods)
    return f"{_PREFIX}{xxh64(struct.pack(f'<{len(hashes)}Q', *hashes)):016x}"


def xxh64(content: bytes, seed: int = 0) -> int:
    """Compute XXH64; 10 µs for a name, since this is Python."""
    position = len(content) - len(content) % _STRIPE
    if position:
        lanes = [(seed + _P1 + _P2) & _BITS, (seed + _P2) & _BITS, seed, (seed - _P1) & _BITS]
        for words in struct.iter_unpack("<4Q", content[:position]):
            lanes = [_round(lane, word) for lane, word in zip(lanes, words, strict=True)]
        value = sum(_rotate(lane, by) for lane, by in zip(lanes, (1, 7, 12, 18), strict=True)) & _BITS
        for lane in lanes:
            value = ((value ^ _round(0, lane)) * _P1 + _P4) & _BITS
    else:
        value = (seed + _P5) & _BITS
    value = (value + len(content)) & _BITS
    while position + 8 <= len(content):
        (word,) = struct.unpack_from("<Q", content, position)
        value = (_rotate(value ^ _round(0, word), 27) * _P1 + _P4) & _BITS
        position += 8
    if position + 4 <= len(content):
        (half,) = struct.unpack_from("<I", content, position)
        value = (_rotate(value ^ half * _P1 & _BITS, 23) * _P2 + _P3) & _BITS
        position += 4
    for byte in content[position:]:
        value = _rotate(value ^ byte * _P5 & _BITS, 11) * _P1 & _BITS
    value = (value ^ value >> 33) * _P2 & _BITS
    value = (value ^ value >> 29) * _P3 & _BITS
    return value ^ value >> 32


@lru_cache(maxsize=_REMEMBERED)
def _pod_hash(namespace: str, name: str) -> int:
    return xxh64(name.encode(), xxh64(namespace.encode()))


def _round(lane: int, word: int) -> int:
    return _rotate((lane + word * _P2) & _BITS, 31) * _P1 & _BITS


def _rotate(value: int, by: int) -> int:
    return (value << by | value >> 64 - by) & _BITS
