"""The promises of the design, checked after every step of a story.

What is checked is the truth that no process of kvplace sees whole: stored objects and running containers.
Only what a step has changed is checked again. Numbers are the numbers of the guarantees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Generic, TypeVar

from kvplace.controller.reconciler import REPORT_S, SILENCE_S
from kvplace.core.allocator.allocate import try_place
from kvplace.core.claim_changes import RESERVED_S, held_by_others
from kvplace.core.cpuset import cpus_of, format_cpu_list, mask_of
from kvplace.core.errors import Corrupt
from kvplace.core.ledger import Claim, Ledger, claim_of
from kvplace.core.placement import Placement, PodPlacement
from kvplace.core.request import Policy
from kvplace.core.request_json import read_pod_request
from kvplace.core.scalars import NO_CPUS, CpuMask, NodeName, PodUid
from kvplace.kube.memory_objects import ObjectLog
from kvplace.kube.object_records import LedgerRecord, PodRecord, ResourceClaimRecord
from kvplace.nodes.node_machine import Unusable, machine_of_node
from tests.kube.faulty_cluster import FaultyCluster
from tests.protocol.cpu_claims import given_cpus
from tests.protocol.device_promises import RETRIED_S, BrokenPromise, DevicePromises
from tests.protocol.node import ContainerChanges, Running, SimulatedNode, read_placement
from tests.protocol.run_counts import Diary

R = TypeVar("R")
_LOOK_S = 35.0
"""A reservation that nothing renews may be checked so much later."""


class _Changes(Generic[R]):
    """The changes of a kind that have not been checked yet, each as what was there before and after."""

    def __init__(self, log: ObjectLog[R]) -> None:
        self.new: list[tuple[R | None, R | None]] = []
        append = log._append

        def note(before: Any, after: Any) -> None:
            self.new.append((before and before.record, after and after.record))
            append(before, after)

        log._append = note  # type: ignore[method-assign]

    def take(self) -> list[tuple[R | None, R | None]]:
        """Return what has changed since the last call."""
        taken, self.new = self.new, []
        return taken


class Promises(DevicePromises):
    """Watches the truth of one story."""

    def __init__(
        self,
        cluster: FaultyCluster,
        nodes: Iterable[SimulatedNode],
        containers: ContainerChanges,
        diary: Diary,
    ) -> None:
        super().__init__()
        self.broken: BrokenPromise | None = None
        """The first promise that did not hold."""
        self.edited: set[str] = set()
        """VMIs and plain pods whose owner has asked for something else, by UID."""
        self.robbed: dict[PodUid, NodeName] = {}
        """Pods whose claim a foreign client took away there: nothing is promised until they have it all."""
        self.may_part: Callable[[PodUid], bool] = lambda _uid: False
        """Whether a bind under way, or a call that is, may still part the pod's claim and its placement.

        An attempt to bind releases a claim that it made. Where a foreign client has taken one away, another
        attempt may bind with what was taken, and is covered by the claim of the first; and a placement for
        which a claim was stored may arrive when that claim has been taken away.
        """
        self.disturbed: set[NodeName] = set()
        """Nodes where that has happened: others may have been given the CPUs to share meanwhile."""
        self.replaced: set[NodeName] = set()
        """Nodes that have been another machine since."""
        self.outranked: set[PodUid] = set()
        """Pods for which something was reserved that was given to one of higher priority."""
        self.all_know_reservations = True
        """Whether no replica may give away what is reserved for a pod."""
        self._reserved: dict[tuple[NodeName, PodUid], tuple[str, float]] = {}
        """How each reservation is, and since when."""
        self._cluster = cluster
        self._diary = diary
        self._nodes = {node.name: node for node in nodes}
        self._pod_changes: _Changes[PodRecord] = _Changes(cluster._pods)
        self._ledger_changes: _Changes[LedgerRecord] = _Changes(cluster._ledgers)
        self._resource_claim_changes: _Changes[ResourceClaimRecord] = _Changes(cluster._resource_claims)
        self.agreeing = 0
        """How many pods the last such check was about."""
        self._containers = containers
        self._in_force: dict[PodUid, PodPlacement | None] = {}
        self._pods: dict[PodUid, PodRecord] = {}
        self._gone_at: dict[PodUid, float] = {}
        self._priorities: dict[PodUid, int] = {}
        """Also of pods that are gone."""
        self._migrations: dict[PodUid, tuple[str, PodUid]] = {}
        """The migration and the VMI of each pod, also of pods that are gone."""
        self._ledgers: dict[NodeName, Ledger] = {}
        self._changed_at: dict[NodeName, float] = {}
        """When each ledger was written last."""

    def look(self) -> None:
        """Check what the last step has changed, until a promise is broken."""
        changes = (self._pod_changes, self._ledger_changes, self._resource_claim_changes)
        if not (any(one.new for one in changes) or self._containers.nodes):
            return
        if self.broken is not None:
            return
        touched: set[NodeName] = set()
        try:
            for before, after in self._ledger_changes.take():
                touched.add(self._ledger_changed(before, after))
            for old, new in self._pod_changes.take():
                touched.add(self._pod_changed(old, new))
            for _, claim in self._resource_claim_changes.take():
                touched |= {pod.node for pod in self._pods.values() if claim and pod.uid == claim.name}
            touched |= self._containers.take()
            for name in touched & self._nodes.keys():
                self._check_node(self._nodes[name])
        except (BrokenPromise, Corrupt) as error:
            self.break_one(str(error))

    def break_one(self, why: str) -> None:
        """Note a promise that does not hold; the first one counts."""
        if self.broken is None:
            self.broken = BrokenPromise(why)
            self._diary.step("", f"BROKEN {why}")

    def raise_broken(self) -> None:
        """Raise the first promise that did not hold, if there was one."""
        if self.broken is not None:
            raise self.broken

    def pods(self) -> list[PodRecord]:
        """Return all pods that there are."""
        return list(self._pods.values())

    def pod(self, uid: PodUid) -> PodRecord | None:
        """Return a pod that there is."""
        return self._pods.get(uid)

    def ledger(self, node: NodeName) -> Ledger:
        """Return a node's ledger, empty if it has none."""
        return self._ledgers.get(node) or Ledger()

    def has_changed(self, node: NodeName, seconds: float) -> bool:
        """Whether a node's ledger was written within the last seconds."""
        return self._changed_at.get(node, float("-inf")) > self._diary.clock() - seconds

    # Promise 1: one owner per CPU.

    def _ledger_changed(self, before: LedgerRecord | None, after: LedgerRecord | None) -> NodeName:
        record = after or before
        assert record is not None
        node, old = record.node, self._ledgers.get(record.node, Ledger())
        if record.problem:
            return node  # unreadable for a while: what was in it counts
        new = after.ledger if after is not None else Ledger()
        for cpu, owner in new.owners.items():
            if old.owners.get(cpu, owner) != owner:
                raise BrokenPromise(f"1: CPU {cpu} of {node} went from {old.owners[cpu]} to {owner}")
        new.check()
        owned = mask_of(new.owners)
        for claim in new.claims.values():
            is_settled = claim.relocation is None and claim.reserved is None
            is_settled = is_settled and claim.uid in self._pods and node not in self.disturbed
            named = claim.cpus & ~claim.owned if claim.policy is not Policy.NUMA else NO_CPUS
            if named & owned and is_settled:
                raise BrokenPromise(
                    f"1: {claim.uid} shares CPUs {named & owned:#b} of {node} with their owner"
                )
        self._check_reservations(node, old, new)
        self._ledgers[node] = new
        self._changed_at[node] = self._diary.clock()
        self._end_robberies(node)
        return node

    def _end_robberies(self, node: NodeName) -> None:
        """Promise something again about pods of a node that have for good what a foreign client took."""
        ledger = self.ledger(node)
        for uid in [uid for uid, where in self.robbed.items() if where == node]:
            claim = ledger.claims.get(uid)
            if claim is None or held_by_others(ledger, claim):  # which only a person can fix
                continue
            if self._holds_all(node, claim) and not self.may_part(uid):
                del self.robbed[uid]

    def _check_reservations(self, node: NodeName, old: Ledger, new: Ledger) -> None:
        """Check that no other pod got what was reserved for another pod, and that this one got just that."""
        for uid, before in old.claims.items():
            after = new.claims.get(uid)
            if before.reserved is None:
                continue
            for cpu in cpus_of(CpuMask(before.reserved.owned & ~before.owned)):
                owner = new.owners.get(cpu, uid)
                may_have = owner in (uid, old.owners.get(cpu)) or owner in self.robbed
                may_have |= after is None and self._outranks(owner, uid)
                may_have |= self._is_target(owner, before)
                if not may_have and not owner.startswith("stranger") and not self.all_know_reservations:
                    self._diary.happened["given away by an earlier version"] += 1
                elif not may_have and not owner.startswith("stranger"):
                    raise BrokenPromise(f"1: CPU {cpu} of {node} was reserved for {uid} and went to {owner}")
            if after is not None and after.reserved is None:
                self._diary.happened["bound on what was reserved"] += before.owned == after.owned
                is_whole = before.owned.bit_count() == after.owned.bit_count()
                may_differ = node in self.replaced or self._is_outranked(uid, old, new)
                if is_whole and before.owned != after.owned and not may_differ:
                    raise BrokenPromise(f"1: {uid} got {_owned(after)} instead of {_owned(before)} of {node}")
            if after is None and self._is_outranked(uid, old, new):
                self.outranked.add(uid)
                if not self.all_know_reservations:  # who does not may be binding the pod at this moment
                    self.robbed[uid] = node
                    self.disturbed.add(node)
        for uid, claim in new.claims.items():
            if claim.reserved is None:
                self._reserved.pop((node, uid), None)
            elif self._reserved.get((node, uid), ("", 0.0))[0] != (now := f"{claim.reserved} {claim.owned}"):
                self._diary.happened["reserved"] += (node, uid) not in self._reserved
                self._reserved[node, uid] = (now, self._diary.clock())

    def _is_outranked(self, uid: PodUid, old: Ledger, new: Ledger) -> bool:
        """Whether a write gives what was reserved for a pod to another one of higher priority.

        That one may be gone since: who writes has then not seen it.
        """
        others = new.claims.keys() - old.claims
        return uid in self._pods and any(self._outranks(other, uid) for other in others)

    def _is_target(self, uid: PodUid, kept: Claim) -> bool:
        """Whether a pod is the one of the migration that a reservation is for."""
        new = {one.uid: (one.migration, one.vmi_uid) for _, one in self._pod_changes.new if one is not None}
        migration = kept.reserved.migration if kept.reserved is not None else ""
        return bool(migration) and (new | self._migrations).get(uid) == (migration, kept.uid)

    def _outranks(self, one: PodUid, other: PodUid) -> bool:
        return self._priorities.get(one, 0) > self._priorities.get(other, 0)

    def _is_reserved(self, node: NodeName, claim: Claim, pod: PodRecord | None) -> bool:
        """Whether a claim is a reservation for a pod that waits, and has not outlived its end for long."""
        if claim.reserved is None:
            return False
        if claim.reserved.migration:
            return self._diary.clock() - self._reserved[node, claim.uid][1] <= RESERVED_S + _LOOK_S
        if pod is None or pod.node or pod.deleting:
            return False
        others = self.ledger(node).claims.values() if claim.still_in_use else ()
        still_in_use = [self._pods.get(other.uid) for other in others if other.cpus & claim.still_in_use]
        if any(other is None or other.deleting or other.has_ended for other in still_in_use):
            return True  # victims still end
        return self._diary.clock() - self._reserved[node, claim.uid][1] <= RESERVED_S + _LOOK_S

    def _holds_all(self, node: NodeName, claim: Claim) -> bool:
        """Whether a claim has what its pod runs on and what it is bound with.

        A pod that waits may still be bound with what was taken, by a bind that is under way.
        """
        running, pod = self._nodes[node].containers.get(claim.uid), self._pods.get(claim.uid)
        if pod is not None and not pod.node:
            return False
        used = [read_placement(pod.placement)] if pod is not None and pod.placement else []
        if running is not None:
            used += [bound for bound in (running.in_force, running.moving_to) if bound is not None]
        return all(_keeps(claim, bound.placement) for bound in used)

    def _check_node(self, node: SimulatedNode) -> None:
        ledger = self.ledger(node.name)
        taken = NO_CPUS
        for uid, running in node.containers.items():
            alone = running.alone_on
            claim = ledger.claims.get(uid)
            if uid not in self.robbed:
                if alone & taken:
                    raise BrokenPromise(f"1: two pods run on CPUs {alone & taken:#b} of {node.name}")
                if not node.is_forgotten and alone & ~(claim.owned if claim is not None else NO_CPUS):
                    raise BrokenPromise(f"6: {uid} runs on {alone:#b} of {node.name} and has {_owned(claim)}")
                taken |= alone
            self._check_moves(uid, running.in_force)
            if running.qemu is not None and running.in_force is not None and uid not in self.robbed:
                self._check_devices(node, uid, running.qemu, running.in_force)
        for pod in self._pods.values():
            if pod.node == node.name and pod.uid not in self.robbed:
                self._check_bound(pod, ledger.claims.get(pod.uid))

    # Promise 2: a pod is bound only after its claim is stored, node and cores in one write.

    def _check_bound(self, pod: PodRecord, claim: Claim | None) -> None:
        if pod.has_ended or not pod.placement:
            return
        bound = read_placement(pod.placement)
        if bound.placement.floats:
            return
        if claim is None or not _covers(claim, bound.placement):
            raise BrokenPromise(f"2: {pod.name} is bound to {pod.node} and its claim has {_owned(claim)}")
        if pod.resource_claims:
            given = given_cpus(self._cluster._resource_claims.get((pod.namespace, pod.uid)))
            if given != format_cpu_list(bound.placement.owned):
                raise BrokenPromise(f"2: {pod.name} owns {_owned(claim)} and is given CPU {given or 'none'}")

    def _pod_changed(self, before: PodRecord | None, after: PodRecord | None) -> NodeName:
        pod = after or before
        assert pod is not None
        if after is None:
            self._pods.pop(pod.uid, None)
            self._gone_at[pod.uid] = self._diary.clock()
            return pod.node
        self._pods[pod.uid] = after
        self._priorities[pod.uid] = after.priority
        self._migrations[pod.uid] = after.migration, PodUid(after.vmi_uid)
        if after.placement:
            bound = read_placement(after.placement)
            if (bound.pod_uid, bound.node) != (after.uid, after.node):
                raise BrokenPromise(
                    f"2: the placement of {after.name} is for {bound.pod_uid} on {bound.node}"
                )
            if bound.revision > 1 and not {after.uid, after.vmi_uid} & self.edited:
                follows = self._follows_devices(before, after)
                if not read_pod_request(after.request).movable and not follows:
                    raise BrokenPromise(f"7: {after.name} was moved, and no client had asked for it")
                self._diary.happened["moved"] += before is not None and before.placement != after.placement
        if before is not None and before.node and after.node != before.node:
            raise BrokenPromise(f"2: {after.name} went from {before.node} to {after.node}")
        self._end_robberies(after.node)
        return after.node

    def answered_yes(self, pod: PodRecord, node: NodeName) -> None:
        """Check a bind that was answered with yes: the pod is bound there, unless it is gone."""
        live = self._pods.get(pod.uid)
        if live is not None and (live.node != node or not live.placement):
            self.break_one(f"2: {pod.name} is not bound to {node}, as was answered")

    # Promise 6: cores are released when nothing uses them any more.

    def check_claims(self) -> None:
        """Check, in calm, that every claim belongs to a pod that is bound with it."""
        self._check_claims(0.0)

    def check_claims_but_of_pods_that_are_gone_since_just_now(self) -> None:
        """Check the same, but for pods that were evicted: agents may not report them for a while."""
        self._check_claims(SILENCE_S + REPORT_S)

    def _check_claims(self, silence_s: float) -> None:
        just_now = self._diary.clock() - silence_s
        for node, ledger in self._ledgers.items():
            for uid, claim in ledger.claims.items():
                pod = self._pods.get(uid)
                if self._is_reserved(node, claim, pod) or self._gone_at.get(uid, 0.0) > just_now:
                    continue
                if pod is None or pod.node != node or pod.has_ended or claim.reserved is not None:
                    raise BrokenPromise(
                        f"6: {claim.pod} has {_owned(claim)} of {node} and does not run there"
                    )

    def check_waiting(self) -> None:
        """Check, in calm, that a pod waits only for cores that are not free."""
        self._check_waiting(0.0)

    def check_waiting_since_the_last_try(self) -> None:
        """Check the same, but for cores that was released just now: a move may have made room."""
        self._check_waiting(RETRIED_S)

    def _check_waiting(self, retried_s: float) -> None:
        for pod in self._pods.values():
            if pod.node or pod.deleting:
                continue
            request = read_pod_request(pod.request).request
            for name, node in self._cluster._nodes.records.items():
                if self.has_changed(node.name, retried_s):
                    continue
                machine = machine_of_node(node, self._cluster._topologies.get(name))
                if isinstance(machine, Unusable):
                    continue
                free = machine.free(self.ledger(node.name))
                devices = self._nodes[node.name].devices
                if devices is not None and request.devices:
                    bound = [other for other in self._pods.values() if other.node == node.name]
                    if not devices.has_room(pod, (one for one in bound if not one.has_ended)):
                        continue
                    free = replace(free, devices=devices.report().devices)
                if try_place(machine.topology, free, request) is not None:
                    raise BrokenPromise(f"6: {pod.name} waits, and it fits on {name}")

    def check_the_end(self) -> None:
        """Check, when all pods are gone, that all cores are free."""
        for node, ledger in self._ledgers.items():
            if ledger.claims or ledger.owners:
                raise BrokenPromise(f"6: after all pods are gone {node} still has {ledger}")

    # Promise 7: nothing is lost, and nothing moves without a request.

    def _check_moves(self, uid: PodUid, in_force: PodPlacement | None) -> None:
        known = self._in_force.get(uid)
        is_back = known is not None and (in_force is None or in_force.revision <= known.revision)
        if in_force != known and is_back:
            raise BrokenPromise(f"7: {uid} went from {known} back to {in_force}")
        self._in_force[uid] = in_force

    def ended(self, containers: Iterable[PodUid]) -> None:
        """Note that containers have ended: their pods start again by what the kubelet has seen of them."""
        for uid in containers:
            self._in_force.pop(uid, None)

    def check_agreement(self) -> None:
        """Check, in calm, that ledger, pod and node agree about every pod that runs."""
        self._check_agreement(0.0)

    def check_agreement_but_for_moves_that_began_just_now(self) -> None:
        """Check the same, but for pods under a relocation: room may be made for a VM at any time."""
        self._check_agreement(RETRIED_S)

    def _check_agreement(self, moves_s: float) -> None:
        self.agreeing = 0
        for node in self._nodes.values():
            ledger = self.ledger(node.name)
            for uid, running in node.containers.items():
                pod = self._pods.get(uid)
                if pod is None:
                    raise BrokenPromise(f"7: a container of {uid} runs on {node.name}, and its pod is gone")
                if not pod.placement or (uid in self.robbed and self._given_away(ledger, uid, running)):
                    continue
                claim = ledger.claims.get(uid)
                moves = claim is not None and claim.relocation is not None
                if moves and self.has_changed(node.name, moves_s):
                    continue
                bound = read_placement(pod.placement)
                if running.in_force != bound:
                    raise BrokenPromise(f"7: {pod.name} runs by {running.in_force}, not by {bound}")
                placement = bound.placement
                held = None if claim is None else (claim.cpus, claim.owned, claim.relocation)
                wanted = None if placement.floats else (placement.cpus, placement.owned, None)
                if held != wanted:
                    raise BrokenPromise(f"7: {pod.name} should hold {wanted} and holds {held}")
                self.agreeing += 1

    def _given_away(self, ledger: Ledger, uid: PodUid, running: Running) -> bool:
        """Whether CPUs on which a robbed pod runs are others' by now, which only a person can fix."""
        if running.in_force is None:
            return False
        placement = running.in_force.placement
        return bool(held_by_others(ledger, claim_of(uid, placement)))


def _covers(claim: Claim, placement: Placement) -> bool:
    """Whether a claim has what a placement gives; a pool may have shrunk."""
    named = placement.cpus if placement.policy is not Policy.NUMA else NO_CPUS
    return not (placement.owned & ~claim.owned or named & ~claim.cpus)


def _keeps(claim: Claim, placement: Placement) -> bool:
    """Whether no other client can be given what a placement names: of a pool, others may take CPUs."""
    names = placement.policy is not Policy.NUMA and bool(placement.cpus & ~placement.owned)
    return _covers(claim, placement) and not (names and claim.policy is Policy.NUMA)


def _owned(claim: Claim | None) -> str:
    return "no claim" if claim is None else f"{claim.owned:#b}"
