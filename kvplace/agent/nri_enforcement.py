"""Cpusets set by the container runtime itself, through its Node Resource Interface (NRI).

The runtime asks before it creates a container, so a container has its CPUs from its first instruction, and by
the time the answer goes out no other container may use CPUs that became exclusive. Every decision is
`decide_cpusets` of this moment; here it is carried out:

* in the cgroups at once, written by ourselves, those that lose CPUs first;
* in the specs that the runtime keeps and applies again with each update, through the answers to its calls,
  and through a courier for what remains and for changes that come from elsewhere.

An answer carries at most 50 updates: the runtime needs about 10 ms for each and creates nothing meanwhile.
An update that meets a starting container changes its spec and not its cgroup, so the cgroup is read before
its program begins and again when it has started.

No call waits for a disk, the API server or libvirt. An error here never makes a creation fail.

Until the node's objects are known, as when the API server is unavailable, the specs count as decided: what
runs keeps its CPUs, since a sandbox may have an old placement of its pod. CPUs that a cgroup has lost stay
lost: the agent before may have ended before it informed the runtime. A new container gets what its own
sandbox states, without the CPUs that a claim uses.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path

from kvplace.agent import metrics
from kvplace.agent.containers import Container
from kvplace.agent.cpusets import Cpusets, decide_cpusets, placement_of
from kvplace.agent.node_report import NodeReport
from kvplace.agent.nri_condition import enforced_condition
from kvplace.agent.nri_container import KnownContainer, merged, reported
from kvplace.agent.nri_ports import CgroupCpusets, NodeObjects
from kvplace.agent.nri_runtime import PluginHost
from kvplace.agent.repair_history import PERIOD_S
from kvplace.core.cpuset import format_cpu_list, mask_of
from kvplace.core.enforcement import Enforcement
from kvplace.core.errors import KvplaceError, Misconfigured, Unavailable
from kvplace.core.scalars import NO_CPUS, ContainerId
from kvplace.linux.cpuset_hierarchy import CpusetFile
from kvplace.linux.inotify import Change, Inotify
from kvplace.linux.kernel_files import Gone
from kvplace.nri import values as nri
from kvplace.nri.courier import MAX_UPDATES

log = logging.getLogger(__name__)

_RETRY_S = 1.0
"""Pause before updates are carried again that did not arrive."""
SET_AGAIN_S = 5.0
"""Pause before cgroups are set again that could not be set."""
_FILES = frozenset(file.value for file in CpusetFile)


class NriEnforcement:
    """The plugin's handler; keeps what the runtime has reported, and the last decision."""

    events = frozenset(
        {
            nri.Event.CREATE,
            nri.Event.START,
            nri.Event.POST_START,
            nri.Event.UPDATE,
            nri.Event.POST_UPDATE,
            nri.Event.STOP,
            nri.Event.REMOVE,
            nri.Event.REMOVE_POD,
        }
    )

    def __init__(
        self, own: NodeObjects, report: NodeReport, hierarchy: CgroupCpusets, runtime: PluginHost
    ) -> None:
        self._own = own
        self._objects_known = False
        self._observes_only = False
        self._report = report
        self._hierarchy = hierarchy
        self._runtime = runtime
        self._known: dict[ContainerId, KnownContainer] = {}
        self._connected = False
        self._why_away = ""
        """Why there is no runtime now; empty while there is one."""
        self._runtime_name = ""
        self._online = NO_CPUS
        self._changed = asyncio.Event()
        self._failed = asyncio.Event()
        """Set when a cgroup could not be set."""
        self._specs_unsure = False
        """Whether updates were sent that may not have arrived."""
        self._decided = Cpusets(NO_CPUS, {}, {})
        self._writes: Inotify | None = None
        self._obstacle = ""
        """Why not everything that others write is noticed."""
        self.repairs = 0
        """Cgroups that differed from the last decision, and were set again."""

    @property
    def is_connected(self) -> bool:
        """Whether the runtime asks this plugin now."""
        return self._connected

    async def run(self) -> None:
        """Stay connected, carry out changes and repair what others write, until cancelled."""
        with self._hearing_of_writes():
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._learn_objects())
                tasks.create_task(self._runtime.run(self))
                tasks.create_task(self._follow_state())
                tasks.create_task(self._set_again_and_again())

    # What other components ask

    def containers(self) -> Iterable[Container]:
        return [known.container for known in self._known.values()]

    def cpusets(self) -> Cpusets:
        return self._decided if self._objects_known else Cpusets(NO_CPUS, {}, {})

    def cgroup_of(self, container: ContainerId) -> Path:
        known = self._known.get(container)
        if known is None or known.folder is None:
            raise Gone(f"container {container} has no cgroup")
        return known.folder

    def check(self, container: ContainerId) -> None:
        """Read the cgroup of a container and set it again if it is not as decided."""
        if known := self._known.get(container):
            self._check(known)

    # What the runtime calls

    async def synchronize(
        self,
        runtime: nri.Runtime,
        pods: Sequence[nri.PodSandbox],
        containers: Sequence[nri.Container],
    ) -> Sequence[nri.ContainerUpdate]:
        by_id = {pod.id: pod for pod in pods}
        for known in tuple(self._known):
            self._forget(known)
        for container in containers:
            if container.sandbox in by_id and container.state is not nri.ContainerState.STOPPED:
                self._take(by_id[container.sandbox], container)
        self._connected, self._why_away = True, ""
        self._specs_unsure = False
        self._runtime_name = f"{runtime.name} {runtime.version}"
        self._apply()
        log.info("connected to the NRI of %s: %d containers", self._runtime_name, len(self._known))
        return self._spec_updates()

    async def create(self, pod: nri.PodSandbox, container: nri.Container) -> nri.Creation:
        with metrics.NRI_ANSWERS.labels("create").time():
            return self._creation(self._take(pod, container))

    def _creation(self, known: KnownContainer) -> nri.Creation:
        try:
            self._apply()
        except Exception:
            # The last pool is as good as its CPUs are still without an owner; all CPUs would be worse.
            log.exception(
                "no decision about container %s; it gets the last shared pool", known.container.name
            )
            return nri.Creation(nri.Cpuset(self._decided.pool))
        cpuset = self._wanted(known) if self._objects_known else self._first_cpuset(known)
        known.spec = merged(known.spec, cpuset)
        return nri.Creation(cpuset, tuple(self._spec_updates()))

    async def update(
        self, pod: nri.PodSandbox, container: nri.Container, asked: nri.Cpuset
    ) -> Sequence[nri.ContainerUpdate]:
        known = self._known.get(container.id) or self._take(pod, container)
        self._apply()
        kept = self._wanted(known)
        known.spec = merged(known.spec, asked)
        wanted = self._wanted(known) if self._objects_known else kept
        others = self._spec_updates(without=container.id)
        if not wanted.cpus:
            return others
        # Even where nothing else was asked for: the runtime applies the whole spec again.
        known.spec = merged(known.spec, wanted)
        return [nri.ContainerUpdate(container.id, wanted), *others]

    async def stop(self, pod: nri.PodSandbox, container: nri.Container) -> Sequence[nri.ContainerUpdate]:
        self._forget(container.id)
        self._apply()
        return self._spec_updates()

    async def observe(self, event: nri.Event, pod: nri.PodSandbox, container: nri.Container) -> None:
        match event:
            case nri.Event.START | nri.Event.POST_START | nri.Event.POST_UPDATE:
                if container.id not in self._known:
                    if container.state is nri.ContainerState.STOPPED:
                        return  # it has stopped already, and no event will report it again
                    self._take(pod, container)
                    self._apply()
                known = self._known[container.id]
                known.container = replace(known.container, pid=container.pid)
                self._check(known)
            case nri.Event.REMOVE:
                self._forget(container.id)
            case nri.Event.REMOVE_POD:
                for known in tuple(self._known.values()):
                    if known.sandbox == pod.id:
                        self._forget(known.container.id)

    def disconnected(self, reason: KvplaceError) -> None:
        # What runs keeps its cpuset, and a runtime that is down creates nothing.
        self._connected, self._why_away = False, f"{reason}."
        self._say()

    def _say(self) -> None:
        """Return whether every container has its cpuset."""
        known, why = self._known.values(), self._why_away
        said = enforced_condition(self._runtime_name, known, why_away=why, obstacle=self._obstacle)
        self._report.put_condition(said)

    # How decisions are carried out

    def _take(self, pod: nri.PodSandbox, container: nri.Container) -> KnownContainer:
        known = self._known[container.id] = reported(pod, container, self._hierarchy.root)
        if known.folder is not None:
            try:
                cpus = self._hierarchy.configured(known.folder)
                known.container = replace(known.container, cpus=cpus)
                self._watch(known.folder)
            except Gone:
                pass  # it has not been started
            except (Unavailable, Misconfigured) as error:
                log.warning("container %s: %s", container.id, error)
        return known

    def _forget(self, container: ContainerId) -> None:
        known = self._known.pop(container, None)
        if known is not None:
            if known.folder is not None and self._writes is not None:
                self._writes.forget(known.folder)
            self._changed.set()

    def _apply(self) -> None:
        """Decide, and set the cgroups of all containers with other CPUs than before."""
        state = self._own.state
        self._objects_known, self._observes_only = self._own.is_known, state.observes_only
        self._online = state.topology.cpus
        decided = decide_cpusets(state, self.containers())
        if decided != self._decided:
            self._decided = decided
        self._report.enforce(Enforcement.NONE if state.observes_only else Enforcement.NRI)
        changed = [
            (known, wanted)
            for known in self._known.values()
            if (wanted := self._wanted(known)).cpus
            and wanted.cpus != known.container.cpus
            and not self._may_be_newer(known)
        ]
        changed.sort(key=lambda change: bool(change[1].cpus & ~change[0].container.cpus))
        for known, wanted in changed:
            self._set(known, wanted)
        self._say()

    def _wanted(self, known: KnownContainer) -> nri.Cpuset:
        """Return what a container shall have; empty for one that has all CPUs anyway."""
        if not self._objects_known:
            return nri.NO_CPUSET if self._observes_only else known.spec
        setting = self._decided.settings.get(known.container.id)
        if setting is None:
            return nri.NO_CPUSET
        untouched = not known.spec.cpus and known.container.cpus in (NO_CPUS, self._online)
        nobody_owns = self._decided.pool == setting.cpus == self._online
        if untouched and nobody_owns and setting.mems is None:
            return nri.NO_CPUSET
        return nri.Cpuset(setting.cpus, mask_of(setting.mems or ()))

    def _may_be_newer(self, known: KnownContainer) -> bool:
        """Whether a cgroup has lost CPUs that its spec still has: an agent takes them away there first."""
        has = known.container.cpus
        return not self._objects_known and bool(has) and not has & ~known.spec.cpus

    def _first_cpuset(self, known: KnownContainer) -> nri.Cpuset:
        """Return what a new container gets while nothing but its own sandbox states what it may have."""
        setting = self._decided.settings.get(known.container.id)
        if setting is None:
            return nri.NO_CPUSET
        state, used = self._own.state, NO_CPUS
        for other in self._known.values():
            bound = placement_of(state, other.container)
            if other is not known and other.container.runs_claim and bound and bound.placement.owned:
                used |= other.spec.cpus
        return nri.Cpuset(setting.cpus & ~used or setting.cpus, mask_of(setting.mems or ()))

    def _set(self, known: KnownContainer, wanted: nri.Cpuset) -> None:
        if known.folder is not None:
            try:
                self._hierarchy.set(known.folder, wanted.cpus)
                if wanted.memory_nodes:
                    self._hierarchy.set(known.folder, wanted.memory_nodes, CpusetFile.MEMORY_NODES)
            except Gone:
                pass  # it has not been started, or it has ended
            except (Unavailable, Misconfigured) as error:
                # Our own cgroup only the runtime may set (`own_container`), and will have when it is read.
                if str(error) != known.failure:
                    log.warning("container %s does not get its CPUs: %s", known.container.id, error)
                known.failure = str(error)
                self._failed.set()
                return
        known.failure = known.problem = ""
        known.container = replace(known.container, cpus=wanted.cpus)

    def _check(self, known: KnownContainer) -> None:
        if known.folder is None:
            return
        self._watch(known.folder)
        wanted = self._wanted(known)
        now = time.monotonic()
        before = (known.history.given_up, known.problem, known.limit)
        try:
            if self._is_set(known.folder, wanted):
                known.failure = known.problem = known.limit = ""
                if wanted.cpus:
                    known.limit = self._hierarchy.limit(known.folder, wanted.cpus & self._online)
                known.history = known.history.intact(now)
                known.container = replace(known.container, cpus=wanted.cpus or known.container.cpus)
            else:
                self._repair(known, wanted, now)
        except Gone:
            known.failure = known.problem = ""
        except (Unavailable, Misconfigured) as error:
            log.warning("container %s: %s", known.container.id, error)
        if (known.history.given_up, known.problem, known.limit) != before:
            self._say()

    def _is_set(self, folder: Path, wanted: nri.Cpuset) -> bool:
        cpus = not wanted.cpus or self._hierarchy.is_set(folder, wanted.cpus)
        nodes = wanted.memory_nodes
        return cpus and (not nodes or self._hierarchy.is_set(folder, nodes, CpusetFile.MEMORY_NODES))

    def _repair(self, known: KnownContainer, wanted: nri.Cpuset, now: float) -> None:
        who, cpus = f"{known.container.pod}/{known.container.name}", format_cpu_list(wanted.cpus)
        if known.history.may_repair(now):
            self._set(known, wanted)
            if known.failure:
                return
            known.history = known.history.repaired(now)
            self.repairs += 1
            metrics.CPUSET_REPAIRS.inc()
            log.info("the cgroup of container %s is set to CPU %s again", who, cpus)
        if known.history.given_up and known.retry is None:
            # Perhaps nothing writes it any more, and so no event would lead to a check.
            known.retry = asyncio.get_running_loop().call_later(PERIOD_S, self._try_again, known)

    def _try_again(self, known: KnownContainer) -> None:
        known.retry = None
        if self._known.get(known.container.id) is known:
            self._check(known)

    async def _set_again_and_again(self) -> None:
        while True:
            await self._failed.wait()
            self._failed.clear()
            await asyncio.sleep(SET_AGAIN_S)
            self.set_again()

    def set_again(self) -> None:
        """Set what could not be set, and state what still cannot be."""
        for known in tuple(self._known.values()):
            if known.failure:
                self._check(known)
                known.problem = known.failure
        self._say()

    @contextmanager
    def _hearing_of_writes(self) -> Iterator[None]:
        try:
            self._writes = Inotify()
        except Misconfigured as error:
            self._not_heard(error)
            yield
            return
        loop = asyncio.get_running_loop()
        with closing(self._writes) as writes:
            loop.add_reader(writes.fileno(), self._writes_seen, writes)
            try:
                yield
            finally:
                loop.remove_reader(writes.fileno())
                self._writes = None

    def _watch(self, folder: Path) -> None:
        """Learn of every write to a cgroup, also of our own."""
        if self._writes is not None:
            try:
                self._writes.watch(folder, Change.WRITTEN)
            except Gone:
                pass
            except Misconfigured as error:
                self._not_heard(error)

    def _not_heard(self, why: Misconfigured) -> None:
        if not self._obstacle:
            log.warning("what others write to cgroups is not noticed: %s", why)
        self._obstacle = str(why)

    def _writes_seen(self, writes: Inotify) -> None:
        reports = writes.read()
        everything = any(report.change & Change.OVERFLOW for report in reports)
        folders = {report.folder for report in reports if report.name in _FILES}
        for known in tuple(self._known.values()):
            if everything or known.folder in folders:
                self._check(known)

    # How the runtime's specs follow

    def _with_old_specs(self) -> Iterator[KnownContainer]:
        """Yield the containers with a spec that differs from the decision."""
        for known in self._known.values():
            if merged(known.spec, self._wanted(known)) != known.spec:
                yield known

    def _has_old_specs(self) -> bool:
        return next(self._with_old_specs(), None) is not None

    def _spec_updates(self, *, without: ContainerId | None = None) -> list[nri.ContainerUpdate]:
        """Take what one answer to the runtime can state; the rest goes by courier."""
        chosen = list(
            islice((it for it in self._with_old_specs() if it.container.id != without), MAX_UPDATES)
        )
        updates = [nri.ContainerUpdate(known.container.id, self._wanted(known)) for known in chosen]
        for known in chosen:
            known.spec = merged(known.spec, self._wanted(known))
        if len(chosen) == MAX_UPDATES:
            self._changed.set()
        return updates

    async def _learn_objects(self) -> None:
        self._own.subscribe(self._changed.set)
        await self._own.wait_until_known()
        self._changed.set()

    async def _follow_state(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self.carry_out()
            except KvplaceError as error:
                log.warning("containers keep an old cpuset in their specs: %s", error)
                self._changed.set()
                await asyncio.sleep(_RETRY_S)

    async def carry_out(self) -> None:
        """Decide, and bring cgroups and specs in line; raises Unavailable or Misconfigured.

        Does nothing while there is no runtime: all is decided anew when there is one again.
        """
        if self._connected:
            self._apply()
        while self._connected and (self._specs_unsure or self._has_old_specs()):
            self._specs_unsure = True
            await self._runtime.deliver(self._updates_of)
            self._specs_unsure = False

    def _updates_of(self, containers: Sequence[nri.Container]) -> Sequence[nri.ContainerUpdate]:
        """Compare all specs with what was decided; they report themselves whether earlier updates arrived."""
        for container in containers:
            if known := self._known.get(container.id):
                known.spec = container.cpuset
        return self._spec_updates()
