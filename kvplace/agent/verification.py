"""Compares the measurement of a pod with its plan, and derives the condition kvplace.io/Pinned from it.

A pod is pinned when nothing differs. The comparison is pure: measured and wanted values go in,
differences come out, each a sentence for people.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

from kvplace.agent.back_off import MOST_REPAIRS, PERIOD_S
from kvplace.agent.conditions import PinnedReason
from kvplace.agent.node_plan import PodPlan
from kvplace.core.cpuset import format_cpu_list, mask_of
from kvplace.core.scalars import NO_BYTES, NO_CPUS, Bytes, CpuMask, NumaId
from kvplace.core.well_known_names import PINNED
from kvplace.kube.object_records import Condition
from kvplace.libvirt.domain_pins import DomainPins
from kvplace.linux.threads import ThreadName, ThreadRole, Tid

MISPLACED_ALLOWED = Bytes(256 * 1024 * 1024)
"""Memory outside the nodes of a strict binding that does not count as a difference: virt-launcher and libvirt
use it."""


@dataclass(frozen=True, slots=True)
class QemuThread:
    """One thread as the kernel has it."""

    tid: Tid
    name: ThreadName
    cpus: CpuMask
    """The online CPUs that it may run on."""


@dataclass(frozen=True)
class Measurement:
    """One reading of one pod."""

    threads: tuple[QemuThread, ...] = ()
    """The threads of its QEMU; none for a plain pod, and for a VM before its QEMU runs."""
    cpusets: Mapping[str, CpuMask] = field(default_factory=lambda: MappingProxyType({}))
    """The effective cpuset of each container that runs the claim, by container name."""
    memory: Mapping[NumaId, Bytes] = field(default_factory=lambda: MappingProxyType({}))
    """Memory of the VM by NUMA node; empty where it was not read."""

    @cached_property
    def io_threads(self) -> Mapping[int, int]:
        """The position of each I/O thread among all of them in ascending order, by its number."""
        found = {thread.name.number for thread in self.threads if thread.name.role is ThreadRole.IO_THREAD}
        return {number: position for position, number in enumerate(sorted(found))}

    @property
    def cpus(self) -> CpuMask:
        """The CPUs that the pod's threads may run on now."""
        found = NO_CPUS
        for cpus in [thread.cpus for thread in self.threads] or self.cpusets.values():
            found |= cpus
        return found


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference between a pod and its plan; as text one sentence."""

    reason: PinnedReason
    """The reason of a condition that names this difference first."""
    sentence: str = ""
    """Empty for the difference of a thread, which makes it when it is asked for."""
    thread: QemuThread | None = None
    """The thread that may run on other CPUs than it should."""
    should: CpuMask = NO_CPUS
    """The CPUs of that thread."""

    def __str__(self) -> str:
        if self.thread is None:
            return self.sentence
        name, has, should = self.thread.name, format_cpu_list(self.thread.cpus), format_cpu_list(self.should)
        if self.reason is PinnedReason.CPUS_OFFLINE:
            return f"{name} runs on CPU {has}, because CPU {should} is offline"
        return f"{name} may run on CPU {has or 'none'} instead of {should}"


def differences(pod: PodPlan, measured: Measurement) -> tuple[Difference, ...]:
    """State the differences; none when the pod is pinned as its placement states."""
    return (
        *_threads(pod, measured),
        *_missing(pod, measured),
        *_cpusets(pod, measured),
        *_memory(pod, measured),
    )


def _threads(pod: PodPlan, measured: Measurement) -> Iterator[Difference]:
    if not pod.vm:
        return
    for thread in measured.threads:
        should = pod.cpus_of(thread.name, measured.io_threads)
        if not should:
            continue
        # The list of online CPUs may be a moment old.
        if thread.cpus in (should, should & pod.online):
            continue
        if should & pod.online:
            yield Difference(PinnedReason.THREADS_ELSEWHERE, thread=thread, should=should & pod.online)
        else:
            yield Difference(PinnedReason.CPUS_OFFLINE, thread=thread, should=should)


def _missing(pod: PodPlan, measured: Measurement) -> Iterator[Difference]:
    if pod.vm and measured.threads:
        found = {thread.name.number for thread in measured.threads if thread.name.role is ThreadRole.VCPU}
        for vcpu in range(len(pod.placement.vcpus)):
            if vcpu not in found:
                yield Difference(PinnedReason.VCPU_MISSING, f"vCPU {vcpu} has no thread")


def _cpusets(pod: PodPlan, measured: Measurement) -> Iterator[Difference]:
    should = pod.cpuset & pod.online
    for container, has in measured.cpusets.items():
        if should and has != should:
            yield Difference(
                PinnedReason.CPUSET_DIFFERS,
                f"the cpuset of container {container} is CPU {format_cpu_list(has) or 'none'}, "
                f"{'wider' if has & ~should else 'narrower'} than {format_cpu_list(should)}",
            )


def _memory(pod: PodPlan, measured: Measurement) -> Iterator[Difference]:
    if pod.measures_memory:
        nodes = pod.placement.memory_nodes
        wanted = format_cpu_list(mask_of(nodes))
        elsewhere = {node: amount for node, amount in measured.memory.items() if node not in nodes}
        if sum(elsewhere.values(), NO_BYTES) > MISPLACED_ALLOWED:
            for node, amount in sorted(elsewhere.items()):
                sentence = f"{amount >> 20} MiB are on NUMA node {node} instead of {wanted}"
                yield Difference(PinnedReason.MEMORY_ELSEWHERE, sentence)


_SHOWN = 3
"""Differences that a message names; the others are only counted."""
_KINDS = {
    ThreadRole.VCPU: "vCPUs",
    ThreadRole.IO_THREAD: "I/O threads",
    **dict.fromkeys((ThreadRole.EMULATOR, ThreadRole.VHOST, ThreadRole.MIGRATION), "emulator threads"),
}
"""The kinds of threads that get CPUs of their own from a placement."""


@dataclass(frozen=True, slots=True)
class PodFinding:
    """One check of one pod: its plan, the measurement after repairs, and the differences between the two."""

    plan: PodPlan
    measured: Measurement = field(default_factory=Measurement)
    differences: tuple[Difference, ...] = ()
    """Differences after the repair."""
    problem: str = ""
    """The error that kept the pod from being read or set."""
    given_up: bool = False
    """Whether repairs were undone so often that the agent tries only now and then."""
    drift: tuple[Difference, ...] = ()
    """Drift since the last check: differences that this check found at its begin."""
    pid: int = 0
    """The process of its QEMU; 0 where there is none."""
    pins: DomainPins | None = None
    """The pins that libvirt does not have yet; None when it has all."""

    @property
    def in_order(self) -> bool:
        """Whether nothing differs, and there is nothing to try again or to report."""
        return not (self.differences or self.problem or self.drift) and self.pins is None

    @property
    def follows(self) -> bool:
        """Whether every thread is on its CPUs; cpuset and memory do not count."""
        others = (PinnedReason.CPUSET_DIFFERS, PinnedReason.MEMORY_ELSEWHERE)
        return not self.problem and all(found.reason in others for found in self.differences)

    @property
    def is_reportable(self) -> bool:
        """Whether there is a state to report: not for a VM before its QEMU runs."""
        return not self.plan.vm or bool(self.measured.threads or self.problem or self.plan.refusal)

    @property
    def as_placed(self) -> bool:
        """Whether everything was read and is as the placement states."""
        return not (self.differences or self.plan.refusal or self.problem)

    @property
    def explanation(self) -> str:
        """The refusal, the problem or the differences in one sentence; empty when all is as placed."""
        if self.plan.refusal is not None:
            return self.plan.refusal.message
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
        """The condition of the pod; its message begins with the checked revision."""
        floats = self.plan.placement.floats
        floating = f"the VM floats on CPU {format_cpu_list(self.measured.cpus)}"
        good = floating if floats else f"{_where(self.measured)} as placed"
        return Condition(
            PINNED,
            self.as_placed and not floats,
            self._reason,
            f"revision {self.plan.revision}: {self.explanation or good}",
        )

    @property
    def _reason(self) -> PinnedReason:
        if self.plan.refusal is not None:
            return self.plan.refusal.reason
        if self.problem:
            return PinnedReason.NOT_MEASURED
        if not self.differences:
            return PinnedReason.FLOATS if self.plan.placement.floats else PinnedReason.AS_PLACED
        if self.given_up:
            return PinnedReason.REPAIRS_UNDONE
        return self.differences[0].reason


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
