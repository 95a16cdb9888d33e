"""The request of one VM, normalised: the values of the annotations as enums, the sizes as numbers.

A `Request` travels from pod admission to the extender in the annotation `kvplace.io/request`, so
that nothing after admission needs the VM itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from types import MappingProxyType
from typing import Self

from kvplace.core.scalars import NO_BYTES, NO_CPUS, Bytes, CpuMask, NumaId, ResourceName

_CPU_LIST = frozenset("0123456789-, ")


class Level(Enum):
    """A level of a machine, the widest first; the values are labels of metrics and keys of documents."""

    MACHINE = "machine"
    SOCKET = "socket"
    NUMA = "numa"
    L3 = "l3"

    @property
    def noun(self) -> str:
        """The noun for one part of the level."""
        return {"numa": "NUMA node", "l3": "L3 group"}.get(self.value, self.value)

    @property
    def depth(self) -> int:
        """How many levels are wider."""
        return list(Level).index(self)


class Scope(Enum):
    """Where all the CPUs of a VM must lie (`cpu-set`): in one part of a level, or evenly over its parts."""

    level: Level
    evenly: bool

    ONE_SOCKET = "one-socket", Level.SOCKET
    ONE_NUMA = "one-numa", Level.NUMA
    ONE_L3 = "one-l3", Level.L3
    SPREAD_SOCKETS = "spread-sockets", Level.SOCKET, True
    SPREAD_NUMA = "spread-numa", Level.NUMA, True
    ANY = "any", Level.MACHINE

    def __new__(cls, value: str, level: Level, evenly: bool = False) -> Self:
        """Make a scope of its value in the annotation, its level, and whether it spreads."""
        if evenly and level not in (Level.SOCKET, Level.NUMA):
            raise ValueError(f"{value}: the allocator spreads VMs over sockets and NUMA nodes only")
        scope = object.__new__(cls)
        scope._value_ = value
        scope.level = level
        scope.evenly = evenly
        return scope

    @property
    def within(self) -> Level:
        """The level with one part that holds all CPUs."""
        return Level.MACHINE if self.evenly else self.level

    @property
    def over(self) -> Level:
        """The level with parts that give equal shares; the machine as a whole gives one share."""
        return self.level if self.evenly else Level.MACHINE


NARROW_FIRST = tuple(sorted(Scope, key=lambda scope: (scope.within.depth, scope.level.depth), reverse=True))
"""Scopes, the one that leaves the least choice first."""


def scope_hint(value: object) -> str:
    """Write a hint if a CPU list or a number takes the place of a scope; empty for any other value."""
    if not isinstance(value, int | str) or not set(str(value)) <= _CPU_LIST or not str(value):
        return ""
    return "; it names a scope, not CPUs: kvplace chooses the CPUs, as many as the VM has vCPUs"


class Policy(Enum):
    """The use of a VM's CPUs by others (`kvplace.io/cpu-policy`)."""

    EXCLUSIVE = "exclusive"
    SHARE = "share"
    NUMA = "numa"
    IMMOVABLE = "immovable"
    NONE = "none"

    @property
    def is_movable(self) -> bool:
        """Whether a running VM with this policy may get other cores for the sake of others."""
        return self in (Policy.EXCLUSIVE, Policy.SHARE)


class Smt(Enum):
    """How vCPUs sit on cores (`kvplace.io/smt`)."""

    PREFER = "prefer"
    REQUIRE = "require"
    ISOLATE = "isolate"


class EmulatorThreads(Enum):
    """Where QEMU's own threads run (`kvplace.io/emulator-threads`)."""

    SHARED = "shared"
    ISOLATE = "isolate"
    WITH_VCPUS = "with-vcpus"


class NumaMemory(Enum):
    """How the VM's memory is bound to NUMA nodes (`kvplace.io/numa-memory`)."""

    PREFERRED = "preferred"
    STRICT = "strict"
    INTERLEAVE = "interleave"
    OFF = "off"


class GuestNuma(Enum):
    """Whether the guest sees the host's NUMA cells (`kvplace.io/guest-numa`)."""

    OFF = "off"
    MIRROR = "mirror"


