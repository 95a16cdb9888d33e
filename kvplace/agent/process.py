"""`kvplace agent`: all components of the agent in one process on one event loop, one process on a node.

Puts the components together, and chooses the source of containers: NRI or the tree of cgroups. Enforcement
begins at once, from the containers that the runtime and the cgroup tree show; publishing begins when the
node's objects have been read.

A second agent waits until the first has ended. Two instances of one NRI plugin that both set CPUs make the
runtime refuse every container, and two agents that enforce undo each other's work. During an update, or after
a user has started an agent by hand, there may be two for a while. The lock is a file on the host that the
kernel unlocks when its holder ends, however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import logging
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvplace.agent.cgroup_source import CgroupSource
from kvplace.agent.conditions import TopologyReason, cpusets_enforced
from kvplace.agent.cpuset_keeper import ContainerSource, CpusetKeeper
from kvplace.agent.devices import DeviceWatch
from kvplace.agent.memory import MemoryMoves, MemoryWatch
from kvplace.agent.node_objects import NodeObjects
from kvplace.agent.node_report import NodeReport
from kvplace.agent.pinning_guard import PinningClient, PinningGuard
from kvplace.agent.publisher import Publisher, PublisherClient
from kvplace.agent.this_machine import AgentSettings, MachineWatch
from kvplace.core.errors import Misconfigured
from kvplace.core.node_topology import Enforcement
from kvplace.kube.api_cluster import ApiCluster
from kvplace.kube.credentials import CredentialOptions
from kvplace.kube.events import EventRecorder, EventWriter
from kvplace.kube.session import open_session
from kvplace.kube.watches import WatchClient
from kvplace.linux.cgroups import MOUNT_POINT, CgroupVersion, CpusetHierarchy, find_cpuset_hierarchy
from kvplace.service.connections import Address
from kvplace.service.listening import listening
from kvplace.service.process import (
    Readiness,
    health_application,
    in_background,
    log_as_json,
    run_until_signal,
    watch_loop,
)

log = logging.getLogger(__name__)

_PAGE_SIZE = 50
"""Pods read at once: a page of 500 would be 10 MB for a moment."""
_NOT_READ = "the objects of this node have not been read yet"
_WORKER_THREADS = 2
"""For sweeps of /proc and calls to libvirt, so that one that hangs does not stop the others."""


_CGROUPS = Path("/sys", MOUNT_POINT)


class AgentClient(WatchClient, EventWriter, PublisherClient, PinningClient, Protocol):
    """The cluster calls of the components of the agent."""


@dataclass(frozen=True, slots=True)
class RunningAgent:
    """Values for tests and for the caller."""

    health_address: Address
    own: NodeObjects
    report: NodeReport


def run(settings: AgentSettings) -> None:
    """Run until SIGTERM or SIGINT; raises Misconfigured if an operator must change a setting."""
    log_as_json(settings.log_level)
    run_until_signal(_connected(settings))


@contextlib.asynccontextmanager
async def _connected(settings: AgentSettings) -> AsyncIterator[None]:
    session = await open_session(
        CredentialOptions(kubeconfig=str(settings.kubeconfig) if settings.kubeconfig else None)
    )
    cluster = ApiCluster(session, component="agent", page_size=_PAGE_SIZE)
    try:
        async with running_agent(settings, cluster):
            yield
    finally:
        await cluster.close()


@contextlib.asynccontextmanager
async def running_agent(settings: AgentSettings, cluster: AgentClient) -> AsyncIterator[RunningAgent]:
    """Run the agent of one node while the block runs; enters when its components have been started."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_WORKER_THREADS, "kernel"))
    readiness = Readiness(_NOT_READ)
    machine = MachineWatch(settings)
    own = NodeObjects(settings.node, machine.machine.topology)
    report = NodeReport()

    def machine_changed() -> None:
        found = machine.machine
        held = found.kubelet_cpus
        own.machine_changed(found.topology, held.held, observes_only=held.observes_only)

    def another_runs(why: str) -> None:
        readiness.obstacle = why

    machine.subscribe(machine_changed)
    machine_changed()
    events = EventRecorder(cluster)
    keeper, source = keeper_of(settings, own, report)
    proc = settings.on_host(Path("/proc"))
    guard = PinningGuard(
        *(own, keeper, MemoryMoves(own, proc), report, events, cluster),
        mounted=settings.on_host(_CGROUPS),
        proc=proc,
    )
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        address = await enter(
            listening("health", health_application("agent", readiness), settings.health_address)
        )
        await enter(only_instance(settings.on_host(LOCK), another_runs))
        readiness.obstacle = _NOT_READ
        # One line for each component, in their order of start.
        components: list[Coroutine[object, object, None]] = [
            *(store.run_in_one_past(cluster) for store in own.stores),
            machine.run(),
            keeper.run(source),
            guard.run(),
            MemoryWatch(own, lambda: keeper.plan, report, host=settings.host).run(),
            DeviceWatch(settings, own, keeper, machine, report).run(),
            Publisher(cluster, own, machine, report).run(),
            _become_ready(own, readiness),
            watch_loop(),
        ]
        await enter(in_background(*components))
        try:
            yield RunningAgent(address, own, report)
        finally:
            readiness.obstacle = "stopping"
            await events.finish()


