"""VMs that come and go by the thousand, over two replicas of kvplace on a cluster in memory, in virtual time.

Everything that happens to pods and nodes in a long life happens here in a random order: pods that are bound,
refused, deleted before Filter, between Filter and Bind, while they run, by force; nodes that go with the pods
on them, and new ones that come. At the end no client is left but the nodes, and `kept` counts what every
container of the replicas still holds.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import AsyncExitStack
from random import Random
from typing import Any, Self

from kvplace.core.node_topology import Enforcement
from kvplace.core.request import Policy
from kvplace.kube.object_records import PodRecord
from kvplace.kube.watches import LEDGERS, NODES, PODS, TOPOLOGIES
from tests.controller.replicas import Replica, asking_pod, replica
from tests.kube.faulty_cluster import FaultyCluster
from tests.nodes.machines import EIGHT

_NODES = 12
_AT_ONCE = 40
"""Pods that there are at most."""
_SETTLE_S = 200.0
"""After which nothing is under way any more: patience, rounds and holds are over."""


class Churn:
    """Two replicas and what happens to their cluster."""

    def __init__(self, seed: int = 1) -> None:
        self._random = Random(seed)
        self._cluster = FaultyCluster()
        self._stack = AsyncExitStack()
        self._replicas: list[Replica] = []
        self._pods: deque[PodRecord] = deque()
        self._made = 0
        self._nodes: list[str] = []
        self.happened: Counter[str] = Counter()

    async def __aenter__(self) -> Self:
        for _ in range(_NODES):
            self._add_node()
        for _ in range(2):
            one = await self._stack.enter_async_context(replica(self._cluster))
            one.events._clock = asyncio.get_running_loop().time  # messages are forgotten in virtual time
            self._replicas.append(one)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def run(self, pods: int) -> None:
        """Let so many pods come and go; ends when all are gone and nothing is under way."""
        for _ in range(pods):
            await self._come()
            while len(self._pods) > self._random.randrange(_AT_ONCE):
                self._go()
            if self._random.random() < 0.01:
                self._replace_node()
            await asyncio.sleep(self._random.random())
        while self._pods:
            self._go()
        await asyncio.sleep(_SETTLE_S)
        self._cluster.events.clear()
        for kind in (PODS, NODES, TOPOLOGIES, LEDGERS):
            self._cluster.compact(kind)

    def kept(self) -> dict[str, int]:
        """Count what every container of the replicas holds, by its place."""
        found: Counter[str] = Counter()
        for one in self._replicas:
            for part in (one.cache, one.events, one.extender, one.controller):
                for place, size in _containers(part, type(part).__name__, set()):
                    found[place] += size
        return dict(found)

    async def _come(self) -> None:
        """Create a pod and try to get it bound."""
        random, one = self._random, self._random.choice(self._replicas)
        self._made += 1
        policy = random.choice((Policy.EXCLUSIVE, Policy.EXCLUSIVE, Policy.SHARE, Policy.NUMA))
        pod = asking_pod(
            self._cluster,
            f"vm-{self._made}",
            random.choice((1, 2, 3, 4, 9)),
            policy=policy,
            explain=random.random() < 0.1,
        )
        self._pods.append(pod)
        if random.random() < 0.05:
            self._delete(pod)
            self.happened["deleted before filter"] += 1
        await asyncio.sleep(0.01)
        found = await one.filter(pod)
        if random.random() < 0.05:
            self._delete(pod)
            self.happened["deleted before bind"] += 1
        if not found.names:
            self.happened["refused"] += 1
        elif random.random() < 0.05:
            self.happened["never bound"] += 1
        else:
            error = await one.bind(pod, random.choice(found.names))
            self.happened["bind refused" if error else "bound"] += 1

    def _go(self) -> None:
        """End a pod in one of the ways in which pods end."""
        pod = self._pods.popleft() if self._random.random() < 0.8 else self._pods.pop()
        if self._cluster._pods.get((pod.namespace, pod.name)) is None:
            return
        if self._random.random() < 0.7:
            self._cluster.change_pod(pod.namespace, pod.name, phase="Succeeded", compute_terminated=True)
        self._cluster.delete_pod(pod.namespace, pod.name, force=True)

    def _delete(self, pod: PodRecord) -> None:
        if self._cluster._pods.get((pod.namespace, pod.name)) is not None:
            self._cluster.delete_pod(pod.namespace, pod.name, force=True)

    def _add_node(self) -> None:
        name = f"node-{len(self.happened)}-{self.happened['node added']}"
        self.happened["node added"] += 1
        self._nodes.append(name)
        enforcement = self._random.choice((Enforcement.NONE, Enforcement.NRI))
        self._cluster.create_node(name)
        self._cluster.put_topology(name, EIGHT, enforcement=enforcement)

    def _replace_node(self) -> None:
        """Delete a node as a cluster does: the object, its pods by the garbage collector, its topology."""
        name = self._nodes.pop(self._random.randrange(len(self._nodes)))
        self._cluster.delete_node(name)
        for pod in list(self._cluster._pods.records.values()):
            if pod.node == name:
                self._cluster.delete_pod(pod.namespace, pod.name, force=True)
        self._cluster.delete_topology(name)
        self._add_node()


def _containers(thing: object, place: str, seen: set[int]) -> Iterator[tuple[str, int]]:
    """Walk the objects of kvplace that one object holds; yields the size of each container."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, dict | set | frozenset | list | deque):
        yield place, len(thing)
        values = list(thing.values()) if isinstance(thing, dict) else list(thing)
        for value in values:
            yield from _containers(value, f"{place}[]", seen)
        return
    if (
        dataclasses.is_dataclass(thing)
        or not type(thing).__module__.startswith("kvplace.")
        or isinstance(thing, FaultyCluster)
    ):
        return
    for name in _attributes(thing):
        yield from _containers(getattr(thing, name, None), f"{place}.{name}", seen)


def _attributes(thing: Any) -> list[str]:
    slots = [slot for kind in type(thing).__mro__ for slot in getattr(kind, "__slots__", ())]
    return [*getattr(thing, "__dict__", {}), *slots]
