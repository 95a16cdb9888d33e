"""The agent's report about one pod: its condition kvplace.io/Pinned, and the words for what differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvplace.agent.conditions import PinnedReason
from kvplace.agent.node_plan import ClaimRefusal
from kvplace.agent.repair_history import MOST_REPAIRS, PERIOD_S
from kvplace.agent.verification import (
    CpusetDifference,
    Difference,
    Measurement,
    MemoryDifference,
    MissingThread,
    OfflineDifference,
    ThreadDifference,
)
from kvplace.core.cpuset import format_cpu_list
from kvplace.core.marks import PINNED
from kvplace.core.scalars import NO_CPUS
from kvplace.kube.conditions import Condition
from kvplace.linux.qemu import ThreadRole

_SHOWN = 3
"""Differences that a message names; the others are only counted."""
_KINDS = {
    ThreadRole.VCPU: "vCPUs",
    ThreadRole.IO_THREAD: "I/O threads",
    **dict.fromkeys((ThreadRole.EMULATOR, ThreadRole.VHOST, ThreadRole.MIGRATION), "emulator threads"),
}
"""The kinds of threads that get CPUs of their own from a placement."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a check of one pod."""

    revision: int
    measured: Measurement
    differences: tuple[Difference, ...] = ()
    floats: bool = False
    """Whether its placement gives it no CPUs of its own."""
    given_up: bool = False
    """Whether repairs were undone so often that the agent tries only now and then."""
    refusal: ClaimRefusal | None = None
    """Why the claim does not get its CPUs."""
    problem: str = ""
    """Why it could not be read or repaired."""

    @property
    def as_placed(self) -> bool:
        """Whether everything was read and is as the placement states."""
        return not (self.differences or self.refusal or self.problem)

    @property
    def drift(self) -> str:
        """The differences, in one sentence; empty when there are none."""
        if self.refusal is not None:
            return self.refusal.message
        if self.problem:
            return self.problem
        sentence = differences_in_words(self.differences)
        if self.given_up and sentence:
            sentence += (
                f"; something else undid {MOST_REPAIRS} repairs within {PERIOD_S:g} s, so the next ones are "
                f"{PERIOD_S:g} s apart"
            )
        return sentence

    @property
    def condition(self) -> Condition:
        """The condition of the pod; its message begins with the revision that it is about."""
        floating = f"the VM floats on CPU {format_cpu_list(self.measured.cpus)}"
        good = floating if self.floats else f"{_where(self.measured)} as placed"
        return Condition(
            PINNED,
            self.as_placed and not self.floats,
            self._reason,
            f"revision {self.revision}: {self.drift or good}",
        )

    @property
    def _reason(self) -> PinnedReason:
        if self.refusal is not None:
            return self.refusal.reason
        if self.problem:
            return PinnedReason.NOT_MEASURED
        if not self.differences:
            return PinnedReason.FLOATS if self.floats else PinnedReason.AS_PLACED
        if self.given_up:
            return PinnedReason.REPAIRS_UNDONE
        match self.differences[0]:
            case ThreadDifference():
                return PinnedReason.THREADS_ELSEWHERE
            case OfflineDifference():
                return PinnedReason.CPUS_OFFLINE
            case MissingThread():
                return PinnedReason.VCPU_MISSING
            case CpusetDifference():
                return PinnedReason.CPUSET_DIFFERS
            case MemoryDifference():
                return PinnedReason.MEMORY_ELSEWHERE


def _where(measured: Measurement) -> str:
    """Name the CPUs of each kind of thread; once where they are the same for all."""
    found = dict.fromkeys(_KINDS.values(), NO_CPUS)
    for thread in measured.threads:
        found[_KINDS[thread.name.role]] |= thread.cpus
    present = {kind: format_cpu_list(cpus) for kind, cpus in found.items() if cpus}
    if len(set(present.values())) < 2:
        return f"all threads run on CPU {format_cpu_list(measured.cpus)}"
    return ", ".join(f"{kind} run on CPU {cpus}" for kind, cpus in present.items())


def differences_in_words(differences: Sequence[Difference]) -> str:
    """Name the first differences, and the number of the others."""
    words = ", ".join(str(difference) for difference in differences[:_SHOWN])
    more = len(differences) - _SHOWN
    return f"{words} and {more} more" if more > 0 else words
