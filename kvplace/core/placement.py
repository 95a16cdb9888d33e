"""The cores of one VM: what the allocator answers and what travels to the hook on the pod.

`Placement` is the decision about one machine. `PodPlacement` binds it to one pod and one node: the
annotation `kvplace.io/placement`. It is written only in the Binding, and its pod UID lets every reader tell
its own placement from one that was inherited, edited or left behind.

Readers ignore keys that they do not know, so that a release may add some. A hook that did not know guest
cells would pin a mirroring VM and leave its guest topology alone; it never meets one, since each release
adds its own sidecar to the VMs that it admits.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

from kvplace.core.cpu_map import read_cpu_map
from kvplace.core.cpuset import MAX_CPU, format_cpu_list, mask_of, parse_cpu_list
from kvplace.core.errors import BadAnnotation
from kvplace.core.guest_cells import GuestCell, read_guest_cells, write_guest_cells
from kvplace.core.quantity import format_bytes, parse_page_counts
from kvplace.core.request import NumaMemory, OnFailure, Policy
from kvplace.core.strict_json import Json, shown

PLACEMENT = "kvplace.io/placement"
VERSION = 1
_MAX_TEXT = 256 * 1024

_Word = TypeVar("_Word", bound=Enum)


@dataclass(frozen=True, slots=True)
class Placement:
    """The CPUs and memory that one VM gets on one machine."""

    policy: Policy
    vcpus: tuple[int, ...]
    """The CPU of each vCPU; empty for policy `numa`, where every vCPU may use all of `cpus`."""
    cpus: int
    owned: int = 0
    """CPUs that nobody else may use while the VM lives, idle siblings and emulator CPUs included."""
    emulator_cpus: int = 0
    io_thread_cpus: tuple[int, ...] = ()
    """CPU set of each I/O thread; empty means as the emulator."""
    numa_nodes: tuple[int, ...] = ()
    numa_memory: NumaMemory = NumaMemory.OFF
    memory: Mapping[int, int] = field(default_factory=dict)
    """Bytes by NUMA node, huge pages included."""
    huge_pages: Mapping[int, Mapping[int, int]] = field(default_factory=dict)
    """Pages by NUMA node, then by page size in bytes."""
    packages: tuple[int, ...] = ()
    l3_groups: tuple[int, ...] = ()
    """Indexes into the topology's L3 groups."""
    guest_cells: tuple[GuestCell, ...] = ()
    """The NUMA cells that the guest sees; empty unless it asked for them."""

    @property
    def floats(self) -> bool:
        """Whether the VM runs unpinned: the hook then leaves its XML as it is."""
        return self.policy is Policy.NONE

    @property
    def memory_nodes(self) -> tuple[int, ...]:
        """The NUMA nodes that give the VM memory; all of its nodes where that is not known."""
        return tuple(node for node in self.numa_nodes if self.memory.get(node)) or self.numa_nodes


