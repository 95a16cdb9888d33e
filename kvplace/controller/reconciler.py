"""Bringing one node's ledger in step with the pods that are bound there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

from prometheus_client import Counter

from kvplace.controller.claim_action import (
    SETTLE_S,
    ClaimAction,
    ClaimAges,
    action_for,
    claim_of_bound_pod,
    replaces,
    runs_unpinned,
    waits_for_binding,
)
from kvplace.controller.cluster import CheckedNode, ControllerClient, checked_node
from kvplace.core.claim_changes import LONGEST_S, RESERVED_S, grown, is_for_migration
from kvplace.core.cpuset import format_cpu_list, mask_of
from kvplace.core.errors import Conflict, KvplaceError
from kvplace.core.ledger import Claim, Ledger, LedgerChange, OwnershipConflict
from kvplace.core.node_topology import Enforcement
from kvplace.core.request import Policy
from kvplace.core.scalars import NO_CPUS, CpuMask, NodeName, PodUid
from kvplace.core.well_known_names import about_pod
from kvplace.kube.concurrency import all_ended
from kvplace.kube.events import EventReason, EventRecord, EventRecorder, pod_reference
from kvplace.kube.ledgers import no_change
from kvplace.kube.object_records import PodRecord, TopologyRecord
from kvplace.kube.watches import NAME_FIELD, TOPOLOGIES, Selector
from kvplace.nodes.node_cache import NodeCache

log = logging.getLogger(__name__)

RELEASES = Counter("kvplace_controller_releases_total", "Claims released.")
OVERLAPS = Counter(
    "kvplace_controller_overlaps_total", "Running pods found on cores that others own in the ledger."
)


REPORT_S = 10.0
"""How long an agent that has written something may take to report a container, too."""
SILENCE_S = 30.0
"""How long an agent may write nothing, since it may be starting again; a pod that is gone keeps its cores."""
_TRIES = 4
"""How often a pod is read to restore its claim, while others write into the ledger."""
_SOON_S = 0.1
"""A reservation that is just about to end is checked again after this."""


class Reconciler:
    """Releases and restores the claims of one node after the other."""

    def __init__(
        self,
        cluster: ControllerClient,
        cache: NodeCache,
        events: EventRecorder,
        *,
        patience_s: float,
        released: Callable[[NodeName], None],
        look_again: Callable[[NodeName, float], None],
    ) -> None:
        """`released` is called with the node after each release.

        `look_again` makes a node due after some seconds.
        """
        self._cluster = cluster
        self._cache = cache
        self._pods = cache.pods
        self._ledgers = cache.ledgers
        self._events = events
        self._patience_s = patience_s
        self._clock = asyncio.get_running_loop().time
        self._ages = ClaimAges(self._clock)
        self._released = released
        self._look_again = look_again
        self._deleted: dict[PodUid, bool] = {}
        """The deleted pods that had a claim, and whether their containers had ended by their status."""
        cache.pods.subscribe(self._pod_seen)
        self._missing: dict[PodUid, tuple[float, str]] = {}
        """When pods with a claim were found to be gone, on nodes with an agent that has not reported them.

        With the version of the agent's last write by then. When it has written since, the time of that write
        and no version: the write may be older than the container.
        """
        self._reported: set[PodUid] = set()
        """Pods that were found to be gone, and that an agent has reported since."""
        self._unreported_since: dict[NodeName, float] = {}
        """Since when nodes lack the report of an agent that was there."""
        self._overlaps: dict[PodUid, str] = {}
        self._lasting: set[PodUid] = set()
        """Pods with a claim on CPUs that the kubelet has allocated or another pod owns."""
        self._agreeing: dict[PodUid, tuple[str, CpuMask, CpuMask]] = {}
        """Placements of pods, with the CPUs of the claims that agreed with them."""

    async def reconcile(self, name: NodeName) -> None:
        """Bring a node's ledger in step with its pods; then raises the error of a write for one pod.

        1. Release or keep each claim, and give released CPUs to their reservations.
        2. Restore claims of bound pods that are missing, or that differ from their placements.
        3. Report CPUs of running VMs that another client has, too.
        4. Delete the empty ledger of a node that is gone.
        """
        node = checked_node(self._cache, name)
        if node.ledger_record is not None and node.ledger_record.problem:
            log.error("the ledger cannot be read: %s", node.ledger_record.problem, extra={"node": name})
            return  # until a person fixes it; the next round logs it again
        claims = node.ledger.claims
        lacking = [pod for uid, pod in node.bound.items() if uid not in claims]
        due = [
            (claim, action)
            for claim in claims.values()
            if (action := self._action(node, claim)) is not ClaimAction.KEEP
        ]
        grows = any(grown(node.ledger))
        failed: KvplaceError | None = None
        if due or lacking or grows:
            try:
                # All at once, so that the changes go together in few writes.
                await all_ended(
                    *(self._reconcile_claim(node, claim, action) for claim, action in due),
                    self._restore(name, lacking),
                    *([self._ledgers.change(name, no_change)] if grows else ()),
                )
            except KvplaceError as error:
                failed = error
            node = checked_node(self._cache, name)
        for claim in node.ledger.claims.values():
            conflict = _taken_by_kubelet(node, claim) or _shared_with_owner(node, claim)
            self._report_lasting_overlap(node, claim, conflict)
        if failed is not None:
            raise failed
        await self._delete_ledger_of_gone_node(node)

    def forget_gone(self) -> None:
        """Forget pods without a claim: another replica may have released one that this one has seen end."""
        has_claim = self._ledgers.nodes_claimed_by
        self._ages.keep(lambda node, uid: node in has_claim(uid) and not self._is_bound_to(node, uid))
        self._deleted = {uid: ended for uid, ended in self._deleted.items() if has_claim(uid)}
        self._missing = {uid: since for uid, since in self._missing.items() if has_claim(uid)}
        self._reported = {uid for uid in self._reported if has_claim(uid)}
        known = self._pods.records
        self._overlaps = {uid: text for uid, text in self._overlaps.items() if uid in known}
        self._lasting &= known.keys()
        self._agreeing = {uid: compared for uid, compared in self._agreeing.items() if uid in known}
        silent_since = self._clock() - SILENCE_S
        self._unreported_since = {
            node: since for node, since in self._unreported_since.items() if since > silent_since
        }

    def _pod_seen(self, before: PodRecord | None, after: PodRecord | None) -> None:
        if before is not None and after is None and self._ledgers.nodes_claimed_by(before.uid):
            self._deleted[before.uid] = before.is_terminal

    def _is_bound_to(self, node: NodeName, uid: PodUid) -> bool:
        pod = self._pods.get(uid)
        return pod is not None and pod.node == node

    # Step 1.

    def _action(self, node: CheckedNode, claim: Claim) -> ClaimAction:
        """Decide from the cache alone; the age of a claim counts while its pod is not bound here."""
        age_s = 0.0 if claim.uid in node.bound else self._ages.age_s(node.name, claim)
        pod, reserved_s = node.pods.get(claim.uid), _reserved_s(node, claim)
        action = action_for(
            claim,
            node.name,
            pod,
            is_live=False,
            runs=node.runs(claim.uid),
            age_s=age_s,
            patience_s=self._patience_s,
            was_deleted=claim.uid in self._deleted,
            reserved_s=reserved_s,
        )
        if action is ClaimAction.KEEP and pod is None and not is_for_migration(claim):
            self._look_again(node.name, SETTLE_S)
        elif action is ClaimAction.KEEP and claim.reserved is not None:
            self._look_again(node.name, max(reserved_s - age_s, _SOON_S))
        agrees = action is ClaimAction.COMPARE and pod is not None and self._agrees(claim, pod)
        return ClaimAction.KEEP if agrees else action

    def _agrees(self, claim: Claim, pod: PodRecord) -> bool:
        """Whether a claim needs no change; a placement that was read once is not read again."""
        compared = (pod.placement, claim.cpus, claim.owned)
        if claim.relocation is not None or self._agreeing.get(claim.uid) == compared:
            return True
        expected = claim_of_bound_pod(pod)
        if expected is not None and replaces(expected, claim):
            return False
        self._agreeing[claim.uid] = compared
        return True

    async def _reconcile_claim(self, node: CheckedNode, claim: Claim, action: ClaimAction) -> None:
        pod = node.pods.get(claim.uid)
        only_if_unchanged = claim.reserved is not None
        if action is ClaimAction.READ_POD:
            pod = await self._cluster.read_pod(claim.namespace, claim.pod)
            node = checked_node(self._cache, node.name)
            is_gone = pod is None or pod.uid != claim.uid
            if not is_gone:
                runs = node.runs(claim.uid)
            else:
                runs = claim.reserved is None and await self._runs(node, claim.uid)
            action = action_for(
                claim,
                node.name,
                pod,
                is_live=True,
                runs=runs,
                age_s=self._ages.age_s(node.name, claim),
                patience_s=self._patience_s,
                reserved_s=_reserved_s(node, claim),
            )
            only_if_unchanged |= not is_gone and (waits_for_binding(claim, pod) or runs_unpinned(claim, pod))
        if action is ClaimAction.RELEASE:
            await self._release(node.name, claim, only_if_unchanged=only_if_unchanged)
        elif action is ClaimAction.COMPARE and pod is not None:
            await self._restore(node.name, [pod])

    async def _runs(self, node: CheckedNode, uid: PodUid) -> bool:
        """Whether a pod that is gone may still use its CPUs, by the report of its node's agent.

        The agent may not have seen its container yet, or its report may have been deleted and be about to be
        written again: its silence counts after a while only. And before it counts the report is read, which
        a late watch may not have reported. Where the kubelet has reported the end of all containers before,
        there is no wait.
        """
        if self._deleted.get(uid) and not node.runs(uid):
            return False
        told = node.described
        if told is None or told.enforcement is Enforcement.NONE:
            lost_s = self._clock() - self._unreported_since.get(node.name, float("-inf"))
            if lost_s < SILENCE_S:
                self._look_again(node.name, SILENCE_S - lost_s)
                return True
        elif uid in told.pods:
            self._reported.add(uid)
            return told.pods[uid].running
        elif uid in self._reported:
            return False
        elif self._may_be_unreported(told, uid):
            return True
        stored = await self._read_topology(node.name)
        if stored is None or stored.enforcement is Enforcement.NONE:
            return False
        report = stored.pods.get(uid)
        return report.running if report is not None else self._may_be_unreported(stored, uid)

    def _may_be_unreported(self, described: TopologyRecord, uid: PodUid) -> bool:
        """Whether an agent may not have come to report a container since its pod was found to be gone."""
        since, version = self._missing.setdefault(uid, (self._clock(), described.resource_version))
        if version not in ("", described.resource_version):
            since, version = self._missing[uid] = (self._clock(), "")
        patience_s = SILENCE_S if version else REPORT_S
        waits_s = patience_s - (self._clock() - since)
        if waits_s > 0:
            self._look_again(described.node, min(waits_s, REPORT_S))
        return waits_s > 0

    async def _read_topology(self, node: NodeName) -> TopologyRecord | None:
        found = await self._cluster.read_all(TOPOLOGIES, Selector(fields={NAME_FIELD: node}))
        return found[0] if found else None

    async def _release(self, node: NodeName, claim: Claim, *, only_if_unchanged: bool) -> None:
        """Release a claim; if its bind may still come, only while it is unchanged in the ledger.

        A bind that takes over an old claim gives it a new date; so of bind and controller the first one wins.
        """
        if only_if_unchanged and claim.reserved is None:
            log.warning("the claim of a pod that was never bound is released", extra=_about(node, claim))
        released = False

        def decide(ledger: Ledger) -> tuple[LedgerChange, None]:
            nonlocal released
            stored = ledger.claims.get(claim.uid)
            if stored is None:  # by an earlier write of ours without an answer, or by another client
                return LedgerChange(), None
            released = not only_if_unchanged or stored == claim
            return LedgerChange(releases=(claim.uid,) if released else ()), None

        await self._ledgers.change(node, decide)
        self._missing.pop(claim.uid, None)
        self._reported.discard(claim.uid)
        if released:
            RELEASES.inc()
            log.info(
                "released CPUs %s",
                format_cpu_list(claim.cpus),
                extra=_about(node, claim),
            )
            self._released(node)

    def report_seen(self, before: TopologyRecord | None, after: TopologyRecord | None) -> None:
        """Note when the report of an agent is lost: it writes the machine first, and the report after it."""
        described = after or before
        if described is None:
            return
        if after is not None and after.enforcement is not Enforcement.NONE:
            self._unreported_since.pop(described.node, None)
        elif before is not None and before.enforcement is not Enforcement.NONE:
            self._unreported_since[described.node] = self._clock()

    # Step 2.

    async def _restore(self, node: NodeName, pods: Sequence[PodRecord]) -> None:
        """Claim the cores that bound pods use; if another pod owns them, report it and change nothing.

        A pod is read again if the ledger has changed since: it may have ended meanwhile, or got other cores,
        and a claim that was released for that must not come back. So all are read before any is claimed.
        Then raises the error of a write for one pod.
        """
        failed: list[KvplaceError] = []

        async def restored(claim: Claim, version: str) -> bool:
            try:
                return await self._is_restored(node, claim, version)
            except KvplaceError as error:
                failed.append(error)
                return True

        left = [pod for pod in pods if claim_of_bound_pod(pod) is not None]
        for _ in range(_TRIES):
            if not left:
                break
            version = self._version(node)
            live = await all_ended(*(self._live_claim(pod) for pod in left))
            found = [(pod, claim) for pod, claim in zip(left, live, strict=True) if claim is not None]
            done = await all_ended(*(restored(claim, version) for _, claim in found))
            left = [pod for (pod, _), is_done in zip(found, done, strict=True) if not is_done]
        if failed:
            raise failed[0]
        if left:
            raise Conflict(f"the ledger of node {node} has changed each time pod {left[0].name} was read")

    async def _live_claim(self, pod: PodRecord) -> Claim | None:
        """Read a pod, and return its claim; None if it has ended, which the cache may not know yet."""
        live = await self._cluster.read_pod(pod.namespace, pod.name)
        return claim_of_bound_pod(live) if live is not None and live.uid == pod.uid else None

    def _version(self, node: NodeName) -> str:
        """Return the version of a node's ledger as it is known now."""
        record = self._ledgers.current(node)
        return record.resource_version if record is not None else ""

    async def _is_restored(self, node: NodeName, claim: Claim, version: str) -> bool:
        """Restore a claim, unless the ledger is no longer of this version; returns whether all is done."""

        def decide(ledger: Ledger) -> tuple[LedgerChange, bool]:
            if not replaces(claim, ledger.claims.get(claim.uid)):
                return LedgerChange(), True
            if self._version(node) != version:
                return LedgerChange(), False
            others = {
                cpu: owner
                for cpu, owner in ledger.owners.items()
                if claim.owned >> cpu & 1 and owner != claim.uid
            }
            if others:
                owners = sorted(set(others.values()))
                raise OwnershipConflict(_runs_on_cores_of(node, claim, mask_of(others), owners))
            return LedgerChange(claims=(claim,)), True

        try:
            is_done = await self._ledgers.change(node, decide)
        except OwnershipConflict as error:
            self._report_overlap(node, claim, str(error))
            return True
        if is_done:
            self._overlaps.pop(claim.uid, None)
        return is_done

    def _report_overlap(self, node: NodeName, claim: Claim, conflict: str) -> None:
        """Report that two pods run on one core; count and log it only if something about it has changed."""
        self._events.record(
            EventRecord(
                pod_reference(claim.namespace, claim.pod, claim.uid), EventReason.CORES_OVERLAP, conflict
            )
        )
        if self._overlaps.get(claim.uid) != conflict:
            self._overlaps[claim.uid] = conflict
            OVERLAPS.inc()
            log.error("%s", conflict, extra=_about(node, claim))

    @property
    def overlapping_pods(self) -> list[PodRecord]:
        """The running pods on CPUs that another pod owns or that the kubelet has allocated."""
        found = (self._pods.get(uid) for uid in self._overlaps)
        return [pod for pod in found if pod is not None]

    # Step 3.

    def _report_lasting_overlap(self, node: CheckedNode, claim: Claim, conflict: str) -> None:
        """Report an overlap, which each round finds again until it ends; `conflict` is empty without one.

        Nothing can be fixed from here: one of the two must be started again.
        """
        if conflict and claim.uid in node.pods:
            self._lasting.add(claim.uid)
            self._report_overlap(node.name, claim, conflict)
        elif claim.uid in self._lasting:
            self._lasting.discard(claim.uid)
            self._overlaps.pop(claim.uid, None)

    # Step 4.

    async def _delete_ledger_of_gone_node(self, node: CheckedNode) -> None:
        if node.ledger_record is None or node.ledger.claims or node.ledger.owners or node.exists:
            return
        with contextlib.suppress(Conflict):  # another replica claims there: the next round checks again
            await self._cluster.delete_ledger(node.ledger_record)


