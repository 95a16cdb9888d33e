"""Ways to break kvplace on purpose: each is a mistake that a user could make, and that stories must notice.

`python -m tests.protocol --mutation NAME --count N` runs stories with one of them until a promise breaks.

Not here, since it takes stories by the thousand until they meet: a claim that is released although a bind has
taken it over (tests/controller/test_races.py notices it), claims that are not restored
(tests/controller/test_controller.py), relocations that a replica ends which has not seen the next one begin
(tests/controller/test_relocation_lagging_replicas.py), reservations that nothing ends, or that their VM is
not bound to when other cores are released (tests/scheduler/test_reserved_room.py), and a migration that
begins while another one is under way (tests/scheduler/test_why_no_vm_migrates.py).

Stories have no API server, kernel or QEMU. tests/faults and tests/real_node kill processes of kvplace
beside a real API server or node. tests/scheduler/test_crashes.py, tests/scheduler/test_migration_crashes.py,
tests/scheduler/test_dra_enforcement.py and the last test of tests/controller/test_relocation.py let single
writes fail, also in quick runs, which have few stories.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvplace.controller import claim_action, reconciler, relocation_claims, relocation_step, relocator
from kvplace.controller.claim_action import ClaimAction
from kvplace.controller.cluster import CheckedNode
from kvplace.controller.reconciler import Reconciler
from kvplace.controller.relocation_step import Finish
from kvplace.core import claim_changes
from kvplace.core.errors import Conflict, Unavailable
from kvplace.core.ledger import Claim, Ledger, LedgerChange, Relocation, claim_of
from kvplace.core.placement import PodPlacement
from kvplace.core.scalars import NO_CPUS, NodeName, PodUid
from kvplace.kube.ledgers import Ledgers
from kvplace.kube.memory_cluster import MemoryCluster
from kvplace.kube.object_records import PodRecord, ResourceClaimRecord, TopologyStatus
from kvplace.nodes import movable_vms, node_machine
from kvplace.nodes.movable_vms import MovableVms
from kvplace.scheduler import binder, reservations, resource_claims, room_moves
from kvplace.scheduler.binder import Binder
from kvplace.scheduler.pending_pods import PendingPods
from kvplace.scheduler.preemptor import Preemptor
from kvplace.scheduler.resource_claims import ResourceClaims

Mutation = Callable[[], None]
MUTATIONS: dict[str, Mutation] = {}
"""By name; applying one lasts until the process ends."""


def _mutation(apply: Mutation) -> Mutation:
    MUTATIONS[apply.__name__.replace("_", "-")] = apply
    return apply


def _real(owner: object, name: str) -> Any:
    """Return what is there now."""
    return vars(owner)[name]


def _put(owner: object, name: str, mutated: object) -> None:
    """Replace what is there, and must be."""
    assert name in vars(owner), f"{owner} has no {name} any more"
    setattr(owner, name, mutated)


class _Altered:
    """An object with some attributes replaced."""

    def __init__(self, real: object, **changed: object) -> None:
        self.__dict__ |= changed
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def _twin(of: Any, **changed: object) -> Any:
    """Copy an object with some attributes replaced."""
    twin = copy.copy(of)
    twin.__dict__ |= changed
    return twin


# Binding.


@_mutation
def bind_without_storing_the_claim() -> None:
    real = _real(Binder, "_claim_cores")

    async def claim_cores(self: Binder, args: Any, *others: Any) -> Any:
        async def change(node: Any, decide: Any) -> Any:
            return decide(self._cache.ledger(node))[1]

        ledgers = _Altered(self._cache.ledgers, change=change)
        return await real(_twin(self, _cache=_Altered(self._cache, ledgers=ledgers)), args, *others)

    _put(Binder, "_claim_cores", claim_cores)


@_mutation
def bind_without_the_cores() -> None:
    _put(binder, "result_annotations", lambda *_args, **_options: {})


@_mutation
def answer_yes_without_having_an_answer() -> None:
    real = _real(Binder, "_bind_pod")

    async def bind_pod(self: Binder, *args: Any) -> None:
        try:
            await real(self, *args)
        except Unavailable:
            return

    _put(Binder, "_bind_pod", bind_pod)


@_mutation
def forget_that_the_pod_is_bound_already() -> None:
    _put(binder, "is_bound_with", lambda *_args, **_options: False)


@_mutation
def release_whatever_claim_the_pod_has_after_a_failed_bind() -> None:
    async def release(self: Binder, args: Any, _decision: Any) -> None:
        await self._cache.ledgers.change(
            args.node, lambda _ledger: (LedgerChange(releases=(args.uid,)), None)
        )

    _put(Binder, "_release", release)


@_mutation
def release_a_claim_that_was_taken_over() -> None:
    real = _real(Binder, "_release")

    async def release(self: Binder, args: Any, decision: Any) -> None:
        await real(self, args, decision and replace(decision, is_new=True))

    _put(Binder, "_release", release)


@_mutation
def leave_the_date_of_a_claim_that_is_taken_over() -> None:
    _put(binder, "rfc3339", lambda _moment: "2026-01-02T00:00:00Z")


@_mutation
def keep_holds_for_ever() -> None:
    _put(PendingPods, "end_hold", lambda _self, _uid: None)
    _put(PendingPods, "run", lambda _self: asyncio.Event().wait())


# Ledgers.


@_mutation
def take_a_409_for_success() -> None:
    real = _real(Ledgers, "_store")

    async def store(self: Ledgers, record: Any, pending: Any) -> Any:
        async def write_ledger(before: Any, change: LedgerChange) -> Any:
            try:
                return await self._cluster.write_ledger(before, change)
            except Conflict:
                return replace(before, ledger=before.ledger.after(change))

        altered = _Altered(self._cluster, write_ledger=write_ledger)
        return await real(_twin(self, _cluster=altered), record, pending)

    _put(Ledgers, "_store", store)


# Releasing and restoring.


@_mutation
def release_without_reading_the_pod() -> None:
    real = _real(reconciler, "action_for")

    def action(*args: Any, **options: Any) -> ClaimAction:
        found = real(*args, **options)
        return ClaimAction.RELEASE if found is ClaimAction.READ_POD else found

    _put(reconciler, "action_for", action)


@_mutation
def release_when_the_deletion_begins() -> None:
    real = _real(PodRecord, "has_ended")
    _put(PodRecord, "has_ended", property(lambda pod: pod.deleting or real.fget(pod)))


@_mutation
def release_impatiently() -> None:
    real = _real(Reconciler, "__init__")

    def init(self: Reconciler, *args: Any, **options: Any) -> None:
        real(self, *args, **{**options, "patience_s": 1.0})

    _put(Reconciler, "__init__", init)


@_mutation
def take_a_pod_of_the_same_name_for_the_same_pod() -> None:
    real = _real(reconciler, "action_for")

    def action(claim: Claim, node: Any, pod: PodRecord | None, **options: Any) -> ClaimAction:
        same = replace(pod, uid=claim.uid) if pod is not None else None
        found: ClaimAction = real(claim, node, same, **options)
        return found

    _put(reconciler, "action_for", action)


@_mutation
def never_release_what_is_gone() -> None:
    real = _real(reconciler, "action_for")

    def action(claim: Claim, node: Any, pod: PodRecord | None, **options: Any) -> ClaimAction:
        found: ClaimAction = real(claim, node, pod, **options)
        return ClaimAction.KEEP if pod is None and options["is_live"] else found

    _put(reconciler, "action_for", action)


@_mutation
def ignore_the_containers_that_the_agent_reports() -> None:
    _put(Reconciler, "_runs", lambda _self, _node, _uid: False)


@_mutation
def take_the_agents_silence_for_an_end() -> None:
    for name in ("REPORT_S", "SILENCE_S"):
        _put(reconciler, name, 0.0)


@_mutation
def let_a_late_report_replace_a_newer_one() -> None:
    real = _real(MemoryCluster, "write_topology_status")

    async def write(self: MemoryCluster, node: NodeName, status: TopologyStatus, _version: str) -> str:
        stored = self._topologies.get(node)
        version: str = await real(self, node, status, stored.resource_version if stored is not None else "")
        return version

    _put(MemoryCluster, "write_topology_status", write)


@_mutation
def restore_although_the_claim_is_being_relocated() -> None:
    def agrees(_self: Reconciler, claim: Claim, pod: PodRecord) -> bool:
        expected = claim_action.claim_of_bound_pod(pod)
        return expected is None or expected.owned == claim.owned

    _put(Reconciler, "_agrees", agrees)
    _put(reconciler, "replaces", lambda restored, stored: stored is None or restored.owned != stored.owned)


# Making room, in stories where it is made.


@_mutation
def move_vms_without_their_owners_consent() -> None:
    _put(MovableVms, "_may_consent", lambda _self, _pod: True)
    _put(movable_vms, "has_agreed", lambda *_args: True)


@_mutation
def move_a_vm_to_cores_without_keeping_its_present_ones() -> None:
    def claim_while_relocating(claim: Claim, moving: Relocation) -> Claim:
        new = claim_of(claim.uid, moving.next.placement, pod=claim.pod, namespace=claim.namespace)
        return replace(new, relocation=moving)

    _put(room_moves, "claim_while_relocating", claim_while_relocating)


@_mutation
def reserve_only_what_is_free_already() -> None:
    _put(Claim, "still_in_use", property(lambda _self: NO_CPUS))


# Moving VMs to other nodes, in stories where that is done.


@_mutation
def let_vms_migrate_without_their_owners_consent() -> None:
    real = _real(MovableVms, "find")

    def find(self: MovableVms, *args: Any) -> Any:
        found = real(self, *args)
        return found and replace(found, may_migrate=True)

    _put(MovableVms, "find", find)


@_mutation
def leave_the_target_of_a_migration_to_others() -> None:
    real = _real(Claim, "still_in_use")

    def still_in_use(claim: Claim) -> Any:
        return NO_CPUS if claim.reserved and claim.reserved.migration else real.fget(claim)

    _put(Claim, "still_in_use", property(still_in_use))


# Relocating.


@_mutation
def give_up_the_old_cores_at_once() -> None:
    def claim_while_relocating(claim: Claim, moving: Relocation) -> Claim:
        new = claim_of(claim.uid, moving.next.placement, pod=claim.pod, namespace=claim.namespace)
        return replace(new, relocation=moving)

    _put(relocation_claims, "claim_while_relocating", claim_while_relocating)


@_mutation
def give_up_the_old_cores_before_the_agent_has_confirmed() -> None:
    real = _real(relocator, "next_step")

    def step(pod: PodRecord, node: CheckedNode) -> Any:
        found, claim = real(pod, node), node.ledger.claims.get(pod.uid)
        if found is None and claim is not None and claim.relocation is not None:
            return Finish(claim, claim.relocation.next)
        return found

    _put(relocator, "next_step", step)


@_mutation
def give_up_the_new_cores_when_the_agent_has_failed() -> None:
    real = _real(claim_changes, "way_back")

    def way_back(claim: Claim, failed: PodPlacement) -> Claim:
        back: Claim = real(claim, failed)
        assert back.relocation is not None
        old = back.relocation.next.placement
        return replace(back, cpus=old.cpus, owned=old.owned)

    _put(relocation_claims, "way_back", way_back)


@_mutation
def let_others_take_cpus_of_a_pool_that_becomes_shared_ones() -> None:
    real = _real(claim_changes, "claim_while_relocating")
    _put(
        relocation_claims,
        "claim_while_relocating",
        lambda claim, moving: replace(real(claim, moving), policy=claim.policy),
    )


# Devices, in stories where VMs have them.


@_mutation
def count_no_devices_of_pods_that_are_bound_and_not_reported() -> None:
    _put(node_machine, "_unreported", lambda *_args: {})


@_mutation
def give_up_the_old_cores_when_others_follow_the_devices() -> None:
    real = _real(relocation_claims, "claim_while_relocating")

    def claim_while_relocating(claim: Claim, moving: Relocation) -> Claim:
        if moving.next.revision > 2:
            both: Claim = real(claim, moving)
            return both
        new = claim_of(claim.uid, moving.next.placement, pod=claim.pod, namespace=claim.namespace)
        return replace(new, relocation=moving)

    _put(relocation_claims, "claim_while_relocating", claim_while_relocating)


@_mutation
def never_let_cores_follow_devices() -> None:
    _put(relocation_step, "_nodes_to_follow", lambda *_args: frozenset())


@_mutation
def place_vms_that_must_be_beside_their_devices_anywhere() -> None:
    for module in (binder, node_machine):
        real = _real(module, "place")
        _put(
            module,
            "place",
            lambda topology, free, request, real=real: real(topology, free, request.without_devices),
        )


# Preempting, in stories where VMs are evicted.


@_mutation
def name_victims_without_reserving_what_they_leave() -> None:
    async def reserve(*_args: object) -> bool:
        return True

    _put(Preemptor, "_reserve", reserve)


@_mutation
def reserve_for_a_vm_of_equal_priority_what_another_one_waits_for() -> None:
    def outranked(_self: Preemptor, ledger: Ledger, pod: PodRecord) -> frozenset[PodUid]:
        return frozenset(uid for uid, claim in ledger.claims.items() if claim.reserved and uid != pod.uid)

    _put(Preemptor, "_outranked", outranked)


@_mutation
def let_others_have_what_sharing_vms_are_to_get() -> None:
    _put(reservations, "kept_for", lambda whole, *_others: whole)


@_mutation
def end_reservations_before_their_cores_have_come_free() -> None:
    _put(reconciler, "_reserved_s", lambda *_args: 0.0)


# Handing cores over, in stories where dra-driver-cpu sets the cpusets.


@_mutation
def keep_the_cores_that_an_earlier_bind_has_written() -> None:
    real = _real(resource_claims, "with_cpus")

    def with_cpus(claim: ResourceClaimRecord, *others: Any) -> Any:
        return None if claim.status["allocation"]["devices"].get("config") else real(claim, *others)

    _put(resource_claims, "with_cpus", with_cpus)


@_mutation
def bind_before_the_cores_are_written() -> None:
    real = _real(ResourceClaims, "give")

    async def give(*args: Any) -> None:
        asyncio.get_running_loop().create_task(real(*args))

    _put(ResourceClaims, "give", give)


DRA_MUTATIONS = frozenset(
    (
        "keep-the-cores-that-an-earlier-bind-has-written",
        "bind-before-the-cores-are-written",
    )
)
"""Mistakes that only stories with dra-driver-cpu notice."""
NODES_MUTATIONS = frozenset(
    (
        "let-vms-migrate-without-their-owners-consent",
        "leave-the-target-of-a-migration-to-others",
    )
)
"""Mistakes that only stories with migrations notice."""
DEVICE_MUTATIONS = frozenset(
    (
        "count-no-devices-of-pods-that-are-bound-and-not-reported",
        "give-up-the-old-cores-when-others-follow-the-devices",
        "never-let-cores-follow-devices",
        "place-vms-that-must-be-beside-their-devices-anywhere",
    )
)
"""Mistakes that only stories with devices notice."""
PREEMPTION_MUTATIONS = frozenset(
    (
        "name-victims-without-reserving-what-they-leave",
        "reserve-for-a-vm-of-equal-priority-what-another-one-waits-for",
        "let-others-have-what-sharing-vms-are-to-get",
        "end-reservations-before-their-cores-have-come-free",
    )
)
"""Mistakes that only stories with evictions notice."""
ROOM_MUTATIONS = frozenset(
    (
        "move-vms-without-their-owners-consent",
        "move-a-vm-to-cores-without-keeping-its-present-ones",
        "reserve-only-what-is-free-already",
    )
)
"""Mistakes that only stories with moves inside nodes notice."""
