"""The result of a rollout: counts, failures and times, for people and for programs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvplace.core.errors import ExitCode
from kvplace.core.quantity import counted, first_of
from kvplace.core.scalars import NodeName
from kvplace.core.vm_stages import Percentiles, VmStage
from kvplace.rollout.tracker import MakingState, TrackedVm

_SHOWN_NODES = 3

TIMED_STAGES = (VmStage.BOUND, VmStage.RUNNING, VmStage.PINNED)


@dataclass(frozen=True, slots=True)
class Failure:
    """A VM that is not ready, and the reason."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Counts:
    """How many VMs have reached each stage; a VM counts for all stages that it has passed."""

    wanted: int
    ready: int
    """VMs at their goal."""
    failed: int
    reached: Mapping[VmStage, int]

    @property
    def sentence(self) -> str:
        """All of it in one line."""
        stages = ", ".join(f"{count} {stage.value}" for stage, count in self.reached.items())
        failed = f", {self.failed} failed" if self.failed else ""
        return f"{stages}{failed}; ready: {self.ready} of {counted(self.wanted, 'VM')}"


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of a run, or the state that `status` finds."""

    rollout: str
    namespace: str
    counts: Counts
    failed: tuple[Failure, ...]
    ready: tuple[str, ...]
    """The names of the VMs at their goal."""
    unfinished: tuple[Failure, ...]
    """VMs that are not ready or not created yet, with the reason of their wait."""
    seconds: Mapping[VmStage, Percentiles]
    """How long VMs took from their creation to each stage."""
    timed_out: bool = False
    interrupted: bool = False
    duration: float | None = None
    """Seconds that the run took."""
    unmeasured: Mapping[str, NodeName] = field(default_factory=dict)
    """VMs that were to be pinned and only run, with their nodes: no agent measures there."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences that put the counts right."""
        if not self.unmeasured:
            return ()
        nodes = sorted(set(self.unmeasured.values()))
        vms = counted(len(self.unmeasured), "VM")
        where = f"{counted(len(nodes), 'node')} where no agent measures ({first_of(nodes, _SHOWN_NODES)})"
        return (
            f"{vms} on {where}: it is unknown whether they are pinned, so they count as ready when they run",
        )

    @property
    def exit_code(self) -> ExitCode:
        if self.interrupted:
            return ExitCode.INTERRUPTED
        if self.timed_out:
            return ExitCode.TIMED_OUT
        if not self.failed and not self.unfinished:
            return ExitCode.DONE
        return ExitCode.PARTLY_DONE

    def document(self) -> dict[str, Any]:
        """Write it as JSON; VMs that have timed out are among the failed."""
        failed = [*self.failed, *(self.unfinished if self.timed_out else ())]
        return {
            **{stage.value: count for stage, count in self.counts.reached.items()},
            "failed": [{"name": one.name, "reason": one.reason} for one in failed],
            "seconds": {
                stage.value: {
                    "p50": round(times.p50, 3),
                    "p95": round(times.p95, 3),
                    "max": round(times.max, 3),
                }
                for stage, times in self.seconds.items()
            },
            **({"notMeasured": sorted(self.unmeasured)} if self.unmeasured else {}),
        }


def by_reason(failures: Iterable[Failure]) -> Iterable[Sequence[Failure]]:
    """Group failures with reasons that differ only in the name of the VM, or of its pod."""
    groups: dict[str, list[Failure]] = {}
    for one in failures:
        own = re.escape(one.name) + r"(-[a-z0-9]{5}\b)?"
        groups.setdefault(re.sub(own, "", one.reason), []).append(one)
    return groups.values()


def count(vms: Iterable[TrackedVm], left_out: int = 0) -> Counts:
    """Count tracked VMs; `left_out` are VMs that are not even tried."""
    found = list(vms)
    stages = [vm.stage for vm in found]
    return Counts(
        len(found) + left_out,
        sum(vm.status is MakingState.READY for vm in found),
        sum(vm.status is MakingState.FAILED for vm in found) + left_out,
        {stage: sum(known is not None and known.includes(stage) for known in stages) for stage in VmStage},
    )


def report_of(
    rollout: str,
    namespace: str,
    vms: Iterable[TrackedVm],
    left_out: Mapping[str, str],
    *,
    timed_out: bool = False,
    interrupted: bool = False,
    duration: float | None = None,
) -> Report:
    """Sum up; `left_out` are VMs that were not tried, with the reason."""
    found = list(vms)
    failed = [Failure(vm.wanted.name, vm.failure) for vm in found if vm.failure]
    failed += [Failure(name, why) for name, why in left_out.items()]
    late = f" after {duration:.0f} s" if timed_out and duration is not None else ""
    unfinished = [
        Failure(vm.wanted.name, _unfinished(vm, late)) for vm in found if not vm.failure and not vm.is_ready
    ]
    times = {stage: [vm.seconds[stage] for vm in found if stage in vm.seconds] for stage in TIMED_STAGES}
    return Report(
        rollout,
        namespace,
        count(found, len(left_out)),
        tuple(failed),
        tuple(vm.wanted.name for vm in found if vm.is_ready and not vm.failure),
        tuple(unfinished),
        {stage: Percentiles.of(seconds) for stage, seconds in times.items()},
        timed_out,
        interrupted,
        duration,
        {
            vm.wanted.name: vm.observed.node
            for vm in found
            if vm.is_ready and vm.wanted.goal is not vm.goal and vm.stage is vm.goal
        },
    )


def _unfinished(vm: TrackedVm, late: str) -> str:
    waiting = f": {vm.waiting}" if vm.waiting else ""
    if vm.stage is None:
        return f"not made{late}{waiting}"
    return f"{vm.stage.value}, not {vm.goal.value}{late}{waiting}"
