"""The users of each CPU of a machine, also where ledger, machine and measurement contradict each other.

The rules of the ledger prevent two owners of one CPU, but a map must show the real state: placements of other
tools, answers of several programs put together, CPUs in use outside of kvplace, threads that run where they
were not placed. None of that is an error here: each contradiction is a `Fault` with one sentence.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from types import MappingProxyType

from kvplace.core.cpuset import cpus_of, format_cpu_list, mask_of, union
from kvplace.core.ledger import Claim, Ledger
from kvplace.core.placement import Placement
from kvplace.core.request import Policy
from kvplace.core.scalars import NO_CPUS, CpuId, CpuMask, PodUid
from kvplace.core.topology import Topology


class FaultKind(Enum):
    """A fault of some CPUs."""

    CONFLICT = "conflict"
    """Two VMs have it, a VM has a CPU that it must not have, or claims and owners differ."""
    DRIFT = "drift"
    """A thread runs where it was not placed, or does not run where it was."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A contradiction, and the CPUs that it is about."""

    kind: FaultKind
    cpus: CpuMask
    sentence: str


@dataclass(frozen=True)
class Occupancy:
    """A machine, its ledger, the CPUs in use outside of kvplace, and where VM threads were found."""

    topology: Topology
    ledger: Ledger
    foreign: CpuMask = NO_CPUS
    """CPUs in use outside of kvplace, for instance by the kubelet's static policy."""
    found: Mapping[PodUid, CpuMask] = field(default_factory=lambda: MappingProxyType({}))
    """CPUs where the pinned threads of a VM may really run, by its UID; absent where not measured."""
    placements: Mapping[PodUid, Placement] = field(default_factory=lambda: MappingProxyType({}))
    """The known placements by the UID of the VM: they state where QEMU's own threads run."""

    @cached_property
    def claims(self) -> tuple[Claim, ...]:
        """All claims, in the order of the lowest CPU that they use; owners without a claim get one."""
        claims = dict(self.ledger.claims)
        for uid in set(self.ledger.owners.values()) - set(claims):
            held = self.ledger.owned_by(uid)
            claims[uid] = Claim(uid, "", uid, "", Policy.EXCLUSIVE, held, held, {}, {}, "")
        return tuple(sorted(claims.values(), key=lambda claim: (_first(claim.cpus | claim.owned), claim.uid)))

    @cached_property
    def labels(self) -> Mapping[PodUid, str]:
        """The letters of each VM, by UID, in the order of `claims`, so that they follow the drawing."""
        return {claim.uid: label_of(index) for index, claim in enumerate(self.claims)}

    @cached_property
    def holders(self) -> Mapping[CpuId, tuple[PodUid, ...]]:
        """The UIDs that own each CPU, by CPU; more than one is a fault."""
        holders: dict[CpuId, list[PodUid]] = {}
        for claim in self.claims:
            for cpu in cpus_of(claim.owned):
                holders.setdefault(cpu, []).append(claim.uid)
        for cpu, uid in sorted(self.ledger.owners.items()):
            if uid not in holders.setdefault(cpu, []):
                holders[cpu].append(uid)
        return {cpu: tuple(uids) for cpu, uids in holders.items()}

    @cached_property
    def sharers(self) -> Mapping[CpuId, tuple[PodUid, ...]]:
        """The UIDs that share each CPU, by CPU."""
        return _by_cpu(
            (claim.uid, claim.cpus & ~claim.owned & ~(self.ledger.owned if claim.reserved else NO_CPUS))
            for claim in self.claims
        )

    @cached_property
    def qemu(self) -> Mapping[CpuId, tuple[PodUid, ...]]:
        """The UIDs with emulator or I/O threads on each CPU, by CPU."""
        return _by_cpu(
            (claim.uid, union([placement.emulator_cpus, *placement.io_thread_cpus]))
            for claim in self.claims
            if (placement := self.placements.get(claim.uid)) is not None
        )

    @cached_property
    def qemu_alone(self) -> CpuMask:
        """The CPUs where the owner has emulator or I/O threads, but no vCPU."""
        return mask_of(
            cpu
            for cpu, holders in self.holders.items()
            if any(
                uid in self.qemu.get(cpu, ()) and cpu not in (self.placements[uid].vcpus or (cpu,))
                for uid in holders
            )
        )

    @cached_property
    def strays(self) -> Mapping[CpuId, tuple[PodUid, ...]]:
        """The UIDs with threads that may run on a CPU where they were not placed, by CPU."""
        return _by_cpu(
            (claim.uid, self.found[claim.uid] & ~claim.cpus)
            for claim in self.claims
            if claim.uid in self.found
        )

    @cached_property
    def faults(self) -> tuple[Fault, ...]:
        """All faults: conflicts, then drift, each by its lowest CPU."""
        faults = [*self._conflicts(), *self._unlike_the_owners(), *self._beyond_the_machine(), *self._drift()]
        return tuple(sorted(faults, key=lambda fault: (fault.kind.value, _first(fault.cpus), fault.sentence)))

    @cached_property
    def faulty(self) -> Mapping[FaultKind, CpuMask]:
        """The CPUs of all faults, by kind."""
        cpus = dict.fromkeys(FaultKind, NO_CPUS)
        for fault in self.faults:
            cpus[fault.kind] |= fault.cpus
        return cpus

    def name(self, uid: PodUid) -> str:
        """Name a VM with its letters."""
        return self._names[uid]

    @cached_property
    def _names(self) -> Mapping[str, str]:
        return {claim.uid: f"{self.labels[claim.uid]} ({name_of_vm(claim)})" for claim in self.claims}

    def _conflicts(self) -> Iterator[Fault]:
        found: dict[tuple[tuple[PodUid, ...], tuple[PodUid, ...], str], list[CpuId]] = {}
        for cpu in cpus_of(mask_of(self.holders) | mask_of(self.sharers)):
            holders, sharers = self.holders.get(cpu, ()), self.sharers.get(cpu, ())
            others = self._others_at(cpu, bool(holders))
            if len(holders) > 1 or (holders and sharers) or others:
                found.setdefault((holders, sharers, others), []).append(cpu)
        for (holders, sharers, others), cpus in found.items():
            sentences = [f"owned by {self.name(uid)}" for uid in holders]
            sentences += [f"shared by {self.name(uid)}" for uid in sharers]
            sentences += [others] if others else []
            yield _fault(FaultKind.CONFLICT, mask_of(cpus), " and ".join(sentences))

    def _others_at(self, cpu: CpuId, owned: bool) -> str:
        if self.foreign >> cpu & 1:
            return "in use outside of kvplace"
        return "reserved for the host" if owned and self.topology.reserved >> cpu & 1 else ""

    def _unlike_the_owners(self) -> Iterator[Fault]:
        for uid, claim in self.ledger.claims.items():
            unowned = claim.owned & ~self.ledger.owned
            if unowned:
                sentence = f"claimed by {self.name(uid)} as its own, but without an owner in the ledger"
                yield _fault(FaultKind.CONFLICT, unowned, sentence)
            if unclaimed := self.ledger.owned_by(uid) & ~claim.owned:
                sentence = f"owned by {self.name(uid)}, and its claim does not contain it"
                yield _fault(FaultKind.CONFLICT, unclaimed, sentence)
        for uid in sorted(set(self.ledger.owners.values()) - set(self.ledger.claims)):
            held = self.ledger.owned_by(uid)
            sentence = f"owned by {self.name(uid)}, which has no claim"
            yield _fault(FaultKind.CONFLICT, held, sentence)

    def _beyond_the_machine(self) -> Iterator[Fault]:
        machine = self.topology.cpus
        for claim in self.claims:
            if lacking := (claim.cpus | claim.owned) & ~machine:
                sentence = f"placed for {self.name(claim.uid)}, but the machine has no such CPU"
                yield _fault(FaultKind.CONFLICT, lacking, sentence)
        if lacking := self.foreign & ~machine:
            sentence = "in use outside of kvplace, but the machine has no such CPU"
            yield _fault(FaultKind.CONFLICT, lacking, sentence)

    def _drift(self) -> Iterator[Fault]:
        for claim in self.claims:
            if claim.uid not in self.found:
                continue
            found = self.found[claim.uid]
            name = self.name(claim.uid)
            if astray := found & ~claim.cpus:
                sentence = f"threads of {name} may run here, but were not placed here"
                yield _fault(FaultKind.DRIFT, astray, sentence)
            if empty := claim.cpus & ~found:
                sentence = f"placed for {name}, but none of its threads may run here"
                yield _fault(FaultKind.DRIFT, empty, sentence)


