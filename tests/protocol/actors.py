"""Schedulers and users around kvplace."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from random import Random

from kvplace.core.errors import KvplaceError
from kvplace.core.request import DeviceNuma, EmulatorThreads, OnFailure, Policy, Request, Scope, Smt
from kvplace.core.request_json import PodRequest, read_pod_request, write_request
from kvplace.core.scalars import NodeName, PodUid
from kvplace.kube.object_records import PodRecord
from kvplace.kube.watches import PLACED_PODS
from tests.controller.replicas import Replica
from tests.core.requests import request_with
from tests.kube.faulty_cluster import FaultyCluster
from tests.protocol.cpu_claims import CpuClaims
from tests.protocol.devices import MODES, REQUESTS, requested_devices
from tests.protocol.evictions import KEPT, Evictions, again
from tests.protocol.network import Network, View
from tests.protocol.node import read_placement
from tests.protocol.promises import Promises
from tests.protocol.run_counts import Diary
from tests.protocol.run_kind import Kind

_NAMES = tuple("abcdefgh")
_OPTIONS: tuple[dict[str, str], ...] = (
    {"cpu-set": "any"},
    {"cpu-set": "one-numa"},
    {"cpu-set": "any", "kvplace.io/cpu-policy": "share"},
    {"cpu-set": "any", "kvplace.io/cpu-policy": "numa"},
    {"kvplace.io/cpu-policy": "none"},
)
_RETRIES_S = (0.5, 0.5, 3.0, 3.0, 12.0, 40.0)
"""When a kube-scheduler tries a pod again."""
_POLICIES = (*(Policy.EXCLUSIVE,) * 5, Policy.SHARE, Policy.NUMA, Policy.NONE)


class Server:
    """One replica as the others see it: the process that runs now, if one does."""

    def __init__(self, clock_s: float) -> None:
        self.view: View | None = None
        self.replica: Replica | None = None
        self.clock_s = clock_s
        """How far its wall clock is off."""


class Scheduler:
    """A kube-scheduler: what it knows of the pods is late, and it asks any replica at any time."""

    def __init__(
        self,
        cluster: FaultyCluster,
        servers: Mapping[str, Server],
        promises: Promises,
        network: Network,
        random: Random,
        diary: Diary,
        evictions: Evictions | None,
        cpu_claims: CpuClaims | None,
    ) -> None:
        """`evictions`: its own; None if it evicts no pod. `cpu_claims`: the claims that it allocates."""
        self._cpu_claims = cpu_claims
        self._cluster = cluster
        self._evictions = evictions
        self._servers = servers
        self._promises = promises
        self._network = network
        self._random = random
        self._diary = diary
        self._known: list[PodRecord] = []
        self._not_before: dict[PodUid, float] = {}
        self._attempts: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Try to place whatever waits, until cancelled."""
        loop = asyncio.get_running_loop()
        random = self._random
        try:
            while True:
                await asyncio.sleep(2.0 if self._network.calm else random.choice((0.05, 0.3, 1.0, 2.0)))
                if self._network.calm or random.random() < 0.8:
                    self._known = [pod for pod in self._promises.pods() if not pod.node]
                now = loop.time()
                ready = [pod for pod in self._known if self._not_before.get(pod.uid, 0.0) <= now]
                chosen = random.sample(ready, min(len(ready), random.choice((1, 1, 3))))
                if self._evictions is not None:  # priorities matter
                    ready.sort(key=lambda pod: (-pod.priority, self._not_before.get(pod.uid, 0.0)))
                    chosen = ready[: len(chosen)]
                for pod in chosen:
                    self._not_before[pod.uid] = now + random.choice(self._pauses())
                    attempt = loop.create_task(self._attempt(pod))
                    self._attempts.add(attempt)
                    attempt.add_done_callback(self._attempts.discard)
        finally:
            for attempt in self._attempts:
                attempt.cancel()

    def _pauses(self) -> tuple[float, ...]:
        """Return after how long it may try a pod again; each end of a victim makes it try."""
        if self._network.calm:
            return (0.5, 3.0, 12.0)
        return (0.5, 3.0) if self._evictions is not None else _RETRIES_S

    def _any_replica(self) -> Replica | None:
        running = [server.replica for server in self._servers.values() if server.replica is not None]
        return self._random.choice(running) if running else None

    async def _attempt(self, pod: PodRecord) -> None:
        claims = self._cpu_claims
        if claims is None:
            await self._try(pod)
        elif claims.begin(pod):
            try:
                await self._try(pod)
            finally:
                claims.end(pod)

    async def _try(self, pod: PodRecord) -> None:
        one, random = self._any_replica(), self._random
        if one is None:
            return
        with contextlib.suppress(KvplaceError, TimeoutError):
            if read_pod_request(pod.request).request.options.policy is Policy.NONE:
                await self._cluster.bind(pod.namespace, pod.name, pod.uid, NodeName("n1"), {})
                return
            offered = self._offered(pod)
            if offered is None:
                self._refused(pod)
                return
            found = await one.filter(pod, *offered)
            if not found.names and self._evictions is not None and pod.nominated:
                found = await one.filter(pod)  # all nodes, where the nominated one has failed
            if not found.names:
                self._refused(pod)
                if self._cpu_claims is not None:
                    self._cpu_claims.free(pod)
                if self._evictions is not None:
                    await self._evictions.preempt(one, pod)
                return
            node = random.choice(sorted(found.names))
            if (
                random.random() < 0.05 and not pod.migration and self._cpu_claims is None
            ):  # it may bind where filter was not asked, or stated no
                node = NodeName(random.choice(("n1", "n2")))
            if self._cpu_claims is not None:
                self._cpu_claims.allocate(pod, node)
            if random.random() < 0.3:
                await self._network.take_time()
            if random.random() < 0.3:
                one = self._any_replica() or one
            async with asyncio.timeout(10):
                error = await one.bind(pod, node)
            self._diary.note("bind refused" if error else "bound", f"{pod.name} to {node} {error}")
            if not error:
                self._promises.answered_yes(pod, node)

    def _offered(self, pod: PodRecord) -> tuple[str, ...] | None:
        """Return the nodes that other plugins let through, the nominated one alone; empty stands for all.

        None if no node has enough devices, as far as kube-scheduler counts them: sometimes it is late.
        """
        if pod.migration:
            return (self._cluster.migrates_to[pod.migration].target,)
        if self._cpu_claims is not None and (node := self._cpu_claims.node(pod)) is not None:
            return (node,)
        if requested_devices(pod) and (self._network.calm or self._random.random() < 0.9):
            return self._promises.nodes_with_devices_for(pod) or None
        if pod.nominated:
            return (pod.nominated,)
        return (self._random.choice(("n1", "n2")),) if self._random.random() < 0.1 else ()

    def _refused(self, pod: PodRecord) -> None:
        """Write on the pod that it fits nowhere, as kube-scheduler does, and forget its nomination.

        One for which others may have been evicted keeps it.
        """
        self._diary.note("refused", pod.name)
        nominated = "" if self._evictions is None else None
        live = self._cluster._pods.get((pod.namespace, pod.name))
        if live is not None and live.uid == pod.uid and not live.node:
            self._cluster.change_pod(pod.namespace, pod.name, was_tried=True, nominated=nominated)


