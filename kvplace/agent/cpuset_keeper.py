"""Keeps the cpuset of every container as planned: plans, writes cgroups, checks, repairs and reports.

Containers come from a `ContainerSource`: the container runtime through NRI, or the tree of cgroups. It
reports containers that appear and end, and cgroups that were written. The keeper does all the rest.

Sets shrink before others grow, so that a CPU never belongs to two claims. A cpuset that another program has
written is put back at once, at most a few times a minute. Changes without an event are found by reading all
cpusets now and then. Only files are written. A systemd that writes its own value again on `daemon-reload`
makes one more write that is reported and put back. Its property `AllowedCPUs` would need the right to command
the host's systemd.

With version 2 and the mount option `nsdelegate`, which systemd uses, the kernel refuses writes to the root of
a cgroup namespace from inside it (cgroup-v2.rst, delegation). Runtimes give such a namespace to containers
that are not privileged. The agent then sets its own threads instead of its own cgroup.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from kvplace.agent import metrics
from kvplace.agent.back_off import PERIOD_S, RepairHistory
from kvplace.agent.conditions import TopologyCondition, TopologyReason, cpusets_enforced
from kvplace.agent.node_plan import NodeContainer, NodePlan, ThisNode
from kvplace.agent.node_report import NodeReport
from kvplace.agent.planner import SHOWN_OF_ID, plan_node, setting_of_new
from kvplace.core.cpuset import format_cpu_list
from kvplace.core.errors import Misconfigured, Unavailable
from kvplace.core.node_topology import Enforcement
from kvplace.core.quantity import counted
from kvplace.core.scalars import NO_CPUS, ContainerId, CpuMask
from kvplace.kube.object_records import Condition
from kvplace.linux.cgroups import CpusetFile
from kvplace.linux.kernel_files import Gone, NotPermitted
from kvplace.linux.threads import Tid, affinity_of, set_own_threads
from kvplace.nri.values import NO_CPUSET, Cpuset

log = logging.getLogger(__name__)

SWEEP_S = 30.0
"""How often all cpusets are read, for changes without an event."""
SWEEP_WITHOUT_EVENTS_S = 1.0
"""The same where the kernel does not report every change."""
STARTING_S = 10.0
"""How long a container may be starting: its runtime writes its cpuset several times, which is not drift."""
SET_AGAIN_S = 5.0
"""Pause before a cgroup that could not be set is tried again; a second failure is reported."""


class ContainerSource(Protocol):
    """Where the containers of the node come from; it calls the keeper that it was made with."""

    async def run(self) -> None:
        """Report containers and writes to their cgroups until cancelled."""
        ...

    def search(self) -> None:
        """Report changes that came without an event."""
        ...


class OwnNode(Protocol):
    """The API server's view of this node: `kvplace.agent.node_objects.NodeObjects`."""

    @property
    def state(self) -> ThisNode: ...

    def subscribe(self, listener: Callable[[], None], /) -> None: ...

    async def wait_until_known(self) -> None: ...


class CgroupCpusets(Protocol):
    """Calls to the host's cgroups: `kvplace.linux.cgroups.CpusetHierarchy`."""

    def configured(self, folder: Path, file: CpusetFile = CpusetFile.CPUS, /) -> CpuMask: ...

    def effective(self, folder: Path, file: CpusetFile = CpusetFile.CPUS, /) -> CpuMask: ...

    def is_set(self, folder: Path, wanted: CpuMask, file: CpusetFile = CpusetFile.CPUS, /) -> bool: ...

    def limit(self, folder: Path, cpus: CpuMask, /) -> str: ...

    def set(self, folder: Path, wanted: CpuMask, file: CpusetFile = CpusetFile.CPUS, /) -> None: ...