@dataclass(frozen=True, slots=True)
class PodPlacement:
    """A placement bound to a pod and a node.

    `pod_uid`, `node` and `topology` are empty when it was made from a bare `cpu-map` that another program
    wrote.
    """

    pod_uid: str
    node: str
    topology: str
    """The fingerprint of the topology that the CPUs were chosen on."""
    on_failure: OnFailure
    placement: Placement

    @classmethod
    def floating(cls, *, pod_uid: str, node: str) -> PodPlacement:
        """Say that a pod runs unpinned because nothing fitted and its user asked to `float` then."""
        return cls(pod_uid, node, "", OnFailure.FLOAT, Placement(Policy.NONE, (), 0))

    @classmethod
    def of_cpu_map(cls, text: str, *, on_failure: OnFailure = OnFailure.WAIT) -> PodPlacement:
        """Read a bare `cpu-map`: vCPU *i* takes the *i*-th id, other threads all ids, memory floats."""
        sockets = read_cpu_map(text)
        vcpus = tuple(cpu for ids in sockets.values() for cpu in ids)
        cpus = mask_of(vcpus)
        placement = Placement(Policy.EXCLUSIVE, vcpus, cpus, emulator_cpus=cpus, packages=tuple(sockets))
        return cls("", "", "", on_failure, placement)

    def document(self) -> Json:
        """Write the placement as a JSON object."""
        placement = self.placement
        document: Json = {
            "version": VERSION,
            "podUid": self.pod_uid,
            "node": self.node,
            "topology": self.topology,
            "policy": placement.policy.value,
            "onFailure": self.on_failure.value,
            "vcpus": list(placement.vcpus),
            "cpus": format_cpu_list(placement.cpus),
            "emulatorCpus": format_cpu_list(placement.emulator_cpus),
            "ioThreadCpus": [format_cpu_list(cpus) for cpus in placement.io_thread_cpus],
            "numaNodes": list(placement.numa_nodes),
            "numaMemory": placement.numa_memory.value,
            "memory": {str(node): count for node, count in placement.memory.items()},
            "owned": format_cpu_list(placement.owned),
            "hugePages": {
                str(node): {format_bytes(size): count for size, count in pages.items()}
                for node, pages in placement.huge_pages.items()
            },
        }
        if placement.guest_cells:
            document["guestCells"] = write_guest_cells(placement.guest_cells)
            document["guestThreads"] = placement.guest_cells[0].threads
        document["sockets"] = list(placement.packages)
        document["l3"] = list(placement.l3_groups)
        return document

    def to_json(self) -> str:
        """Write the annotation's one line."""
        return json.dumps(self.document(), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> PodPlacement:
        """Read the annotation; raises BadAnnotation that names what is wrong."""
        reader = _Reader(text)
        placement = Placement(
            policy=reader.word("policy", Policy),
            vcpus=reader.ids("vcpus"),
            cpus=reader.cpus("cpus"),
            owned=reader.cpus("owned", ""),
            emulator_cpus=reader.cpus("emulatorCpus", ""),
            io_thread_cpus=reader.cpu_sets("ioThreadCpus"),
            numa_nodes=reader.ids("numaNodes"),
            numa_memory=reader.word("numaMemory", NumaMemory, NumaMemory.OFF),
            memory=reader.bytes_by_node("memory"),
            huge_pages=reader.pages_by_node("hugePages"),
            packages=reader.ids("sockets"),
            l3_groups=reader.ids("l3"),
            guest_cells=reader.guest_cells(),
        )
        if not placement.cpus and not placement.floats:
            raise reader.bad("cpus is empty; a placement names at least one CPU")
        if len(set(placement.vcpus)) != len(placement.vcpus):
            raise reader.bad("vcpus gives one CPU to two vCPUs")
        if mask_of(placement.vcpus) & ~placement.cpus:
            outside = format_cpu_list(mask_of(placement.vcpus) & ~placement.cpus)
            raise reader.bad(f"vcpus names CPU {outside}, which cpus lacks")
        if not placement.vcpus and placement.policy not in (Policy.NUMA, Policy.NONE):
            raise reader.bad(f"vcpus is empty, which policy {placement.policy.value} does not allow")
        foreign = {cell.node for cell in placement.guest_cells} - set(placement.numa_nodes)
        if foreign:
            raise reader.bad(f"guestCells name NUMA node {min(foreign)}, which numaNodes lacks")
        return cls(
            pod_uid=reader.text("podUid"),
            node=reader.text("node"),
            topology=reader.text("topology", ""),
            on_failure=reader.word("onFailure", OnFailure, OnFailure.WAIT),
            placement=placement,
        )


class _Reader:
    """Reads the fields of the annotation, each with an error that names it."""

    def __init__(self, text: str) -> None:
        self._text = text
        if len(text) > _MAX_TEXT:
            raise self.bad(f"is longer than {_MAX_TEXT} characters")
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError):
            raise self.bad(
                "is not JSON; only kvplace writes this annotation, remove it and let the pod be made anew"
            ) from None
        if not isinstance(raw, dict):
            raise self.bad("must be a JSON object")
        self._raw: dict[str, object] = raw
        version = raw.get("version")
        if type(version) is not int or version != VERSION:
            raise self.bad(
                f"has version {shown(version)}; this program reads version {VERSION}, use matching releases"
            )

    def bad(self, mend: str) -> BadAnnotation:
        return BadAnnotation(PLACEMENT, self._text, mend)

    def text(self, key: str, default: str | None = None) -> str:
        value = self._raw.get(key, default)
        if not isinstance(value, str):
            raise self.bad(f"{key} must be a text, not {shown(value)}")
        return value

    def word(self, key: str, kind: type[_Word], default: _Word | None = None) -> _Word:
        value = self._raw.get(key, default.value if default is not None else None)
        for member in kind:
            if member.value == value:
                return member
        offered = ", ".join(str(member.value) for member in kind)
        raise self.bad(f"{key} is {shown(value)}; it must be one of {offered}")

    def cpus(self, key: str, default: str | None = None) -> int:
        try:
            return parse_cpu_list(self.text(key, default), what=key)
        except ValueError as error:
            raise self.bad(str(error)) from None

    def cpu_sets(self, key: str) -> tuple[int, ...]:
        value = self._raw.get(key, [])
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise self.bad(f"{key} must be a list of CPU lists")
        try:
            return tuple(parse_cpu_list(entry, what=key) for entry in value)
        except ValueError as error:
            raise self.bad(str(error)) from None

    def bytes_by_node(self, key: str) -> dict[int, int]:
        counts: dict[int, int] = {}
        for node, count in self._by_node(key, "bytes by NUMA node"):
            if type(count) is not int or count < 0:
                raise self.bad(f"{key} holds {str(node)!r}: {shown(count)}, which is not bytes by NUMA node")
            counts[node] = count
        return counts

    def pages_by_node(self, key: str) -> dict[int, dict[int, int]]:
        counts: dict[int, dict[int, int]] = {}
        for node, pages in self._by_node(key, "page counts by NUMA node and page size"):
            try:
                counts[node] = parse_page_counts(pages)
            except ValueError as error:
                raise self.bad(f"{key} of node {node}: {error}") from None
        return counts

    def guest_cells(self) -> tuple[GuestCell, ...]:
        try:
            return read_guest_cells(
                self._raw.get("guestCells", []),
                self._raw.get("guestThreads", 1),
                vcpus=len(self.ids("vcpus")),
            )
        except ValueError as error:
            raise self.bad(str(error)) from None

    def _by_node(self, key: str, what: str) -> Iterator[tuple[int, object]]:
        value = self._raw.get(key, {})
        if not isinstance(value, dict):
            raise self.bad(f"{key} must be an object of {what}")
        for node, entry in value.items():
            if not (node.isascii() and node.isdigit() and len(node) <= 5):
                raise self.bad(f"{key} holds {shown(node)}, which is not a NUMA node")
            yield int(node), entry

    def ids(self, key: str) -> tuple[int, ...]:
        value = self._raw.get(key, [])
        if not isinstance(value, list):
            raise self.bad(f"{key} must be a list of ids")
        for entry in value:
            if type(entry) is not int or not 0 <= entry <= MAX_CPU:
                raise self.bad(f"{key} holds {shown(entry)}, which is not an id from 0 to {MAX_CPU}")
        return tuple(value)