class DeviceNuma(Enum):
    """Which cores are near enough to the VM's devices (`kvplace.io/device-numa`).

    A device is local if the placement has its NUMA node; with `SOCKET` if the placement has its package. An
    unknown NUMA node restricts nothing.
    """

    PREFERRED = "preferred"
    """Local devices rank before others; devices that are not local are allowed."""
    REQUIRED = "required"
    """Every device must be local."""
    SOCKET = "socket"
    """Every device must be on a package of the cores."""
    OFF = "off"
    """Devices do not matter."""

    def local_nodes(
        self,
        nodes: Iterable[NumaId],
        cpus: CpuMask,
        sockets: Iterable[CpuMask],
        cpus_of_nodes: Mapping[NumaId, CpuMask],
    ) -> frozenset[NumaId]:
        """Find the NUMA nodes where a device is local to a VM on these NUMA nodes and CPUs.

        Every program decides with this rule. `sockets` and `cpus_of_nodes` describe the machine.
        """
        local = frozenset(nodes)
        if self is not DeviceNuma.SOCKET:
            return local
        near = NO_CPUS
        for socket in sockets:
            if socket & cpus:
                near |= socket
        return local | {node for node, here in cpus_of_nodes.items() if here & near}


class OnFailure(Enum):
    """The fate of a VM that cannot be placed (`kvplace.io/on-failure`)."""

    WAIT = "wait"
    FLOAT = "float"


MAX_VCPUS = 4096
"""Most vCPUs that a request may name; QEMU's own limit is below."""


@dataclass(frozen=True, slots=True)
class PinningOptions:
    """How a VM is to be pinned: the values of its annotations. The sizes come from the VM itself."""

    scope: Scope = Scope.ONE_SOCKET
    policy: Policy = Policy.EXCLUSIVE
    smt: Smt = Smt.PREFER
    emulator_threads: EmulatorThreads = EmulatorThreads.SHARED
    numa_memory: NumaMemory = NumaMemory.PREFERRED
    guest_numa: GuestNuma = GuestNuma.OFF
    device_numa: DeviceNuma = DeviceNuma.PREFERRED
    on_failure: OnFailure = OnFailure.WAIT

    def of_plain_pod(self) -> PinningOptions:
        """Return these options without options of QEMU's own threads and of a guest.

        All its threads run on its own CPUs; with `shared`, its containers would also have reserved CPUs.
        """
        return replace(self, emulator_threads=EmulatorThreads.WITH_VCPUS, guest_numa=GuestNuma.OFF)


@dataclass(frozen=True)
class Request:
    """The request for one placement: the VM's options and its size."""

    vcpus: int
    options: PinningOptions = PinningOptions()
    memory: Bytes = NO_BYTES
    """Bytes of guest memory; 0 when unknown."""
    huge_pages: Mapping[Bytes, int] = field(default_factory=lambda: MappingProxyType({}))
    """Pages by page size in bytes; their bytes are part of `memory`."""
    io_threads: int = 0
    devices: Mapping[ResourceName, int] = field(default_factory=lambda: MappingProxyType({}))
    """Devices by the resource of their device plugin; the kubelet chooses them after the bind."""
    device_nodes: frozenset[NumaId] = frozenset()
    """NUMA nodes of devices that are chosen already: of claims (DRA), and of an agent's report."""

    def __hash__(self) -> int:
        return hash(self.key)

    @cached_property
    def key(self) -> tuple[object, ...]:
        """Everything that decides a placement, hashable: requests with equal keys get equal placements."""
        options = self.options
        return (
            self.vcpus,
            options.scope,
            options.policy,
            options.smt,
            options.emulator_threads,
            options.numa_memory,
            options.guest_numa,
            options.device_numa,
            self.memory,
            tuple(sorted(self.huge_pages.items())),
            self.io_threads,
            tuple(sorted(self.devices.items())),
            self.device_nodes,
        )

    @cached_property
    def without_devices(self) -> Request:
        """The request for the same CPUs and memory, wherever the devices are."""
        if not (self.devices or self.device_nodes):
            return self
        return replace(self, devices=MappingProxyType({}), device_nodes=frozenset())

    @property
    def pins_memory(self) -> bool:
        """Whether devices of the host access its memory (VFIO): it stays where it is while the VM runs."""
        return bool(self.devices or self.device_nodes)

    @property
    def owns_cpus(self) -> bool:
        """Whether the VM owns its CPUs alone."""
        return self.options.policy is Policy.EXCLUSIVE

    @property
    def least_millicores(self) -> int:
        """The least that its pod requests, so that quotas and kube-scheduler count it.

        All CPUs that it will own; how many more whole cores cost (`kvplace.io/smt`) depends on the node. A
        tenth of the CPUs that it shares, as KubeVirt requests by default: exclusive VMs do not get them.
        """
        options = self.options
        if options.policy is Policy.NONE:
            return 0
        isolated = options.emulator_threads is EmulatorThreads.ISOLATE and options.policy is not Policy.NUMA
        return (self.vcpus + isolated) * (1000 if self.owns_cpus else 100)
