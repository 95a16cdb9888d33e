"""Cpusets set by writing cgroups, for nodes with a container runtime without NRI.

The kernel reports every new container and every write to a cpuset. So a container gets its set when its
cgroup appears, which is before its program starts, and what others write is put back at once. What changes
without a write, as when a CPU goes offline, comes with the state of the node; a sweep now and then finds the
rest.

Sets shrink before others grow, so that a CPU never belongs to two claims. Only files are written. A systemd
that writes its own value again on `daemon-reload` makes one more write that is reported and put back; setting
its property `AllowedCPUs` instead would take the right to command the host's systemd.

Until the kubelet has reported which container of a VM's pod is `compute`, that one is on the shared pool.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvplace.agent import metrics
from kvplace.agent.conditions import TopologyCondition, TopologyReason
from kvplace.agent.containers import Container
from kvplace.agent.cpusets import Cpusets, CpuSetting, decide_cpusets
from kvplace.agent.node_report import NodeReport
from kvplace.agent.own_container import set_own_threads
from kvplace.agent.own_node import OwnNode
from kvplace.agent.repair_history import RepairHistory
from kvplace.core.cpuset import format_cpu_list, mask_of
from kvplace.core.enforcement import Enforcement
from kvplace.core.errors import Misconfigured, Unavailable
from kvplace.core.quantity import counted
from kvplace.core.scalars import NO_CPUS, ContainerId, CpuMask, PodUid
from kvplace.kube.conditions import Condition
from kvplace.kube.objects import COMPUTE
from kvplace.kube.records import PodRecord
from kvplace.linux.affinity import Tid, affinity_of
from kvplace.linux.container_cgroups import ContainerCgroup
from kvplace.linux.container_watch import Changes, ContainerWatch
from kvplace.linux.cpuset_hierarchy import CpusetFile, CpusetHierarchy
from kvplace.linux.kernel_files import Gone, NotPermitted

log = logging.getLogger(__name__)

SWEEP_S = 30.0
"""How often all cpusets are read, for what no event was about."""
SWEEP_WITHOUT_EVENTS_S = 1.0
"""The same where the kernel does not report every change."""
STARTING_S = 10.0
"""How long a container may be starting: its runtime writes its cpuset several times, which is not drift."""


@dataclass(slots=True)
class _Known:
    """A container, and what has been done about it."""

    cgroup: ContainerCgroup
    container: Container
    """Its `cpus` are what its cgroup states, as far as has been reported."""
    since: float
    """When its cgroup was seen first, in seconds of a monotonic clock."""
    in_force: CpuSetting | None = None
    """What it has had: another value in its cgroup is drift."""
    history: RepairHistory = field(default_factory=RepairHistory)
    problem: str = ""
    """Why it has not what was decided."""
    limit: str = ""
    """Why it may not use what it is set to."""
    by_threads: bool = False
    """Whether it is our own, and its threads are set because its cgroup may not be written."""


class CgroupEnforcement:
    """Keeps the cpuset of every container as decided."""

    def __init__(
        self,
        own: OwnNode,
        report: NodeReport,
        hierarchy: CpusetHierarchy,
        *,
        observes_only: bool = False,
        sweep_s: float = SWEEP_S,
        starting_s: float = STARTING_S,
        own_pid: int | None = None,
    ) -> None:
        """With `observes_only` it knows the containers and writes nothing; `own_pid` is this process."""
        self._own = own
        self._report = report
        self._hierarchy = hierarchy
        self._observes_only = observes_only
        self._sweep_s = sweep_s
        self._starting_s = starting_s
        self._own_pid = os.getpid() if own_pid is None else own_pid
        self._next_sweep = 0.0
        self._obstacle = ""
        """Why the kernel does not report every change."""
        self._wake = asyncio.Event()
        self._known: dict[ContainerId, _Known] = {}
        self._other_state = True
        """Whether the state of the node has changed since the last decision."""
        self._other_pods: set[PodUid] = set()
        """Pods with a record that has changed since the last decision."""
        self._online = NO_CPUS
        self._decided = Cpusets(NO_CPUS, {}, {})
        self.repairs = 0
        """Cpusets that others had changed, and that were set again."""

    def containers(self) -> Iterable[Container]:
        return [known.container for known in self._known.values()]

    def cpusets(self) -> Cpusets:
        return self._decided

    def cgroup_of(self, container: ContainerId) -> Path:
        found = self._known.get(container)
        if found is None:
            raise Gone(f"container {container} has no cgroup")
        return found.cgroup.folder

    async def run(self) -> None:
        """Enforce until cancelled; begins when the objects of the node are known.

        Without the ledger the CPUs of VMs would seem free.
        """
        await self._own.wait_until_known()
        watch = ContainerWatch(self._hierarchy.root)
        loop = asyncio.get_running_loop()
        loop.add_reader(watch.fileno(), self._wake.set)
        self._own.subscribe(self._state_changed)
        self._own.pods.subscribe(self._pod_changed)
        try:
            while True:
                self._apply(watch, await self._next(watch))
        finally:
            loop.remove_reader(watch.fileno())
            watch.close()

    def _state_changed(self) -> None:
        self._other_state = True
        self._wake.set()

    def _pod_changed(self, before: PodRecord | None, after: PodRecord | None) -> None:
        if (pod := after or before) is not None:
            self._other_pods.add(pod.uid)
            self._wake.set()

    async def _next(self, watch: ContainerWatch) -> Changes:
        """Wait until something may have to be written."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._next_sweep):
                await self._wake.wait()
        self._wake.clear()
        changes = watch.read()
        if loop.time() >= self._next_sweep:
            self._next_sweep = loop.time() + self._sweep_s
            watch.look_everywhere()
            now = time.monotonic()
            for known in self._known.values():
                known.history = known.history.intact(now)
            changes = replace(changes, everything=True)
        self._obstacle = watch.obstacle
        if self._obstacle:
            self._next_sweep = min(self._next_sweep, loop.time() + SWEEP_WITHOUT_EVENTS_S)
        return changes

    def _apply(self, watch: ContainerWatch, changes: Changes) -> None:
        """Take in what has changed, decide, and write what is not as decided."""
        online = self._own.state.topology.cpus
        everything = changes.everything or online != self._online
        self._online = online
        members = self._update_members(watch, changes)
        for known in list(self._known.values()):
            if everything or known.cgroup.id in changes.written:
                self._read(known)
            # A pod that was deleted by force stays what it was until its containers have ended.
            if known.cgroup.pod_uid in self._other_pods and self._own.pods.get(known.cgroup.pod_uid):
                known.container = self._described(known.cgroup, known.container.cpus)
        candidates: Iterable[ContainerId] = changes.written
        if everything or members or self._other_state or self._other_pods:
            self._decide()
            candidates = list(self._known)
        self._carry_out([self._known[one] for one in candidates if one in self._known], changes.appeared)
        self._say()

    def _update_members(self, watch: ContainerWatch, changes: Changes) -> bool:
        """Forget what has ended and take in what is new; states whether there was any."""
        ended = (self._known.keys() - watch.containers.keys()) | (changes.appeared & self._known.keys())
        for container in ended:
            del self._known[container]
        new = [watch.containers[one] for one in watch.containers.keys() - self._known.keys()]
        now = time.monotonic()
        for cgroup in new:
            self._known[cgroup.id] = _Known(cgroup, self._described(cgroup, NO_CPUS), now)
            self._read(self._known[cgroup.id])
        return bool(ended or new)

    def _described(self, cgroup: ContainerCgroup, cpus: CpuMask) -> Container:
        pod = self._own.pods.get(cgroup.pod_uid)
        return Container(
            id=cgroup.id,
            name=COMPUTE if pod is not None and pod.vmi and pod.compute_container == cgroup.id else "",
            pod_uid=cgroup.pod_uid,
            namespace="" if pod is None else pod.namespace,
            pod="" if pod is None else pod.name,
            in_vm_pod=pod is not None and bool(pod.vmi),
            cpus=cpus,
        )

    def _decide(self) -> None:
        state = self._own.state
        if self._observes_only:
            state = replace(state, observes_only=True)
        self._other_state = False
        self._other_pods.clear()
        decided = decide_cpusets(state, self.containers())
        if decided != self._decided:
            self._decided = decided
        self._report.enforce(Enforcement.NONE if state.observes_only else Enforcement.CGROUP)

    def _carry_out(self, candidates: Collection[_Known], appeared: Collection[ContainerId]) -> None:
        wanted = self._decided.settings
        wrong = [
            known
            for known in candidates
            if (setting := wanted.get(known.cgroup.id)) is not None
            and known.container.cpus != setting.cpus
            and self._may_set(known, setting, CpusetFile.CPUS, known.container.cpus)
        ]
        had = {known.cgroup.id: known.container.cpus for known in wrong}
        # What has only appeared is about to run; it comes first.
        wrong.sort(key=lambda known: known.cgroup.id not in appeared)
        for known in wrong:
            self._shrink(known, wanted[known.cgroup.id].cpus)
        for known in wrong:
            self._write(known, wanted[known.cgroup.id].cpus)
        for known in candidates:
            setting = wanted.get(known.cgroup.id)
            if setting is not None and known.container.cpus == setting.cpus:
                known.problem = ""
                if known.cgroup.id in had:
                    self._count(known, setting, CpusetFile.CPUS, had[known.cgroup.id])
                if setting.mems is None or self._gets_memory_nodes(known, setting, mask_of(setting.mems)):
                    known.in_force = setting

    def _may_set(self, known: _Known, setting: CpuSetting, file: CpusetFile, has: CpuMask) -> bool:
        """Return whether a cpuset may be set; pauses where repairs do not last."""
        if not self._has_drifted(known, setting) or known.history.may_repair(time.monotonic()):
            return True
        known.problem = (
            f"{known.cgroup.folder} is set to {_in_words(file, has)} again and again by another program;"
            " stop that program."
        )
        return False

    def _count(self, known: _Known, setting: CpuSetting, file: CpusetFile, had: CpuMask) -> None:
        """Count a cpuset that has been set, if others had changed it."""
        if self._has_drifted(known, setting):
            known.history = known.history.repaired(time.monotonic())
            self.repairs += 1
            metrics.CPUSET_REPAIRS.inc()
            log.warning("%s was set to %s and is set back", known.cgroup.folder, _in_words(file, had))

    def _has_drifted(self, known: _Known, setting: CpuSetting) -> bool:
        return known.in_force == setting and time.monotonic() - known.since >= self._starting_s

    def _shrink(self, known: _Known, cpus: CpuMask) -> None:
        """Take from a container what it must not have any more."""
        if known.container.cpus & ~cpus:
            self._write(known, known.container.cpus & cpus or cpus)

    def _write(self, known: _Known, cpus: CpuMask) -> None:
        if known.container.cpus == cpus:
            return
        with self._noting_problems(known):
            try:
                self._hierarchy.set(known.cgroup.folder, cpus)
            except NotPermitted:
                if not set_own_threads(known.cgroup.folder, cpus, self._own_pid):
                    raise
                known.by_threads = True
            known.container = replace(known.container, cpus=cpus)
            self._compare(known)

    def _gets_memory_nodes(self, known: _Known, setting: CpuSetting, wanted: CpuMask) -> bool:
        folder, file = known.cgroup.folder, CpusetFile.MEMORY_NODES
        gets_them = False
        with self._noting_problems(known):
            gets_them = self._hierarchy.is_set(folder, wanted, file)
            had = self._hierarchy.configured(folder, file)
            if not gets_them and self._may_set(known, setting, file, had):
                self._hierarchy.set(folder, wanted, file)
                self._count(known, setting, file, had)
                gets_them = True
        return gets_them

    def _read(self, known: _Known) -> None:
        with self._noting_problems(known):
            folder = known.cgroup.folder
            cpus = self._hierarchy.configured(folder) or self._hierarchy.effective(folder)
            if known.by_threads:
                cpus = affinity_of(Tid(self._own_pid))
            known.container = replace(known.container, cpus=cpus)
            self._compare(known)

    @contextlib.contextmanager
    def _noting_problems(self, known: _Known) -> Iterator[None]:
        try:
            yield
        except Gone:
            self._known.pop(known.cgroup.id, None)
        except (Unavailable, Misconfigured) as error:
            known.problem = f"{error}."

    def _compare(self, known: _Known) -> None:
        """Note a cgroup that may not use what it is set to."""
        if not known.by_threads:
            limit = self._hierarchy.limit(known.cgroup.folder, known.container.cpus & self._online)
            known.limit = limit and f"{limit}."

    def _say(self) -> None:
        if self._report.enforcement is Enforcement.NONE:
            self._report.drop_condition(TopologyCondition.CPUSETS_ENFORCED)
            return
        self._report.put_condition(self._condition())

    def _condition(self) -> Condition:
        if problems := [text for known in self._known.values() if (text := known.problem or known.limit)]:
            why = f"{counted(len(problems), 'container')}: {problems[0]}"
            return Condition(TopologyCondition.CPUSETS_ENFORCED, False, TopologyReason.CGROUPS_NOT_SET, why)
        if self._obstacle:
            why = f"{self._obstacle}; cgroups are read every {SWEEP_WITHOUT_EVENTS_S:g} s."
            return Condition(
                TopologyCondition.CPUSETS_ENFORCED, False, TopologyReason.CHANGES_NOT_REPORTED, why
            )
        good = "The cgroup of every container is set as decided."
        return Condition(TopologyCondition.CPUSETS_ENFORCED, True, TopologyReason.CGROUPS_SET, good)


def _in_words(file: CpusetFile, mask: CpuMask) -> str:
    return f"{'CPU' if file is CpusetFile.CPUS else 'NUMA node'} {format_cpu_list(mask)}"