async def _become_ready(own: NodeObjects, readiness: Readiness) -> None:
    await own.wait_until_known()
    gc.freeze()  # imported modules and read objects stay: full collections need not walk them again
    readiness.obstacle = ""


def keeper_of(
    settings: AgentSettings, own: NodeObjects, report: NodeReport
) -> tuple[CpusetKeeper, ContainerSource | None]:
    """Make the keeper with the source that the operator asked for, else with the one that the node offers.

    A host without cpusets has no source, and a condition states this: the rest of the agent is of use there,
    too.
    """
    mounted = settings.on_host(_CGROUPS)
    try:
        hierarchy = find_cpuset_hierarchy(mounted)
    except Misconfigured as error:
        hierarchy = CpusetHierarchy(mounted, CgroupVersion.V2)
        keeper = CpusetKeeper(own, report, hierarchy, observed=Enforcement.NONE)
        keeper.connected(Enforcement.NONE, cpusets_enforced(TopologyReason.NO_CPUSETS, f"{error}."))
        return keeper, None
    socket = settings.on_host(settings.nri_socket)
    how = settings.enforcement or (Enforcement.NRI if socket.exists() else Enforcement.CGROUP)
    keeper = CpusetKeeper(own, report, hierarchy, observed=None if how.by_agent else how)
    # dra-driver-cpu needs NRI; two plugins may be connected as long as one of them sets no cpuset.
    if how in (Enforcement.NRI, Enforcement.DRA):
        # Costs 4 MiB, which nodes without NRI need not pay.
        from kvplace.agent.nri_source import NriSource
        from kvplace.nri.plugin import NriRuntime

        return keeper, NriSource(keeper, NriRuntime(socket), hierarchy.root)
    return keeper, CgroupSource(keeper, own, hierarchy.root)


LOCK = Path("/run/kvplace/agent.lock")
_TRY_LOCK_EVERY_S = 0.2


@asynccontextmanager
async def only_instance(lock: Path, waiting: Callable[[str], None]) -> AsyncIterator[None]:
    """Be the only one that holds the lock while the block runs.

    `waiting` is called, with the reason, when another one holds it. Raises Misconfigured when the file cannot
    be opened.
    """
    try:
        lock.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise Misconfigured(f"{lock} cannot be opened: {error.strerror}; mount its folder writable") from None
    try:
        why = ""
        while not _try_lock(descriptor):
            if not why:
                other = _holder(descriptor)
                why = f"Another agent runs on this node (process {other}); this one waits for its end."
                log.warning(why)
                waiting(why)
            await asyncio.sleep(_TRY_LOCK_EVERY_S)
        if why:
            log.info("the other agent has ended")
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, b"%d" % os.getpid(), 0)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(descriptor: int) -> str:
    return os.pread(descriptor, 20, 0).decode(errors="replace") or "unknown"