class Users:
    """People who create, edit, migrate and delete VMs and pods."""

    def __init__(
        self,
        cluster: FaultyCluster,
        promises: Promises,
        random: Random,
        diary: Diary,
        kind: Kind,
        cpu_claims: CpuClaims | None,
    ) -> None:
        self._cpu_claims = cpu_claims
        self._have_devices = kind is Kind.DEVICES
        self._cluster = cluster
        self._promises = promises
        self._random = random
        self._diary = diary
        self._edits = random.choice((0.0, 0.3, 0.6))
        self._makes_room = kind in (Kind.ROOM, Kind.NODES)
        self._moves = kind is Kind.NODES
        self._preempts = kind is Kind.PREEMPTION
        self._names = (*_NAMES, *map(again, _NAMES)) if self._preempts else _NAMES

    async def run(self, *, pause_s: float) -> None:
        """Act every so often, until cancelled."""
        random = self._random
        while True:
            if random.random() < 0.15:
                self._create_many(random.sample(_NAMES, random.randint(2, 6)))
            await asyncio.sleep(random.expovariate(1 / pause_s))
            if self._makes_room and random.random() < 0.3:
                self._crowd()
                continue
            name = random.choice(self._names)
            pod = self._cluster._pods.get(("default", name))
            if pod is None:
                self._create(name)
            elif random.random() < self._edits:
                self._edit(pod)
            else:
                match random.random():
                    case share if share < 0.45:
                        self._cluster.delete_pod("default", name)
                        self._diary.note("deleted", name)
                    case share if share < 0.60:
                        self._cluster.delete_pod("default", name, force=True)
                        self._diary.note("deleted by force", name)
                    case share if share < 0.70:
                        self._cluster.delete_pod("default", name, force=True)
                        self._create(name)
                        self._diary.note("created again", name)
                    case share if share < 0.8 and not pod.node and not self._preempts:
                        self._cluster.change_pod("default", name, gated=random.random() < 0.5)
                    case _ if pod.vmi:
                        self._migrate(pod)

    def _create_many(self, names: list[str]) -> None:
        """Roll out VMs of one template, which wait together."""
        request = self._any_request()
        for name in names:
            if self._cluster._pods.get(("default", name)) is None:
                self._create(name, request)

    def _crowd(self) -> None:
        """Leave one VM on each NUMA node, and create one that needs a whole one."""
        seen: set[tuple[str, object]] = set()
        for pod in sorted(self._promises.pods(), key=lambda pod: pod.name):
            placement = read_placement(pod.placement).placement if pod.placement else None
            if placement is not None and (where := (pod.node, placement.numa_nodes)) not in seen:
                seen.add(where)
            else:
                self._cluster.delete_pod("default", pod.name)
        name = self._random.choice(_NAMES)
        if self._cluster._pods.get(("default", name)) is None:
            self._create(name, request_with(4, scope=Scope.ONE_NUMA))
        self._diary.note("crowded")

    def _any_request(self) -> Request:
        random = self._random
        if self._makes_room:
            sizes = (1, 2, 2, 3, 3) if self._moves else (1, 2, 2, 2, 3)
            return request_with(random.choice(sizes), scope=Scope.ONE_NUMA)
        if self._have_devices and random.random() < 0.8:
            return self.any_request_with_devices()
        scope = random.choice((Scope.ANY, Scope.ONE_NUMA, Scope.ONE_SOCKET))
        vcpus = random.choice((1, 2, 3, 4, 4, 6))
        if self._cpu_claims is not None:
            return request_with(vcpus, scope=scope, emulator_threads=EmulatorThreads.WITH_VCPUS)
        policy = random.choice(_POLICIES)
        return request_with(
            vcpus,
            policy=policy,
            scope=scope,
            smt=random.choice((Smt.PREFER, Smt.PREFER, *Smt)) if policy is Policy.EXCLUSIVE else Smt.PREFER,
            on_failure=random.choice((*(OnFailure.WAIT,) * 5, OnFailure.FLOAT)),
        )

    def any_request_with_devices(self) -> Request:
        """Make a request of a VM with devices."""
        random = self._random
        vcpus = random.choice((1, 1, 2, 2, 3))
        return request_with(
            vcpus,
            memory=vcpus << 30,
            scope=random.choice((Scope.ANY, Scope.ONE_NUMA)),
            policy=random.choice((*(Policy.EXCLUSIVE,) * 5, Policy.SHARE)),
            devices=random.choice(REQUESTS),
            device_numa=random.choice(MODES),
            on_failure=random.choice((*(OnFailure.WAIT,) * 7, OnFailure.FLOAT)),
        )

    def create_one_beside_its_devices(self) -> None:
        """Create a VM that must be beside its devices; nothing if every name is taken."""
        name = next((one for one in _NAMES if self._cluster._pods.get(("default", one)) is None), None)
        if name is not None:
            wanted = self._random.choice(REQUESTS)
            self._create(
                name, request_with(1, scope=Scope.ANY, devices=wanted, device_numa=DeviceNuma.REQUIRED)
            )

    def _create(self, name: str, request: Request | None = None) -> None:
        random = self._random
        request = request or self._any_request()
        policy = request.options.policy
        is_vm = random.random() < 0.8 and self._cpu_claims is None
        movable = self._makes_room and random.random() < 0.8
        asked = PodRequest(
            request,
            f"default/{name}",
            movable=movable,
            may_migrate=movable and self._moves and random.random() < 0.8,
        )
        pod = self._cluster.create_pod(
            name,
            request=write_request(asked),
            vmi=name if is_vm else "",
            vmi_uid=f"vmi-{name}-{random.random()}" if is_vm else "",
            shape=random.choice((b"vm", b"vm", b"vm", b"")),
            priority=random.choice((0, 0, 1, 2) if self._preempts else (0, 0, 1)),
            labels={**PLACED_PODS.labels, KEPT: "yes"} if self._preempts and random.random() < 0.3 else None,
            resources={"cpu": 1000 * request.vcpus} if self._preempts else None,
        )
        if self._moves and is_vm:
            self._cluster.put_running_vmi(pod.vmi, pod.vmi_uid)
        if self._cpu_claims is not None:
            self._cpu_claims.create(pod)
        self._diary.note("created", f"{name} {policy.value} {request.vcpus}")

    def _edit(self, pod: PodRecord) -> None:
        asking = self._random.choice(_OPTIONS)
        if self._have_devices and pod.request:
            mode = read_pod_request(pod.request).request.options.device_numa
            asking = {**asking, "kvplace.io/device-numa": mode.value}
        if self._makes_room:
            asking = {**asking, "kvplace.io/movable": "nodes" if self._moves else "true"}
        if pod.vmi:
            self._promises.edited.add(pod.vmi_uid)
            self._cluster.edit_vmi("default", pod.vmi, pod.vmi_uid, asking)
        else:
            self._promises.edited.add(pod.uid)
            self._cluster.edit_pod("default", pod.name, asking)
        self._diary.note("edited", f"{pod.name} {asking}")

    def _migrate(self, pod: PodRecord) -> None:
        target = f"{pod.name}-target"
        if self._cluster._pods.get(("default", target)) is None and pod.node:
            self._cluster.create_pod(
                target, request=pod.request, vmi=pod.vmi, vmi_uid=pod.vmi_uid, shape=b"vm"
            )
            self._diary.note("migrated", pod.name)
        else:
            with contextlib.suppress(KvplaceError):
                self._cluster.delete_pod("default", target)
