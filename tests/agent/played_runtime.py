"""A container runtime with cgroups in memory, which behaves as containerd was measured to behave.

It applies updates to a container that runs at once, to one that was created when it starts, and to one that
is just starting to its spec alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from kvplace.agent.node_plan import ThisNode
from kvplace.agent.nri_source import NriSource
from kvplace.core.placement import PodPlacement
from kvplace.core.scalars import NO_CPUS, ContainerId, CpuMask, PodUid
from kvplace.core.well_known_names import PLACED_LABEL, PLACEMENT
from kvplace.linux.cgroups import CpusetFile
from kvplace.linux.kernel_files import Gone, KernelError
from kvplace.nri import values as nri
from kvplace.nri.plugin import MAX_UPDATES, NriHandler, NriRuntime

T = TypeVar("T")


def now(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that must not wait for anything."""
    try:
        coroutine.send(None)
    except StopIteration as ended:
        value: T = ended.value
        return value
    coroutine.close()
    raise AssertionError("it waited")


class PlayedObjects:
    """The objects of a node as a test states."""

    def __init__(self, state: ThisNode, *, is_known: bool = True) -> None:
        self._state = state
        self.is_known = is_known
        self._known = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []

    @property
    def state(self) -> ThisNode:
        return replace(self._state, is_known=self.is_known)

    @state.setter
    def state(self, state: ThisNode) -> None:
        self._state = state

    def subscribe(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    async def wait_until_known(self) -> None:
        if not self.is_known:
            await self._known.wait()

    def become(self, state: ThisNode) -> None:
        """Be another state, which is known."""
        self.state, self.is_known = state, True
        self._known.set()
        for listener in self._listeners:
            listener()


@dataclass
class MemoryCgroups:
    """Cpusets of cgroups, by folder."""

    root: Path = Path("/cgroups")
    cpus: dict[Path, CpuMask] = field(default_factory=dict)
    memory_nodes: dict[Path, CpuMask] = field(default_factory=dict)
    writes: list[tuple[str, CpuMask]] = field(default_factory=list)
    refused: set[Path] = field(default_factory=set)
    """Folders whose sets the kernel does not change."""
    usable: CpuMask | None = None
    """The CPUs that the cgroup above them all lets them use; None: everything."""

    def configured(self, folder: Path, file: CpusetFile = CpusetFile.CPUS, /) -> CpuMask:
        if folder not in self.cpus:
            raise Gone(f"{folder} does not exist")
        return self.cpus[folder] if file is CpusetFile.CPUS else self.memory_nodes.get(folder, NO_CPUS)

    def effective(self, folder: Path, file: CpusetFile = CpusetFile.CPUS, /) -> CpuMask:
        return self.configured(folder, file)

    def is_set(self, folder: Path, wanted: CpuMask, file: CpusetFile = CpusetFile.CPUS, /) -> bool:
        return self.configured(folder, file) == wanted

    def limit(self, folder: Path, cpus: CpuMask, /) -> str:
        return "" if self.usable is None or not cpus & ~self.usable else f"{folder} is limited"

    def set(self, folder: Path, wanted: CpuMask, file: CpusetFile = CpusetFile.CPUS, /) -> None:
        self.configured(folder)
        assert wanted
        if folder in self.refused:
            raise KernelError(f"{folder} cannot be set")
        if file is CpusetFile.CPUS:
            self.writes.append((folder.name, wanted))
            self.cpus[folder] = wanted
        else:
            self.memory_nodes[folder] = wanted


class Phase(Enum):
    CREATED = 1
    READ = 2
    """The spec has been read for its first process; the cgroup is not there yet."""
    STARTING = 3
    """Its first process waits in its cgroup."""
    RUNNING = 4


@dataclass
class PlayedContainer:
    id: ContainerId
    name: str
    pod: nri.PodSandbox
    spec: nri.Cpuset = nri.NO_CPUSET
    phase: Phase = Phase.CREATED
    read_cpus: CpuMask = NO_CPUS
    """The CPUs in the spec when it was read for the first process."""
    first_cpus: CpuMask = NO_CPUS
    """The CPUs that its program's first instruction could run on."""

    @property
    def path(self) -> str:
        return f"/{self.id}"

    def value(self) -> nri.NriContainer:
        """As the runtime asks it to plugins."""
        return nri.NriContainer(self.id, self.pod.id, self.name, cgroup_path=self.path, cpuset=self.spec)


class PlayedRuntime(NriRuntime):
    """The runtime, for one plugin."""

    def __init__(self, online: CpuMask) -> None:
        self.online = online
        self.cgroups = MemoryCgroups()
        self.pods: dict[nri.SandboxId, nri.PodSandbox] = {}
        self.containers: dict[ContainerId, PlayedContainer] = {}
        self.plugin: NriSource | None = None
        self.couriers_fail = False
        self.delivered = asyncio.Event()
        self.answers: list[int] = []
        """How many updates each answer had."""
        self._numbers = count(1)

    # What the plugin asks of it

    async def run(self, handler: NriHandler) -> None:
        await asyncio.Event().wait()

    async def deliver(
        self, choose: Callable[[Sequence[nri.NriContainer]], Sequence[nri.ContainerUpdate]]
    ) -> None:
        updates = choose([found.value() for found in self.containers.values()])
        if self.couriers_fail:
            raise KernelError("the courier did not arrive")
        self._apply(updates)
        self.delivered.set()

    # What a test has it do

    def connect(self, plugin: NriSource) -> None:
        """Announce everything to a plugin that has just connected."""
        self.plugin = plugin
        existing = [found.value() for found in self.containers.values()]
        runtime = nri.Runtime("containerd", "v2.2.9")
        self._apply(now(plugin.synchronize(runtime, list(self.pods.values()), existing)))

    def disconnect(self) -> None:
        """Lose the plugin, as by kill -9."""
        self.plugin = None

    def run_pod(
        self,
        uid: PodUid,
        *,
        vm: bool = True,
        placement: PodPlacement | None = None,
        labels: tuple[str, ...] = (),
    ) -> nri.PodSandbox:
        marks = {"kubevirt.io": "virt-launcher"} if vm else {}
        annotations = {PLACEMENT: placement.to_json()} if placement else {}
        if placement:
            marks[PLACED_LABEL] = "true"
        id_ = nri.SandboxId(f"sandbox-{uid}")
        pod = nri.PodSandbox(
            id_, f"pod-of-{uid}", "vms", uid, marks | dict.fromkeys(labels, "x"), annotations
        )
        self.pods[pod.id] = pod
        return pod

    def create(self, pod: nri.PodSandbox, name: str, asked: nri.Cpuset = nri.NO_CPUSET) -> PlayedContainer:
        id_ = ContainerId(f"{name}-{next(self._numbers)}")
        made = PlayedContainer(id_, name, pod, asked)
        if self.plugin is not None:
            answer = now(self.plugin.create(pod, made.value()))
            assert id_ not in {update.container for update in answer.updates}, "the creation would fail"
            made.spec = _after(made.spec, answer.cpuset)
            self._apply(answer.updates)
        self.containers[id_] = made
        return made

    def read_spec(self, container: PlayedContainer) -> None:
        """Begin to start it; updates do not reach its cgroup any more."""
        container.phase = Phase.READ
        container.read_cpus = container.spec.cpus

    def make_task(self, container: PlayedContainer) -> None:
        """Make its cgroup and its first process, which waits."""
        container.phase = Phase.STARTING
        self.cgroups.cpus[self._folder(container)] = container.read_cpus or self.online
        if container.spec.memory_nodes:
            self.cgroups.memory_nodes[self._folder(container)] = container.spec.memory_nodes

    def start(self, container: PlayedContainer) -> None:
        """Let its program begin."""
        if container.phase is Phase.CREATED:
            self.read_spec(container)
        if container.phase is Phase.READ:
            self.make_task(container)
        self._observe(nri.NriEvent.START, container)
        container.first_cpus = self.cpus_of(container)
        self._observe(nri.NriEvent.POST_START, container)
        container.phase = Phase.RUNNING

    def update(self, container: PlayedContainer, asked: nri.Cpuset) -> None:
        """Change it as CRI UpdateContainerResources does."""
        updates: Sequence[nri.ContainerUpdate] = ()
        if self.plugin is not None:
            updates = now(self.plugin.update(container.pod, container.value(), asked))
        own = [update.cpuset for update in updates if update.container == container.id]
        self._apply([nri.ContainerUpdate(container.id, _after(asked, own[0] if own else nri.NO_CPUSET))])
        self._apply([update for update in updates if update.container != container.id])
        self._observe(nri.NriEvent.POST_UPDATE, container)

    def stop(self, container: PlayedContainer) -> None:
        del self.containers[container.id]
        self.cgroups.cpus.pop(self._folder(container), None)
        if self.plugin is not None:
            self._apply(now(self.plugin.stop(container.pod, container.value())))
        self._observe(nri.NriEvent.REMOVE, container)

    def remove_pod(self, pod: nri.PodSandbox) -> None:
        """Remove a pod without a report that its containers stopped."""
        del self.pods[pod.id]
        for container in list(self.containers.values()):
            if container.pod is pod:
                del self.containers[container.id]
                self.cgroups.cpus.pop(self._folder(container), None)
        if self.plugin is not None:
            nobody = nri.NriContainer(ContainerId(""), nri.SandboxId(""), "")
            now(self.plugin.observe(nri.NriEvent.REMOVE_POD, pod, nobody))

    def cpus_of(self, container: PlayedContainer) -> CpuMask:
        """The CPUs of its cgroup."""
        return self.cgroups.cpus[self._folder(container)]

    def write_cgroup(self, container: PlayedContainer, cpus: CpuMask) -> None:
        """Write its cgroup as another client."""
        self.cgroups.cpus[self._folder(container)] = cpus

    def _observe(self, event: nri.NriEvent, container: PlayedContainer) -> None:
        if self.plugin is not None:
            now(self.plugin.observe(event, container.pod, container.value()))

    def _apply(self, updates: Sequence[nri.ContainerUpdate]) -> None:
        self.answers.append(len(updates))
        assert len(updates) <= MAX_UPDATES
        for update in updates:
            container = self.containers.get(update.container)
            if container is not None:
                container.spec = _after(container.spec, update.cpuset)
                folder = self._folder(container)
                takes_it = container.phase is Phase.RUNNING and folder not in self.cgroups.refused
                if takes_it and container.spec.cpus:
                    self.cgroups.cpus[folder] = container.spec.cpus

    def _folder(self, container: PlayedContainer) -> Path:
        return self.cgroups.root / container.id


def _after(spec: nri.Cpuset, change: nri.Cpuset) -> nri.Cpuset:
    return nri.Cpuset(change.cpus or spec.cpus, change.memory_nodes or spec.memory_nodes)