@dataclass(slots=True)
class _Kept:
    """A container, and the state of its cgroup."""

    container: NodeContainer
    """`cpus` is the cpuset that was last read or set, or that of its spec while it has no cgroup."""
    since: float
    """When it was reported, in seconds of a monotonic clock."""
    exists: bool = False
    """Whether its cgroup was there when it was read or set last."""
    had: Cpuset | None = None
    """The planned cpuset that its cgroup was seen to have: another value there is drift."""
    history: RepairHistory = field(default_factory=RepairHistory)
    failure: str = ""
    """Why its cgroup could not be read or set; empty when that has succeeded since."""
    problem: str = ""
    """A failure that was still there after a second try."""
    limit: str = ""
    """The obstacle that keeps it from using its cpuset."""
    by_threads: bool = False
    """Whether it is our own, and its threads are set because its cgroup may not be written."""

    @property
    def name(self) -> str:
        found = self.container
        return f"{found.namespace}/{found.pod}/{found.name or found.id[:SHOWN_OF_ID]}"


class CpusetKeeper:
    """The containers of the node, and the plan that is carried out for them."""

    def __init__(
        self,
        own: OwnNode,
        report: NodeReport,
        cgroups: CgroupCpusets,
        *,
        observed: Enforcement | None = None,
        sweep_s: float = SWEEP_S,
        starting_s: float = STARTING_S,
        own_pid: int | None = None,
    ) -> None:
        """With `observed`, which sets the cpusets here, it knows the containers and writes nothing.

        `own_pid` is this process.
        """
        self._own = own
        self._report = report
        self._cgroups = cgroups
        self._observed = observed
        self._sweep_s = sweep_s
        self._starting_s = starting_s
        self._own_pid = os.getpid() if own_pid is None else own_pid
        self._kept: dict[ContainerId, _Kept] = {}
        self._plan = NodePlan()
        self._online = NO_CPUS
        self._connected: tuple[Enforcement, Condition] | None = None
        """How cpusets are set, and the condition while all is in order; None until there is a source."""
        self._why_away = ""
        """Why there is no source now; empty while there is one."""
        self.obstacle = ""
        """Why the kernel does not report every change; set by the source."""
        self._wake = asyncio.Event()
        self._failed = asyncio.Event()
        """Set when a cgroup could not be read or set."""
        self._listeners: list[Callable[[], None]] = []
        self.repairs = 0
        """Cpusets that others had changed, and that were set again."""

    @property
    def plan(self) -> NodePlan:
        """The plan of this moment; the same object until there is another one."""
        return self._plan

    @property
    def is_connected(self) -> bool:
        """Whether there is a source now."""
        return self._connected is not None and not self._why_away

    def containers(self) -> list[NodeContainer]:
        """Return the containers that are created or running, as last known."""
        return [kept.container for kept in self._kept.values()]

    def container(self, container: ContainerId) -> NodeContainer | None:
        """Return one of them."""
        kept = self._kept.get(container)
        return None if kept is None else kept.container

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call the listener after each change of the plan."""
        self._listeners.append(listener)

    async def run(self, source: ContainerSource | None) -> None:
        """Keep the containers of a source, if there is one, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            if source is not None:
                tasks.create_task(source.run())
            tasks.create_task(self._learn_objects())
            tasks.create_task(self._follow_state(source))
            tasks.create_task(self._set_again_and_again())

    # Reports of a source

    def connected(self, how: Enforcement, condition: Condition) -> None:
        """Plan for the containers that were taken in, and carry out plans from now on.

        The condition is reported while all is in order.
        """
        self._connected = (how, condition)
        self._why_away = ""
        self.carry_out()

    def disconnected(self, why: str) -> None:
        """Carry out no more plans; changes that other programs make are still put back."""
        self._why_away = why
        self._say()

    def take(self, container: NodeContainer) -> None:
        """Take in a container, with the values of its cgroup."""
        kept = self._kept[container.id] = _Kept(container, time.monotonic())
        self._read(kept)

    def admit(self, container: NodeContainer) -> Cpuset:
        """Take in a container that is being created, carry out the new plan, and return its cpuset.

        Never raises. The cpuset is noted as its spec. When this returns, no other container may use CPUs that
        have become exclusive.
        """
        self.take(container)
        try:
            self.carry_out()
            state = self._state()
            if state.is_known:
                setting = self._plan.containers.get(container.id, NO_CPUSET)
            else:
                setting = setting_of_new(state, self.containers(), container.id)
        except Exception:
            # The last pool is as good as its CPUs are still without an owner; all CPUs would be worse.
            log.exception("no decision about container %s; it gets the last shared pool", container.name)
            setting = Cpuset(self._plan.pool)
        stated = self._plan.for_spec(self._kept[container.id].container, setting)
        self.note_spec(container.id, stated)
        return stated

    def describe(self, container: NodeContainer) -> NodeContainer:
        """Take over a newer description of a container, but not the values of its cgroup; returns both."""
        kept = self._kept[container.id]
        kept.container = replace(container, cpus=kept.container.cpus if kept.exists else container.spec.cpus)
        return kept.container

    def note_spec(self, container: ContainerId, change: Cpuset) -> NodeContainer:
        """Note a change of the spec that the runtime keeps of a container."""
        known = self._kept[container].container
        return self.describe(replace(known, spec=known.spec.updated(change)))

    def wanted_spec(self, container: NodeContainer) -> Cpuset:
        """Return the cpuset that the spec of a container is to have; without CPUs if it needs none."""
        setting = self._plan.containers.get(container.id, NO_CPUSET)
        return self._plan.for_spec(container, setting)

    def old_specs(self) -> Iterator[tuple[ContainerId, Cpuset]]:
        """Yield each container with a spec that differs from the plan, with the cpuset for its spec."""
        for known in self.containers():
            wanted = self.wanted_spec(known)
            if known.spec.updated(wanted) != known.spec:
                yield known.id, wanted

    def forget(self, container: ContainerId) -> NodeContainer | None:
        """Forget a container that has ended; returns its last description."""
        kept = self._kept.pop(container, None)
        if kept is None:
            return None
        self._wake.set()
        return kept.container

    def check(self, containers: Iterable[ContainerId]) -> None:
        """Read the cgroups of containers, and correct differences from the plan."""
        self._check([self._kept[one] for one in containers if one in self._kept])
        self._say()

    def check_all(self) -> None:
        """Check every container."""
        self.check(list(self._kept))

    def carry_out(self, first: Collection[ContainerId] = ()) -> None:
        """Plan anew, and set the cgroups of all containers that differ from the plan, some of them first.

        Does nothing while there is no source: all is planned anew when there is one again.
        """
        if self._connected is None or self._why_away:
            return
        state = self._state()
        if state.topology.cpus != self._online:
            self._online = CpuMask(state.topology.cpus)
            for kept in self._kept.values():
                self._read(kept)  # the kernel changes cpusets with the CPUs that are online
        plan = plan_node(state, self.containers())
        is_new = plan != self._plan
        if is_new:
            self._plan = plan
        self._report.enforce(
            Enforcement.NONE if self._own.state.observes_only else self._observed or self._connected[0]
        )
        self._write(list(self._kept.values()), first)
        self._say()
        if is_new:
            for listener in self._listeners:
                listener()

    # The loops

    async def _learn_objects(self) -> None:
        await self._own.wait_until_known()
        self._wake.set()

    async def _follow_state(self, source: ContainerSource | None) -> None:
        self._own.subscribe(self._wake.set)
        loop = asyncio.get_running_loop()
        next_sweep = loop.time() + self._sweep_s
        while True:
            self.carry_out()
            pause = next_sweep if not self.obstacle else min(next_sweep, loop.time() + SWEEP_WITHOUT_EVENTS_S)
            with suppress(TimeoutError):
                async with asyncio.timeout_at(pause):
                    await self._wake.wait()
            self._wake.clear()
            if loop.time() >= pause:
                next_sweep = loop.time() + self._sweep_s
                if source is not None:
                    source.search()
                self.check_all()

    async def _set_again_and_again(self) -> None:
        while True:
            await self._failed.wait()
            self._failed.clear()
            await asyncio.sleep(SET_AGAIN_S)
            self.set_again()

    def set_again(self) -> None:
        """Set the cgroups that could not be set, and report the cgroups that fail again."""
        failed = [kept for kept in self._kept.values() if kept.failure]
        self._check(failed)
        for kept in failed:
            kept.problem = kept.failure
        self._say()

    # How cgroups are read and written

    def _state(self) -> ThisNode:
        state = self._own.state
        if self._observed is None:
            return state
        follows_claims = self._observed is Enforcement.DRA and not state.observes_only
        return replace(state, observes_only=True, follows_claims=follows_claims)

    def _check(self, candidates: Collection[_Kept]) -> None:
        for kept in candidates:
            self._read(kept)
        self._write(candidates)

    def _write(self, candidates: Collection[_Kept], first: Collection[ContainerId] = ()) -> None:
        planned = [
            (kept, wanted)
            for kept in candidates
            if (wanted := self._plan.containers.get(kept.container.id)) is not None
        ]
        wrong = [
            (kept, wanted)
            for kept, wanted in planned
            if kept.container.cpus != wanted.cpus and self._may_set(kept, wanted)
        ]
        had = {kept.container.id: kept.container.cpus for kept, _ in wrong}
        # A container that has just appeared is about to run, so it comes first.
        wrong.sort(key=lambda change: change[0].container.id not in first)
        shrunk = [(kept, wanted) for kept, wanted in wrong if self._shrink(kept, wanted.cpus)]
        for kept, wanted in shrunk:
            if kept.container.cpus != wanted.cpus:
                self._set(kept, wanted.cpus)
        for kept, wanted in planned:
            if kept.container.cpus == wanted.cpus:
                self._is_as_planned(kept, wanted, had.get(kept.container.id))

    def _is_as_planned(self, kept: _Kept, wanted: Cpuset, had: CpuMask | None) -> None:
        """Note that a container has its CPUs, and see that it has its memory nodes; it `had` other CPUs."""
        kept.failure = kept.problem = ""
        if had is not None:
            self._count(kept, wanted, CpusetFile.CPUS, had)
        else:
            kept.history = kept.history.intact(time.monotonic())
        if not wanted.memory_nodes or self._gets_memory_nodes(kept, wanted):
            kept.had = wanted

    def _may_set(self, kept: _Kept, wanted: Cpuset) -> bool:
        """Return whether a cpuset may be set; pauses where repairs do not last."""
        return not self._has_drifted(kept, wanted) or kept.history.may_repair(time.monotonic())

    def _has_drifted(self, kept: _Kept, wanted: Cpuset) -> bool:
        return kept.had == wanted and time.monotonic() - kept.since >= self._starting_s

    def _count(self, kept: _Kept, wanted: Cpuset, file: CpusetFile, had: CpuMask) -> None:
        """Count a cpuset that has been set, if others had changed it."""
        if self._has_drifted(kept, wanted):
            kept.history = kept.history.repaired(time.monotonic())
            self.repairs += 1
            metrics.CPUSET_REPAIRS.inc()
            what = "CPU" if file is CpusetFile.CPUS else "NUMA node"
            folder, listed = kept.container.folder, format_cpu_list(had)
            log.warning("%s: %s was set to %s %s and is set back", kept.name, folder, what, listed)

    def _shrink(self, kept: _Kept, cpus: CpuMask) -> bool:
        """Take CPUs away from a container that it may no longer use; False if that fails."""
        if not kept.container.cpus & ~cpus:
            return True
        self._set(kept, CpuMask(kept.container.cpus & cpus) or cpus)
        return kept.exists and not kept.container.cpus & ~cpus

    def _set(self, kept: _Kept, cpus: CpuMask) -> None:
        with self._access(kept) as folder:
            try:
                self._cgroups.set(folder, cpus)
            except NotPermitted:
                if not set_own_threads(folder, cpus, self._own_pid):
                    raise
                kept.by_threads = True
            self._has(kept, folder, cpus)

    def _gets_memory_nodes(self, kept: _Kept, wanted: Cpuset) -> bool:
        gets_them, file = False, CpusetFile.MEMORY_NODES
        with self._access(kept) as folder:
            gets_them = self._cgroups.is_set(folder, wanted.memory_nodes, file)
            had = self._cgroups.configured(folder, file)
            if not gets_them and self._may_set(kept, wanted):
                self._cgroups.set(folder, wanted.memory_nodes, file)
                self._count(kept, wanted, file, had)
                gets_them = True
        return gets_them

    def _read(self, kept: _Kept) -> None:
        with self._access(kept) as folder:
            if kept.by_threads:
                cpus = affinity_of(Tid(self._own_pid))
            else:
                cpus = self._cgroups.configured(folder) or self._cgroups.effective(folder)
            self._has(kept, folder, cpus)

    def _has(self, kept: _Kept, folder: Path, cpus: CpuMask) -> None:
        """Note the values of a cgroup, and whether its container may use them."""
        kept.exists = True
        kept.container = replace(kept.container, cpus=cpus)
        if not kept.by_threads and self._online:
            kept.limit = self._cgroups.limit(folder, CpuMask(cpus & self._online))
        if kept.container.id not in self._plan.containers:
            kept.failure = kept.problem = ""

    @contextmanager
    def _access(self, kept: _Kept) -> Iterator[Path]:
        """Note the fault of a container's cgroup."""
        try:
            if kept.container.folder is None:
                raise Gone(f"the cgroup of container {kept.container.id} is not known")
            yield kept.container.folder
        except Gone:
            # It has not been started, or it has ended, which its source reports.
            kept.container = replace(kept.container, cpus=kept.container.spec.cpus)
            kept.failure = kept.problem = kept.limit = ""
            kept.exists = False
        except (Unavailable, Misconfigured) as error:
            if str(error) != kept.failure:
                log.warning("container %s does not get its CPUs: %s", kept.container.id, error)
            kept.failure = str(error)
            self._failed.set()

    # Reports to the node

    def _say(self) -> None:
        is_observed = self._connected is not None and self._connected[0] is not Enforcement.NONE
        if is_observed and self._report.enforcement in (Enforcement.NONE, Enforcement.DRA):
            self._report.drop_condition(TopologyCondition.CPUSETS_ENFORCED)
        elif condition := self._condition():
            self._report.put_condition(condition)

    def _condition(self) -> Condition | None:
        if self._why_away:
            return cpusets_enforced(TopologyReason.RUNTIME_UNAVAILABLE, self._why_away)
        if undone := sorted(kept.name for kept in self._kept.values() if kept.history.given_up):
            why = (
                f"Another program keeps setting the cpuset of {', '.join(undone)}; "
                f"repaired once in {PERIOD_S:g} s."
            )
            return cpusets_enforced(TopologyReason.REPAIRS_UNDONE, why)
        if problems := [text for kept in self._kept.values() if (text := kept.problem or kept.limit)]:
            why = f"{counted(len(problems), 'container')}: {problems[0]}."
            return cpusets_enforced(TopologyReason.CGROUPS_NOT_SET, why)
        if self.obstacle:
            why = f"{self.obstacle}; cgroups are read every {SWEEP_WITHOUT_EVENTS_S:g} s."
            return cpusets_enforced(TopologyReason.CHANGES_NOT_REPORTED, why)
        return None if self._connected is None else self._connected[1]
