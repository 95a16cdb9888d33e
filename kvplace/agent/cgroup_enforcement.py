"""Cpusets set by writing cgroups, for nodes whose container runtime has no NRI.

The kernel reports every new container and every write to a cpuset. So a container gets its set when its
cgroup appears, which is before its program starts, and what others write is put back at once. What changes
without a write, as when a CPU goes offline, comes with the state of the node; a sweep now and then finds the
rest.

Sets shrink before others grow, so that a CPU never belongs to two claims. Only files are written. A systemd
that writes its own value again on `daemon-reload` makes one more write that is reported and put back; setting
its property `AllowedCPUs` instead would take the right to command the host's systemd.

Until the kubelet has told which container of a VM's pod is `compute`, that container is on the shared pool.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from kvplace.agent import metrics
from kvplace.agent.containers import COMPUTE, Container
from kvplace.agent.cpusets import Cpusets, CpuSetting, decide_cpusets
from kvplace.agent.enforced_containers import CPUSETS_ENFORCED
from kvplace.agent.node_report import NodeReport
from kvplace.agent.own_node import OwnNode
from kvplace.agent.repair_history import RepairHistory
from kvplace.core.cpuset import format_cpu_list, mask_of
from kvplace.core.enforcement import Enforcement
from kvplace.core.errors import Misconfigured, Unavailable
from kvplace.core.scalars import NO_CPUS, ContainerId, CpuMask
from kvplace.core.topology import Topology
from kvplace.kube.conditions import Condition
from kvplace.linux.container_cgroups import ContainerCgroup
from kvplace.linux.container_watch import Changes, ContainerWatch
from kvplace.linux.cpuset_hierarchy import CpusetFile, CpusetHierarchy
from kvplace.linux.kernel_files import Gone

log = logging.getLogger(__name__)

SWEEP_S = 30.0
"""How often all cpusets are read, for what no event was about."""


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
    ) -> None:
        """With `observes_only` it knows the containers and writes nothing."""
        self._own = own
        self._report = report
        self._hierarchy = hierarchy
        self._observes_only = observes_only
        self._sweep_s = sweep_s
        self._next_sweep = 0.0
        self._wake = asyncio.Event()
        self._watch: ContainerWatch | None = None
        self._cpus: dict[ContainerId, CpuMask] = {}
        """What the cgroup of each container says, as far as has been reported."""
        self._set: dict[ContainerId, CpuSetting] = {}
        """What has been in force for each container: another value in its cgroup is drift."""
        self._histories: dict[ContainerId, RepairHistory] = {}
        self._problems: dict[ContainerId, str] = {}
        self._limited: dict[ContainerId, str] = {}
        self._containers: list[Container] = []
        self._decided = Cpusets(NO_CPUS, {}, {})
        self._topology: Topology | None = None
        self.repairs = 0
        """Cpusets that others had changed, and that were set again."""

    def containers(self) -> Iterable[Container]:
        return self._containers

    def cpusets(self) -> Cpusets:
        return self._decided

    def cgroup_of(self, container: ContainerId) -> Path:
        found = None if self._watch is None else self._watch.containers.get(container)
        if found is None:
            raise Gone(f"container {container} has no cgroup")
        return found.folder

    async def run(self) -> None:
        """Enforce until cancelled; begins when the objects of the node are known.

        Without the ledger the CPUs of VMs would look free.
        """
        for store in self._own.stores:
            await store.wait_until_synced()
        watch = self._watch = ContainerWatch(self._hierarchy.root)
        loop = asyncio.get_running_loop()
        loop.add_reader(watch.fileno(), self._wake.set)
        self._own.subscribe(self._wake.set)
        self._own.pods.subscribe(lambda _before, _after: self._wake.set())
        try:
            while True:
                self._apply(watch, await self._next(watch))
        finally:
            loop.remove_reader(watch.fileno())
            watch.close()

    async def _next(self, watch: ContainerWatch) -> Changes:
        """Wait until something may have to be written."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._next_sweep):
                await self._wake.wait()
        self._wake.clear()
        changes = watch.read()
        if loop.time() < self._next_sweep:
            return changes
        self._next_sweep = loop.time() + self._sweep_s
        watch.look_everywhere()
        now = time.monotonic()
        self._histories = {known: history.intact(now) for known, history in self._histories.items()}
        return Changes(appeared=frozenset(watch.containers.keys() - self._cpus.keys()), everything=True)

    def _apply(self, watch: ContainerWatch, changes: Changes) -> None:
        """Decide, and write what is not as decided."""
        state = self._own.state
        if self._observes_only:
            state = replace(state, observes_only=True)
        everything = changes.everything or state.topology is not self._topology
        self._topology = state.topology
        for known in (self._cpus.keys() - watch.containers.keys()) | changes.appeared:
            self._forget(known)
        for cgroup in list(watch.containers.values()):
            if everything or cgroup.id not in self._cpus or cgroup.id in changes.written:
                self._read(cgroup)
        self._containers = [self._container(watch.containers[known]) for known in self._cpus]
        decided = decide_cpusets(state, self._containers)
        if decided != self._decided:
            self._decided = decided
        wrong = [
            watch.containers[container]
            for container, setting in decided.settings.items()
            if self._cpus[container] != setting.cpus
        ]
        allowed = [cgroup for cgroup in wrong if self._may_set(cgroup, decided.settings[cgroup.id])]
        # What has only appeared is about to run; it comes first.
        allowed.sort(key=lambda cgroup: cgroup.id not in changes.appeared)
        for cgroup in allowed:
            self._shrink(cgroup, decided.settings[cgroup.id])
        for cgroup in allowed:
            self._write(cgroup, decided.settings[cgroup.id].cpus)
        for container, setting in decided.settings.items():
            if self._cpus.get(container) == setting.cpus:
                self._set[container] = setting
                self._problems.pop(container, None)
                if setting.mems is not None:
                    self._set_memory_nodes(watch.containers[container], mask_of(setting.mems))
        self._say(observes_only=state.observes_only)

    def _container(self, cgroup: ContainerCgroup) -> Container:
        pod = self._own.pods.get(cgroup.pod_uid)
        return Container(
            id=cgroup.id,
            name=COMPUTE if pod is not None and pod.vmi and pod.compute_container == cgroup.id else "",
            pod_uid=cgroup.pod_uid,
            namespace="" if pod is None else pod.namespace,
            pod="" if pod is None else pod.name,
            in_vm_pod=pod is not None and bool(pod.vmi),
            cpus=self._cpus[cgroup.id],
        )

    def _read(self, cgroup: ContainerCgroup) -> None:
        try:
            configured = self._hierarchy.configured(cgroup.folder)
            self._cpus[cgroup.id] = configured or self._hierarchy.effective(cgroup.folder)
            self._compare(cgroup)
        except Gone:
            self._forget(cgroup.id)
        except (Unavailable, Misconfigured) as error:
            self._cpus[cgroup.id] = NO_CPUS
            self._problems[cgroup.id] = str(error)

    def _compare(self, cgroup: ContainerCgroup) -> None:
        """Note a cgroup that may not use what it is set to: with version 2 those above it can forbid it."""
        cpus = self._cpus[cgroup.id] & self._own.state.topology.cpus
        found = self._hierarchy.effective(cgroup.folder)
        if found == cpus:
            self._limited.pop(cgroup.id, None)
        else:
            self._limited[cgroup.id] = (
                f"{cgroup.folder} is set to CPU {format_cpu_list(cpus)} and may use CPU"
                f" {format_cpu_list(found)}: a cgroup above it has other CPUs."
            )

    def _forget(self, container: ContainerId) -> None:
        for known in (self._cpus, self._set, self._histories, self._problems, self._limited):
            known.pop(container, None)

    def _may_set(self, cgroup: ContainerCgroup, setting: CpuSetting) -> bool:
        """Say whether a cpuset may be set; counts drift and gives up where repairs do not last."""
        if self._set.get(cgroup.id) != setting:
            return True
        now = time.monotonic()
        history = self._histories.get(cgroup.id, RepairHistory())
        if not history.may_repair(now):
            self._problems[cgroup.id] = (
                f"{cgroup.folder} is set to CPU {format_cpu_list(self._cpus[cgroup.id])} again and again by"
                " another program; stop that program."
            )
            return False
        self._histories[cgroup.id] = history.repaired(now)
        self.repairs += 1
        metrics.CPUSET_REPAIRS.inc()
        found, wanted = format_cpu_list(self._cpus[cgroup.id]), format_cpu_list(setting.cpus)
        log.warning("%s was set to CPU %s; it gets CPU %s again", cgroup.folder, found, wanted)
        return True

    def _shrink(self, cgroup: ContainerCgroup, setting: CpuSetting) -> None:
        """Take from a container what it must not have any more."""
        now = self._cpus.get(cgroup.id, NO_CPUS)
        if now & ~setting.cpus:
            self._write(cgroup, now & setting.cpus or setting.cpus)

    def _write(self, cgroup: ContainerCgroup, cpus: CpuMask) -> None:
        if self._cpus.get(cgroup.id) == cpus:
            return
        try:
            self._hierarchy.set(cgroup.folder, cpus)
            self._cpus[cgroup.id] = cpus
            self._compare(cgroup)
        except Gone:
            self._forget(cgroup.id)
        except (Unavailable, Misconfigured) as error:
            self._problems[cgroup.id] = str(error)

    def _set_memory_nodes(self, cgroup: ContainerCgroup, wanted: CpuMask) -> None:
        try:
            if not self._hierarchy.is_set(cgroup.folder, wanted, CpusetFile.MEMORY_NODES):
                self._hierarchy.set(cgroup.folder, wanted, CpusetFile.MEMORY_NODES)
        except Gone:
            self._forget(cgroup.id)
        except (Unavailable, Misconfigured) as error:
            self._problems[cgroup.id] = str(error)

    def _say(self, *, observes_only: bool) -> None:
        if observes_only:
            self._report.enforce(Enforcement.NONE)
            self._report.drop_condition(CPUSETS_ENFORCED)
            return
        self._report.enforce(Enforcement.CGROUP)
        problems = self._limited | self._problems
        first = next(iter(problems.values()), "")
        self._report.put_condition(
            Condition(CPUSETS_ENFORCED, False, "CgroupsNotSet", f"{len(problems)} containers: {first}")
            if first
            else Condition(
                CPUSETS_ENFORCED, True, "CgroupsSet", "The cgroup of every container is set as decided."
            )
        )
