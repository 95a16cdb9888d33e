"""Every value of every key that a user may write: the options that it sets, and where threads run with it.

A new value is one row, and every door tests it: reading, admission, the pages, all components on a cluster in
memory (tests/hook), a real cluster (tests/end_to_end), and a real QEMU (tests/libvirt_session).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

from kvplace.core.request import (
    DeviceNuma,
    EmulatorThreads,
    GuestNuma,
    NumaMemory,
    OnFailure,
    Policy,
    Scope,
    Smt,
)
from kvplace.core.scalars import Bytes
from kvplace.core.topology import Topology
from kvplace.core.well_known_names import OPTING_IN
from tests.core.machines import make_numa_node, make_package, make_topology

GIB = Bytes(1 << 30)
NO_BINDING = {"kvplace.io/numa-memory": "off"}
"""For a VM on two sockets: the machine that runs a real QEMU may have one NUMA node."""
ISOLATED = {"kvplace.io/emulator-threads": "isolate"}


def one_core(a: int, b: int) -> Topology:
    """Make a machine with two CPUs that are the threads of one core."""
    return make_topology(
        packages=(make_package(0, a | b),),
        numa_nodes=(make_numa_node(0, a | b, GIB),),
        l3_groups=(a | b,),
        cores=(a | b,),
    )


def two_sockets(a: int, b: int) -> Topology:
    """Make a machine with two CPUs that are a socket each."""
    return make_topology(
        packages=(make_package(0, a), make_package(1, b)),
        numa_nodes=(
            make_numa_node(0, a, GIB, {}, {0: 10, 1: 21}),
            make_numa_node(1, b, GIB, {}, {0: 21, 1: 10}),
        ),
        l3_groups=(a, b),
        cores=(a, b),
    )


def a_reserved(a: int, b: int) -> Topology:
    """Make a machine with two cores, of which the host keeps the first for itself."""
    return make_topology(
        packages=(make_package(0, a | b),),
        numa_nodes=(make_numa_node(0, a | b, GIB),),
        l3_groups=(a | b,),
        cores=(a, b),
        reserved=a,
    )


@dataclass(frozen=True)
class Threads:
    """Where the threads of a VM run on a machine of two CPUs, a and b."""

    vcpus: str = "a b"
    """The CPUs of each vCPU, with blanks between."""
    emulator: str = "ab"
    on: Callable[[int, int], Topology] = one_core
    beside: Mapping[str, str] = field(default_factory=dict)
    """Other annotations of the VM."""


BOTH = Threads()
FIRST = Threads("a", "a", two_sockets)
APART = Threads("a b", "ab", two_sockets, NO_BINDING)
OUTSIDE = Threads("b", "a", a_reserved)
BESIDE = Threads("a", "b", beside={"kvplace.io/cpu-policy": "share"})
POOL = Threads("ab ab", "ab")

SCOPES = {
    Scope.ONE_SOCKET: BOTH,
    Scope.ONE_NUMA: FIRST,
    Scope.ONE_L3: BOTH,
    Scope.SPREAD_SOCKETS: APART,
    Scope.SPREAD_NUMA: APART,
    Scope.ANY: APART,
}
POLICIES = {
    Policy.EXCLUSIVE: OUTSIDE,
    Policy.SHARE: OUTSIDE,
    Policy.NUMA: POOL,
    Policy.IMMOVABLE: BOTH,
    Policy.NONE: None,
}


@dataclass(frozen=True)
class OptionValue:
    """One value of one key."""

    key: str
    value: str
    sets: Mapping[str, object]
    """The options, as fields of `PinningOptions`."""
    threads: Threads | None = BOTH
    """None for a VM that is not pinned."""

    def __str__(self) -> str:
        """Write it as in a list of annotations."""
        return f"{self.key}={self.value}"

    @property
    def annotations(self) -> dict[str, str]:
        """The annotations of a VM that opts in and has this value."""
        opting_in = {} if self.key in OPTING_IN else {"cpu-set": "one-socket"}
        return {**opting_in, self.key: self.value}


_Word = TypeVar("_Word", bound=Enum)


def _rows(key: str, option: str, values: Mapping[_Word, Threads | None]) -> list[OptionValue]:
    assert set(values) == set(type(next(iter(values)))), f"{key} has a value without a row"
    return [OptionValue(key, word.value, {option: word}, threads) for word, threads in values.items()]


VALUES: list[OptionValue] = [
    *_rows("cpu-set", "scope", SCOPES),
    *_rows("kvplace.io/cpu-set", "scope", SCOPES),
    *_rows("kvplace.io/cpu-policy", "policy", POLICIES),
    *_rows(
        "kvplace.io/smt",
        "smt",
        {
            Smt.PREFER: Threads("a", "b", beside=ISOLATED),
            Smt.REQUIRE: Threads("a", "b"),
            Smt.ISOLATE: Threads("a", "a"),
        },
    ),
    *_rows(
        "kvplace.io/emulator-threads",
        "emulator_threads",
        {
            EmulatorThreads.SHARED: OUTSIDE,
            EmulatorThreads.ISOLATE: BESIDE,
            EmulatorThreads.WITH_VCPUS: Threads("b", "b", a_reserved),
        },
    ),
    *_rows("kvplace.io/numa-memory", "numa_memory", dict.fromkeys(NumaMemory, BOTH)),
    *_rows("kvplace.io/guest-numa", "guest_numa", dict.fromkeys(GuestNuma, BOTH)),
    *_rows("kvplace.io/device-numa", "device_numa", dict.fromkeys(DeviceNuma, BOTH)),
    *_rows("kvplace.io/on-failure", "on_failure", dict.fromkeys(OnFailure, BOTH)),
    OptionValue("kvplace.io/explain", "true", {}),
    *(
        OptionValue("topology.crane.io/cpu-policy", policy.value, {"policy": policy}, POLICIES[policy])
        for policy in (Policy.NONE, Policy.EXCLUSIVE, Policy.NUMA, Policy.IMMOVABLE)
    ),
    OptionValue("topology.crane.io/topology-awareness", "true", {"scope": Scope.ONE_NUMA}, FIRST),
    *(
        OptionValue("qos.gocrane.io/cpu-manager", policy.value, {"policy": policy}, POLICIES[policy])
        for policy in (Policy.NONE, Policy.EXCLUSIVE, Policy.SHARE)
    ),
]
PINNED_VALUES = [(row, row.threads) for row in VALUES if row.threads is not None]
"""Those of VMs that are pinned, with their threads."""
PINNED_IDS = [str(row) for row, _ in PINNED_VALUES]
