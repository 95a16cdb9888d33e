"""The containers of the node as the container runtime reports them through its Node Resource Interface (NRI).

The runtime asks before it creates a container, so a container has its CPUs from its first instruction. When
the answer goes out, no other container may use CPUs that became exclusive: the keeper has written their
cgroups. The runtime also keeps a spec of each container and applies it again with each update. This source
puts the same CPUs into the specs: in the answers to calls, and by courier for more updates than an answer
carries and for changes without a call.

An answer carries at most 50 updates: the runtime needs about 10 ms for each and creates nothing meanwhile.
An update that meets a starting container changes its spec and not its cgroup, so the cgroup is read before
its program begins and again when it has started.

No call waits for a disk, the API server or libvirt. An error here never makes a creation fail.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from kvplace.agent import metrics
from kvplace.agent.conditions import TopologyReason, cpusets_enforced
from kvplace.agent.cpuset_keeper import CpusetKeeper
from kvplace.agent.devices import given_devices
from kvplace.agent.node_plan import NodeContainer
from kvplace.core.errors import KvplaceError, Misconfigured
from kvplace.core.node_topology import Enforcement
from kvplace.core.scalars import ContainerId
from kvplace.core.well_known_names import PLACED_LABEL, PLACEMENT
from kvplace.kube.objects import COMPUTE
from kvplace.linux.cgroups import CpusetFile
from kvplace.linux.container_watch import cgroup_folder
from kvplace.linux.inotify import FileChange, FileReport, Inotify, calling
from kvplace.linux.kernel_files import Gone
from kvplace.nri import values as nri
from kvplace.nri.plugin import MAX_UPDATES, NriHandler, NriRuntime

log = logging.getLogger(__name__)

_RETRY_S = 1.0
"""Pause before updates are carried again that did not arrive."""
_FILES = frozenset(file.value for file in CpusetFile)
_VIRT_LAUNCHER = ("kubevirt.io", "virt-launcher")
_MIGRATION = "kubevirt.io/migrationJobUID"
"""Label of the pod that a VM migrates to."""
_QEMU_HOOKS = "/etc/libvirt/hooks/qemu.d"
"""Where the hook that gives an incoming QEMU the CPU numbers of this node is mounted."""


class NriSource(NriHandler):
    """The plugin's handler."""

    events = frozenset(
        {
            nri.NriEvent.CREATE,
            nri.NriEvent.START,
            nri.NriEvent.POST_START,
            nri.NriEvent.UPDATE,
            nri.NriEvent.POST_UPDATE,
            nri.NriEvent.STOP,
            nri.NriEvent.REMOVE,
            nri.NriEvent.REMOVE_POD,
        }
    )

    def __init__(self, keeper: CpusetKeeper, runtime: NriRuntime, root: Path) -> None:
        """`root` is the root of the cgroups with cpusets."""
        self._keeper = keeper
        self._runtime = runtime
        self._root = root
        self._sandboxes: dict[ContainerId, nri.SandboxId] = {}
        self._specs_unsure = False
        """Whether updates were sent that may not have arrived."""
        self._changed = asyncio.Event()
        """Set when specs may have to follow."""
        self._writes: Inotify | None = None

    async def run(self) -> None:
        """Stay connected, and report writes of others to cgroups, until cancelled."""
        self._keeper.subscribe(self._changed.set)
        self._writes = Inotify()
        with calling(self._writes_seen, self._writes):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._runtime.run(self))
                tasks.create_task(self._carry_specs())

    def search(self) -> None:
        """Do nothing: the runtime reports every container."""

    # Calls of the runtime

    async def synchronize(
        self,
        runtime: nri.Runtime,
        pods: Sequence[nri.PodSandbox],
        containers: Sequence[nri.NriContainer],
    ) -> Sequence[nri.ContainerUpdate]:
        by_id = {pod.id: pod for pod in pods}
        for known in self._keeper.containers():
            self._forget(known.id)
        for container in containers:
            if container.sandbox in by_id and not container.has_stopped:
                self._keeper.take(self._reported(by_id[container.sandbox], container))
        self._specs_unsure = False
        name = f"{runtime.name} {runtime.version}"
        how = f"{name} asks for the CPUs of every container through NRI."
        self._keeper.connected(Enforcement.NRI, cpusets_enforced(TopologyReason.CONNECTED, how, status=True))
        log.info("connected to the NRI of %s: %d containers", name, len(self._sandboxes))
        return self._spec_updates()

    async def create(self, pod: nri.PodSandbox, container: nri.NriContainer) -> nri.Creation:
        with metrics.NRI_ANSWERS.labels("create").time():
            cpuset = self._keeper.admit(self._reported(pod, container))
            return nri.Creation(cpuset, tuple(self._spec_updates()))

    async def update(
        self, pod: nri.PodSandbox, container: nri.NriContainer, asked: nri.Cpuset
    ) -> Sequence[nri.ContainerUpdate]:
        if self._keeper.container(container.id) is None:
            self._keeper.take(self._reported(pod, container))
        self._keeper.carry_out()
        wanted = self._keeper.wanted_spec(self._keeper.note_spec(container.id, asked))
        others = self._spec_updates(without=container.id)
        if not wanted.cpus:
            return others
        # Even where nothing else was asked for: the runtime applies the whole spec again.
        self._keeper.note_spec(container.id, wanted)
        return [nri.ContainerUpdate(container.id, wanted), *others]

    async def stop(self, pod: nri.PodSandbox, container: nri.NriContainer) -> Sequence[nri.ContainerUpdate]:
        self._forget(container.id)
        self._keeper.carry_out()
        return self._spec_updates()

    async def observe(self, event: nri.NriEvent, pod: nri.PodSandbox, container: nri.NriContainer) -> None:
        match event:
            case nri.NriEvent.START | nri.NriEvent.POST_START | nri.NriEvent.POST_UPDATE:
                known = self._keeper.container(container.id)
                if known is None:
                    if container.has_stopped:
                        return  # it has stopped already, and no event will report it again
                    known = self._reported(pod, container)
                    self._keeper.take(known)
                    self._keeper.carry_out()
                self._watch(known)
                self._keeper.check([container.id])
            case nri.NriEvent.REMOVE:
                self._forget(container.id)
            case nri.NriEvent.REMOVE_POD:
                for id_, sandbox in tuple(self._sandboxes.items()):
                    if sandbox == pod.id:
                        self._forget(id_)

    def disconnected(self, reason: KvplaceError) -> None:
        # A runtime that is down creates nothing.
        self._keeper.disconnected(f"{reason}.")

    def _reported(self, pod: nri.PodSandbox, container: nri.NriContainer) -> NodeContainer:
        """Describe a container, and watch its cgroup from now on."""
        found = as_reported(pod, container, self._root)
        self._sandboxes[found.id] = container.sandbox
        self._watch(found)
        return found

    def _forget(self, container: ContainerId) -> None:
        known = self._keeper.forget(container)
        self._sandboxes.pop(container, None)
        if known is not None and known.folder is not None and self._writes is not None:
            self._writes.forget(known.folder)

    # Writes of others

    def _watch(self, container: NodeContainer) -> None:
        """Learn of every write to a cgroup, also of our own."""
        if self._writes is None or container.folder is None:
            return
        try:
            self._writes.watch(container.folder, FileChange.WRITTEN)
        except Gone:
            pass  # it has not been started
        except Misconfigured as error:
            if not self._keeper.obstacle:
                log.warning("changes of cgroups by other programs are not noticed at once: %s", error)
            self._keeper.obstacle = str(error)

    def _writes_seen(self, reports: Sequence[FileReport]) -> None:
        everything = any(report.change & FileChange.OVERFLOW for report in reports)
        folders = {report.folder for report in reports if report.name in _FILES}
        known = self._keeper.containers()
        self._keeper.check([each.id for each in known if everything or each.folder in folders])

    # How the runtime's specs follow

    def _spec_updates(self, *, without: ContainerId | None = None) -> list[nri.ContainerUpdate]:
        """Take the updates that fit into one answer to the runtime; the rest goes by courier."""
        old = (nri.ContainerUpdate(id_, cpuset) for id_, cpuset in self._keeper.old_specs() if id_ != without)
        updates = list(islice(old, MAX_UPDATES))
        for update in updates:
            self._keeper.note_spec(update.container, update.cpuset)
        if len(updates) == MAX_UPDATES:
            self._changed.set()
        return updates

    async def _carry_specs(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self.carry_specs()
            except KvplaceError as error:
                log.warning("containers keep an old cpuset in their specs: %s", error)
                self._changed.set()
                await asyncio.sleep(_RETRY_S)

    async def carry_specs(self) -> None:
        """Bring the runtime's specs in line with the plan; raises Unavailable or Misconfigured."""
        while self._keeper.is_connected and (
            self._specs_unsure or any(True for _ in self._keeper.old_specs())
        ):
            self._specs_unsure = True
            await self._runtime.deliver(self._updates_of)
            self._specs_unsure = False

    def _updates_of(self, containers: Sequence[nri.NriContainer]) -> Sequence[nri.ContainerUpdate]:
        """Compare all specs with the plan; they report themselves whether earlier updates arrived."""
        for container in containers:
            if known := self._keeper.container(container.id):
                self._keeper.describe(replace(known, spec=container.cpuset))
        return self._spec_updates()


def as_reported(pod: nri.PodSandbox, container: nri.NriContainer, root: Path) -> NodeContainer:
    """Return a container as its sandbox and its spec describe it; `root` is the root of the cgroups."""
    key, value = _VIRT_LAUNCHER
    return NodeContainer(
        id=container.id,
        name=container.name,
        pod_uid=pod.uid,
        namespace=pod.namespace,
        pod=pod.name,
        in_vm_pod=pod.labels.get(key) == value,
        # Without the label any client may have written it.
        placement=pod.annotations.get(PLACEMENT, "") if pod.labels.get(PLACED_LABEL) == "true" else "",
        folder=cgroup_folder(root, container.cgroup_path),
        spec=container.cpuset,
        cpus=container.cpuset.cpus,
        devices=given_devices(container.environment, container.cdi_devices),
        incoming=container.name == COMPUTE
        and _MIGRATION in pod.labels
        and _QEMU_HOOKS not in container.mounts,
    )