def _reserved_s(node: CheckedNode, claim: Claim) -> float:
    """Return how long a reservation may stay: longer while ending pods still use its CPUs."""
    if claim.reserved is None or not claim.still_in_use:
        return RESERVED_S
    users = [
        node.pods.get(other.uid)
        for other in node.ledger.claims.values()
        if other.cpus & claim.still_in_use and other.uid != claim.uid
    ]
    is_waiting = any(pod is None or pod.deleting or pod.has_ended for pod in users)
    return LONGEST_S if is_waiting else RESERVED_S


def _taken_by_kubelet(node: CheckedNode, claim: Claim) -> str:
    """Name the owned CPUs that the kubelet's static policy has given away, too; it reads no ledger."""
    taken = claim.owned & node.described.kubelet_cpus if node.described is not None else NO_CPUS
    if not taken:
        return ""
    return (
        f"the kubelet of {node.name} has allocated CPUs {format_cpu_list(CpuMask(taken))}, "
        f"which pod {claim.namespace}/{claim.pod} owns"
    )


def _shared_with_owner(node: CheckedNode, claim: Claim) -> str:
    """State the CPUs that a VM runs on as a sharing VM although another pod owns them.

    The rules of the ledger concern owners only. So it can become like this when a claim was deleted by
    hand and comes back.
    """
    if claim.policy is Policy.NUMA or claim.relocation is not None or claim.reserved is not None:
        return ""
    shared = CpuMask(claim.cpus & ~claim.owned & node.ledger.owned)
    if not shared:
        return ""
    owners = sorted({owner for cpu, owner in node.ledger.owners.items() if shared >> cpu & 1})
    return _runs_on_cores_of(node.name, claim, shared, owners)


def _runs_on_cores_of(node: NodeName, claim: Claim, cpus: CpuMask, owners: Sequence[PodUid]) -> str:
    return (
        f"pod {claim.namespace}/{claim.pod} runs on CPUs {format_cpu_list(cpus)} of {node}, "
        f"which belong to {', '.join(owners)} in the ledger"
    )


def _about(node: NodeName, claim: Claim) -> dict[str, object]:
    return about_pod(claim.uid, claim.namespace, claim.pod, vmi=claim.vmi, node=node)
