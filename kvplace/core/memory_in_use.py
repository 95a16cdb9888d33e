"""Memory and huge pages of a node that something else than kvplace's VMs uses.

The agent measures them and publishes them in `status.inUse` of the NodeTopology: those of the host itself, of
pods without a claim, of OVS-DPDK or SPDK. For every decision they count as a claim that owns no CPU. They are
not part of the machine's fingerprint, because they change while VMs run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvplace.core.json_fields import MAX_BYTES
from kvplace.core.ledger import Claim
from kvplace.core.quantity import (
    bytes_in_pages,
    format_bytes,
    parse_bytes,
    read_page_counts,
    write_page_counts,
)
from kvplace.core.request import Policy
from kvplace.core.scalars import NO_BYTES, NO_CPUS, Bytes, NumaId, PodUid
from kvplace.core.strict_json import Json, shown

OTHERS = PodUid("other programs")
"""The UID of the claim; no pod has one with a space."""


@dataclass(frozen=True, slots=True)
class MemoryInUse:
    """Memory that others use, by NUMA node."""

    memory: Mapping[NumaId, Bytes] = field(default_factory=dict)
    """Bytes outside huge pages."""
    huge_pages: Mapping[NumaId, Mapping[Bytes, int]] = field(default_factory=dict)
    """Pages by page size in bytes."""

    def claim(self) -> Claim:
        """Write it as a claim, which decisions then treat as the claim of a VM."""
        nodes = self.memory.keys() | self.huge_pages.keys()
        memory = {
            node: Bytes(self.memory.get(node, NO_BYTES) + bytes_in_pages(self.huge_pages.get(node, {})))
            for node in sorted(nodes)
        }
        return Claim(
            uid=OTHERS,
            namespace="",
            pod=OTHERS,
            vmi="",
            policy=Policy.SHARE,
            cpus=NO_CPUS,
            owned=NO_CPUS,
            memory=memory,
            huge_pages=self.huge_pages,
            since="",
        )

    def document(self) -> Json:
        """Write it as JSON: quantities by the id of the NUMA node."""
        nodes = sorted(self.memory.keys() | self.huge_pages.keys())
        return {
            str(node): {
                "memory": format_bytes(self.memory.get(node, NO_BYTES)),
                "hugePages": write_page_counts(self.huge_pages.get(node, {})),
            }
            for node in nodes
        }


def read_memory_in_use(document: object, at: str) -> MemoryInUse:
    """Read the JSON form; raises ValueError that names the entry below `at`."""
    if document is None:
        return NOTHING_IN_USE
    if not isinstance(document, Mapping):
        raise ValueError(f"{at} is {shown(document)}; it must be an object by NUMA node")  # noqa: TRY004
    memory: dict[NumaId, Bytes] = {}
    pages: dict[NumaId, Mapping[Bytes, int]] = {}
    for text, used in document.items():
        if not (isinstance(text, str) and text.isascii() and text.isdigit() and len(text) <= 5):
            raise ValueError(f"{at} has the key {shown(text)}; it must be the id of a NUMA node")
        if not isinstance(used, Mapping):
            raise ValueError(f"{at}.{text} is {shown(used)}; it must be an object")  # noqa: TRY004
        node = NumaId(int(text))
        try:
            memory[node] = parse_bytes(used.get("memory", "0"))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{at}.{text}.memory: {error}") from None
        if memory[node] > MAX_BYTES:
            raise ValueError(f"{at}.{text}.memory is {shown(used['memory'])}, more than 1Ei")
        pages[node] = read_page_counts(used.get("hugePages") or {}, f"{at}.{text}.hugePages")
    return MemoryInUse(memory, pages)


NOTHING_IN_USE = MemoryInUse()


@dataclass(frozen=True, slots=True)
class Used:
    """Memory of one NUMA node as it was measured at one moment."""

    memory: Bytes
    """All of the node outside huge pages."""
    taken: Bytes
    """The part of it that others use."""
    pages: Mapping[Bytes, tuple[int, int]] = field(default_factory=dict)
    """All huge pages by size, and pages in use by others."""


_PARTS, _PARTS_OF_PAGES = 32, 64
"""What others use is published in parts of what a node has: so the API server gets only changes that
matter, and nodes of one type mostly stay in equal states. At least one part of the memory is kept for the
host."""


def in_use(measured: Mapping[NumaId, Used], before: MemoryInUse) -> MemoryInUse:
    """Round up the memory of others, or keep the value `before` while it is not two parts too large."""
    memory: dict[NumaId, Bytes] = {}
    pages: dict[NumaId, dict[Bytes, int]] = {}
    for node, used in measured.items():
        published = before.memory.get(node, NO_BYTES)
        memory[node] = Bytes(min(used.memory, _rounded(used.taken, used.memory // _PARTS, published)))
        for size, (total, taken) in sorted(used.pages.items()):
            if taken:  # of huge pages none is kept: an administrator decides how many there are
                known = before.huge_pages.get(node, {}).get(size, 0)
                count = min(total, _rounded(taken, total // _PARTS_OF_PAGES, known))
                pages.setdefault(node, {})[size] = count
    return MemoryInUse(memory, pages)


def _rounded(taken: int, part: int, before: int) -> int:
    part = max(1, part)
    if taken <= before < taken + 2 * part and before % part == 0 and before:
        return before
    return max(1, -(-taken // part)) * part
