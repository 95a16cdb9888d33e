"""Preemption as kube-scheduler does it, and what is promised about victims.

kube-scheduler counts CPUs. Where a pod would fit by number without pods of lower priority it asks for
victims, evicts the ones in the answer, and nominates the node. A victim is created again at once, under
another name, and competes for what it has left.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from kvplace.core.allocator.allocate import try_place
from kvplace.core.ledger import LedgerChange
from kvplace.core.request_json import read_pod_request
from kvplace.core.scalars import NodeName, PodUid
from kvplace.kube.object_records import PodRecord
from kvplace.nodes.node_machine import Unusable, machine_of_node
from kvplace.scheduler.extender_protocol import NodeVictims, PreemptionArgs
from tests.controller.replicas import Replica
from tests.kube.faulty_cluster import FaultyCluster
from tests.protocol.device_promises import RETRIED_S, BrokenPromise
from tests.protocol.promises import Promises
from tests.protocol.run_counts import Diary

KEPT = "kept"
"""A label of pods; in some stories no pod with it may be evicted."""
_AGAIN = "-again"
_COUNTED = ("Pending", "Running")


@dataclass(frozen=True)
class _Eviction:
    """Whom a node has lost for a pod."""

    pod: PodRecord
    node: NodeName
    victims: tuple[str, ...]


class Evictions:
    """The evictions of a story; each must be of use as long as nothing fails."""

    def __init__(
        self, cluster: FaultyCluster, promises: Promises, random: Random, diary: Diary, *, in_peace: bool
    ) -> None:
        """`in_peace`: nothing fails but replicas, which are killed."""
        self._cluster = cluster
        self._promises = promises
        self._random = random
        self._diary = diary
        self._in_peace = in_peace
        self._awaited: dict[PodUid, _Eviction] = {}
        """By the pod that is to get the cores."""

    # What kube-scheduler does.

    async def preempt(self, one: Replica, pod: PodRecord) -> None:
        """Ask whom to evict for a pod that fits nowhere, and do so."""
        live = self._promises.pod(pod.uid)
        if live is None or live.node or live.deleting or self._victims_end(live):
            return
        sent = {node: found for node in self._nodes() if (found := self._sent(node, live)) is not None}
        if not sent:
            self._cluster.change_pod(pod.namespace, pod.name, nominated="")
            return
        args = PreemptionArgs(live, live.resources, False, False, sent)
        was_in_vain = self._in_vain(live.uid)
        answer = await one.extender.preempt(args)
        for node, victims in answer.items():
            uids = victims.uids
            sees_all = all(uid in one.cache.pods.records for uid in sent[node].uids) if node in sent else True
            self._check_answer(live, node, uids, victims.violations, sees_all=sees_all)
            if was_in_vain:  # and now some more have to go
                self._promises.break_one(was_in_vain)
            if self._random.random() < 0.9 or self._in_peace:  # else kube-scheduler has ended
                self._evict(live, node, uids)

    def _victims_end(self, pod: PodRecord) -> bool:
        """Whether victims still end on the node that is nominated: then kube-scheduler does not ask."""
        return any(
            other.node == pod.nominated and other.deleting and other.priority < pod.priority
            for other in self._promises.pods()
            if pod.nominated
        )

    def _nodes(self) -> list[NodeName]:
        return [node.name for node in self._cluster._nodes.records.values()]

    def _here(self, node: NodeName) -> list[PodRecord]:
        here = [pod for pod in self._promises.pods() if pod.node == node and pod.phase in _COUNTED]
        return sorted(here, key=lambda pod: (-pod.priority, pod.uid))

    def _sent(self, node: NodeName, pod: PodRecord) -> NodeVictims | None:
        """Choose victims by the number of CPUs, as few and as unimportant ones as that allows."""
        topology = self._cluster._topologies.get(node)
        if topology is None or topology.topology is None:
            return None
        here = self._here(node)
        left = topology.topology.allocatable.bit_count() - _cpus(pod)
        left -= sum(_cpus(other) for other in here if other.priority >= pod.priority)
        victims = []
        for other in here:
            if other.priority < pod.priority:
                left -= _cpus(other)
                if left < 0:
                    left += _cpus(other)
                    victims.append(other)
        if left < 0 or not victims:
            return None
        return NodeVictims(tuple(one.uid for one in victims), self._violations(victims))

    def _violations(self, victims: Sequence[PodRecord]) -> int:
        return sum(KEPT in victim.labels for victim in victims) if self._cluster.disruption_budgets else 0

    def _evict(self, pod: PodRecord, node: NodeName, uids: Sequence[PodUid]) -> None:
        victims = [victim for uid in uids if (victim := self._promises.pod(uid)) is not None]
        self._awaited[pod.uid] = _Eviction(pod, node, tuple(victim.name for victim in victims))
        self._diary.note("evicted", f"{' '.join(victim.name for victim in victims)} of {node} for {pod.name}")
        for victim in victims:
            self._cluster.delete_pod(victim.namespace, victim.name)
            self._create_again(victim)
        live = self._promises.pod(pod.uid)
        if live is not None and not live.node:
            self._cluster.change_pod(pod.namespace, pod.name, nominated=node)

    def _create_again(self, victim: PodRecord) -> None:
        name = again(victim.name)
        if self._cluster._pods.get((victim.namespace, name)) is None:
            self._cluster.create_pod(
                name,
                request=victim.request,
                vmi=name if victim.vmi else "",
                vmi_uid=f"vmi-{name}-{self._random.random()}" if victim.vmi else "",
                shape=victim.shape,
                priority=victim.priority,
                labels=json.loads(victim.labels),
                resources=victim.resources,
            )

    # What is promised.

    def _check_answer(
        self, pod: PodRecord, node: NodeName, uids: Sequence[PodUid], violations: int, *, sees_all: bool
    ) -> None:
        """Check whom a replica answers; of pods that it does not see yet it may count too many violations."""
        victims = [victim for uid in uids if (victim := self._promises.pod(uid)) is not None]
        if not uids or any(victim.priority >= pod.priority for victim in victims):
            self._promises.break_one(f"P: {[victim.name for victim in victims]} have to go for {pod.name}")
        least = self._violations(victims)
        if len(victims) == len(uids) and (violations < least or (sees_all and violations > least)):
            self._promises.break_one(f"P: {violations} violations are answered for {uids}")

    def _in_vain(self, uid: PodUid) -> str:
        """State who was evicted in vain for a pod: it waits, and what they left is not reserved for it."""
        eviction, live = self._awaited.get(uid), self._promises.pod(uid)
        if eviction is None or live is None or live.node or live.deleting or not self._in_peace:
            return ""
        if uid in self._promises.outranked:
            return ""
        if uid in self._promises.ledger(eviction.node).claims:
            return ""
        return f"P: {' and '.join(eviction.victims)} left {eviction.node} for {live.name}, which still waits"

    def check_use(self) -> None:
        """Check, in calm, that no client was evicted in vain."""
        for uid in self._awaited:
            if broken := self._in_vain(uid):
                raise BrokenPromise(broken)

    def check_waiting(self) -> None:
        """Check, in calm, that no pod waits for which others would have been evicted, or are."""
        for pod in self._promises.pods():
            self._check_waits_rightly(pod, self._nodes())

    def check_waiting_since_the_last_try(self) -> None:
        """Check the same, but for pods for which something is reserved, and for nodes that have just changed.

        Others may be evicted at any time, and a VM bound where that makes kube-scheduler ask for victims.
        """
        settled = [node for node in self._nodes() if not self._promises.has_changed(node, RETRIED_S)]
        for pod in self._promises.pods():
            if not any(pod.uid in self._promises.ledger(node).claims for node in self._nodes()):
                self._check_waits_rightly(pod, settled)

    def _check_waits_rightly(self, pod: PodRecord, nodes: Sequence[NodeName]) -> None:
        if not (pod.node or pod.deleting):
            for node in nodes:
                if self._sent(node, pod) is not None and self._fits_without(node, pod):
                    raise BrokenPromise(f"P: {pod.name} waits, and it fits on {node} without others")

    def _fits_without(self, node: NodeName, pod: PodRecord) -> bool:
        """Whether a pod fits on a node without those of lower priority."""
        machine = machine_of_node(self._cluster._nodes.get(node), self._cluster._topologies.get(node))
        if isinstance(machine, Unusable):
            return False
        ledger = self._promises.ledger(node)
        lower = tuple(other.uid for other in self._here(node) if other.priority < pod.priority)
        free = machine.free(ledger.after(LedgerChange(releases=(*lower, pod.uid))))
        return try_place(machine.topology, free, read_pod_request(pod.request).request) is not None


def again(name: str) -> str:
    """Name the pod that takes the place of an evicted one."""
    return name.removesuffix(_AGAIN) if name.endswith(_AGAIN) else name + _AGAIN


def _cpus(pod: PodRecord) -> int:
    return read_pod_request(pod.request).request.vcpus