def _fault(kind: FaultKind, cpus: CpuMask, sentence: str) -> Fault:
    return Fault(kind, cpus, f"CPU {format_cpu_list(cpus)}: {sentence}")


def name_of_vm(claim: Claim) -> str:
    """Name the VM of a claim: its VMI or pod, with the namespace where there is one.

    The name of a waiting VM states that its CPUs are reserved: nothing runs on them.
    """
    kept = f" (reserved until {claim.reserved.until})" if claim.reserved is not None else ""
    return printable(claim.vm_name.removeprefix("/") + kept)


def printable(text: str) -> str:
    """Replace control characters, which would steer a terminal or break XML, by U+FFFD."""
    return "".join(
        character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text
    )


def label_of(index: int) -> str:
    """Give the letters of the n-th VM: A to Z, then AA, AB and so on."""
    label = ""
    index += 1
    while index:
        index, letter = divmod(index - 1, 26)
        label = string.ascii_uppercase[letter] + label
    return label


def _by_cpu(sets: Iterable[tuple[PodUid, CpuMask]]) -> dict[CpuId, tuple[PodUid, ...]]:
    found: dict[CpuId, list[PodUid]] = {}
    for uid, cpus in sets:
        for cpu in cpus_of(cpus):
            found.setdefault(cpu, []).append(uid)
    return {cpu: tuple(uids) for cpu, uids in found.items()}


def _first(cpus: CpuMask) -> int:
    return (cpus & -cpus).bit_length()
