"""Binding one pod: claim its cores in the node's ledger, then bind it with them in one write.

Idempotent by pod UID: kube-scheduler may retry in any order, and a pod ends with one claim or none. A claim
is released only when it is certain that the pod is not bound with it and will not be. Otherwise the claim
stays, and the controller reads the pod later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from kvplace.core.allocator.allocate import place
from kvplace.core.allocator.device_choices import far_devices
from kvplace.core.cpuset import format_cpu_list
from kvplace.core.errors import Conflict, KvplaceError, Refused, Unavailable
from kvplace.core.ledger import Claim, Ledger, LedgerChange, claim_of
from kvplace.core.node_topology import Enforcement
from kvplace.core.placement import Placement, PodPlacement, floating_annotations, result_annotations
from kvplace.core.request import OnFailure, Request
from kvplace.core.scalars import NodeName, PodUid
from kvplace.core.topology import Topology
from kvplace.kube.api_errors import ApiUnavailable, Backoff, with_retries
from kvplace.kube.events import EventRecorder, floating, pod_reference
from kvplace.nodes.node_cache import NodeCache
from kvplace.nodes.node_machine import NodeMachine, Unusable
from kvplace.scheduler.cluster_calls import SchedulerClient
from kvplace.scheduler.extender_protocol import BindingArgs
from kvplace.scheduler.metrics import PLACEMENTS
from kvplace.scheduler.pending_pods import Hold, PendingPod, PendingPods, PendingRequest
from kvplace.scheduler.resource_claims import ReadClaims, ResourceClaims, check_cpus
from kvplace.scheduler.stored_claims import is_bound_with, placement_of_claim, rfc3339, target_claim

log = logging.getLogger(__name__)

_BACKOFF = Backoff(first_s=0.1, longest_s=2.0)
"""Pauses before a binding without an answer is repeated."""
_YOUNG_S = 30.0
"""With the longest bind, far below the controller's patience with claims without a binding."""


@dataclass(frozen=True, slots=True)
class _Decision:
    """A stored claim, and its placement on the machine at that moment."""

    claim: Claim
    placement: Placement | None
    """None if an earlier attempt stored the claim and the machine has changed since then."""
    topology: Topology
    is_new: bool
    """Whether this attempt made the claim. Another replica may bind with a claim that it took over."""


class Binder:
    """Binds pods, each by one task at a time."""

    def __init__(
        self,
        cluster: SchedulerClient,
        cache: NodeCache,
        pending: PendingPods,
        resource_claims: ResourceClaims,
        events: EventRecorder,
        *,
        seconds: float,
        now: Callable[[], datetime],
        clock: Callable[[], float],
    ) -> None:
        """A bind may take `seconds`; `now` dates claims, `clock` times placements."""
        self._cluster = cluster
        self._cache = cache
        self._pending = pending
        self._resource_claims = resource_claims
        self._events = events
        self._seconds = seconds
        self._now = now
        self._clock = clock
        self.under_way: dict[PodUid, tuple[NodeName, asyncio.Task[None]]] = {}
        """Node and task of each bind under way, by pod UID, until the task ends."""

    def begin(self, args: BindingArgs) -> asyncio.Task[None]:
        """Start to bind a pod, or return its bind under way; raises Conflict if that is to another node.

        The task ends when the pod is bound, and raises a KvplaceError if it is not.
        """
        under_way = self.under_way.get(args.uid)
        if under_way is not None:
            node, task = under_way
            if node == args.node:
                return task
            raise Conflict(f"a bind of this pod to node {node} is under way")
        task = asyncio.get_running_loop().create_task(self._bind_and_log(args))
        self.under_way[args.uid] = (args.node, task)
        task.add_done_callback(lambda ended: self._bind_ended(args.uid, ended))
        return task

    def _bind_ended(self, uid: PodUid, task: asyncio.Task[None]) -> None:
        self.under_way.pop(uid, None)
        if not task.cancelled():
            task.exception()  # marks it as retrieved: the caller may have given up

    async def _bind_and_log(self, args: BindingArgs) -> None:
        pending = self._pending.record(args.uid)
        about = {**args.about, "attempt": pending.attempts} if pending.attempts else args.about
        try:
            claim = await self._bind(args, pending)
        except KvplaceError as error:
            log.warning("bind refused: %s", error, extra=about)
            if pending.requested is not None and isinstance(error, Refused):
                pod = self._cache.pods.get(args.uid)
                if self._resource_claims.may_have_devices(pod, pending.requested):
                    self._resource_claims.bind_refused(args, pending, str(error))
            raise
        since, pending.since = pending.since, None
        if since is not None:
            PLACEMENTS.observe(self._clock() - since)
        log.info("bound to CPUs %s", format_cpu_list(claim.cpus) if claim else "of no claim", extra=about)

    async def _bind(self, args: BindingArgs, pending: PendingPod) -> Claim | None:
        """Bind a pod, and return its claim.

        1. Return if it is bound there already; refuse if it is bound elsewhere.
        2. Read its request, and its resource claims where they matter.
        3. Store a claim in the node's ledger. If the pod may float and Filter has found nothing that fits,
           bind it unpinned.
        4. Where dra-driver-cpu sets the cpusets, write the claimed cores into the pod's ResourceClaim.
        5. Bind it with the claimed cores.
        """
        deadline = asyncio.get_running_loop().time() + self._seconds
        if not self._cache.has_synced:
            raise Unavailable("kvplace has not read the cluster yet; it will in a moment")
        usable, enforcement = self._cache.usable_machine(args.node), self._cache.enforcement(args.node)
        if await self._is_bound(args):
            return self._cache.ledger(args.node).claims.get(args.uid)
        explanation = pending.explanation
        requested = await self._pending.of_binding(args)
        pod_request = requested.pod_request
        claims = await self._resource_claims.read(args, requested, enforcement)
        try:
            if isinstance(usable, Unusable):
                raise Refused(f"node {args.node}: {usable.problem}")
            request = self._resource_claims.beside(args.node, pod_request.request, usable.topology, claims)
            decision = await self._claim_cores(args, pending, requested, request, claims)
        except Refused:
            # A pod with CPUs of dra-driver-cpu starts only with cores that are chosen for it.
            may_float = pod_request.request.options.on_failure is OnFailure.FLOAT and not claims.with_cpus
            if not may_float or (pending.hold is not None and pending.hold.node == args.node):
                raise  # one that holds cores here fitted a moment ago; another node may have some for it
            await self._bind_unpinned(args, requested, deadline)
            return None
        placement = decision.placement
        if placement is None:
            await self._leave_to_controller(args, decision.claim)
            return decision.claim
        for resource_claim in claims.with_cpus or ():
            await self._resource_claims.give(resource_claim, decision.claim.owned)
        bound = PodPlacement(
            args.uid,
            args.node,
            decision.topology.fingerprint,
            pod_request.request.options.on_failure,
            placement,
            enforced=enforcement is not Enforcement.NONE,
            device_numa=pod_request.request.options.device_numa,
        )
        annotations = result_annotations(
            decision.topology,
            bound,
            crane_result=pod_request.crane_result,
            explanation=explanation if pod_request.explain else "",
        )
        await self._bind_pod(args, decision, annotations, deadline)
        return decision.claim

    # Step 1.

    async def _is_bound(self, args: BindingArgs) -> bool:
        """Return whether the pod is bound to the node with a placement; raises Conflict if it is elsewhere.

        A claim of an earlier attempt on another node stays until the pod is bound, since that attempt's
        binding may still be under way; then the controller releases it.
        """
        if args.node not in self._cache.nodes.records:
            raise Refused(f"node {args.node} is not known to the API server")
        pod = self._cache.pods.get(args.uid)
        claimed_elsewhere = self._cache.ledgers.nodes_claimed_by(args.uid) - {args.node}
        if claimed_elsewhere and (pod is None or not pod.node):
            live = await self._cluster.read_pod(args.namespace, args.name)
            pod = live if live is not None and live.uid == args.uid else pod
        if pod is not None and pod.node not in ("", args.node):
            raise Conflict(f"pod {args.namespace}/{args.name} is already bound to {pod.node}")
        return pod is not None and pod.node == args.node and bool(pod.placement)

    # Step 3.

    async def _claim_cores(
        self,
        args: BindingArgs,
        pending: PendingPod,
        requested: PendingRequest,
        request: Request,
        claims: ReadClaims,
    ) -> _Decision:
        """Store the claim of a pod, and with it the claims of the pods that are planned for the same node.

        The pod's reservation becomes its claim. A claim that is stored already is taken over. The
        controller releases old claims without a binding; a new date shows it that this binding is about
        to come.
        """
        ours: list[Claim] = []
        is_new = False

        def decide(ledger: Ledger) -> tuple[LedgerChange, _Decision]:
            nonlocal is_new
            machine = self._cache.machine(args.node)
            if isinstance(machine, Unusable):
                raise Refused(f"node {args.node}: {machine.problem}")
            stored = ledger.claims.get(args.uid)
            target = target_claim(ledger, requested) if requested.migration else None
            if stored is not None and stored.reserved is None:
                placement = placement_of_claim(machine.topology, request, stored)
                is_older = placement is not None and stored not in ours and not self._is_young(stored)
                claim = replace(stored, since=rfc3339(self._now())) if is_older else stored
                is_new = (is_new or self._is_young(stored)) and not is_older
            else:
                placement = self._place(args, pending.hold, request, machine, ledger, target)
                is_new = stored is None
                claim = claim_of(
                    args.uid,
                    placement,
                    namespace=args.namespace,
                    pod=args.name,
                    vmi=requested.pod_request.vmi_name,
                    since=rfc3339(self._now()),
                )
            if claims.with_cpus is not None and placement is not None:
                check_cpus(args, claims.with_cpus, placement)
            ours.append(claim)
            decision = _Decision(claim, placement, machine.topology, is_new)
            if claim == stored:
                return LedgerChange(), decision
            taken = () if target is None else (target.uid,)
            after = ledger.after(LedgerChange(claims=(claim,), releases=taken))
            along = self._claims_along(args, machine, after)
            return LedgerChange(claims=(claim, *along), releases=taken), decision

        decision = await self._cache.ledgers.change(args.node, decide)
        self._pending.claim_stored(args.uid, args.node)
        return decision

    def _is_young(self, claim: Claim) -> bool:
        """Whether this process has stored a claim along with another one a moment ago.

        A bind that takes over any other claim gives it a new date. The date shows the controllers of all
        replicas, and other binds of the pod, that its binding is about to come.
        """
        along, at = self._pending.record(claim.uid).stored_along or (None, 0.0)
        return along == claim and asyncio.get_running_loop().time() - at < _YOUNG_S

    def _claims_along(self, args: BindingArgs, machine: NodeMachine, ledger: Ledger) -> tuple[Claim, ...]:
        """Return the claims of the other pods that hold cores of the node; their own binds find them."""
        along: list[Claim] = []
        for held in self._pending.held_on(args.node, but=args.uid):
            pending = self._pending.record(held.uid)
            if self._awaits_bind(pending, args.node, ledger) and machine.can_give(held, ledger, along):
                claim = replace(held, since=rfc3339(self._now()))
                pending.stored_along = claim, asyncio.get_running_loop().time()
                along.append(claim)
        return tuple(along)

    def _awaits_bind(self, pending: PendingPod, node: NodeName, ledger: Ledger) -> bool:
        """Whether a pod has neither node nor claim, and is not being bound to another node.

        The cores of a pod with devices are known only in its own Bind.
        """
        uid, requested = pending.uid, pending.requested
        if uid in ledger.claims or self._cache.ledgers.nodes_claimed_by(uid):
            return False
        if uid in self.under_way and self.under_way[uid][0] != node:
            return False
        pod = self._cache.pods.get(uid)
        if pod is None or pod.node or pod.deleting:
            return False
        return requested is None or not self._resource_claims.may_have_devices(pod, requested)

    def _place(
        self,
        args: BindingArgs,
        hold: Hold | None,
        request: Request,
        machine: NodeMachine,
        ledger: Ledger,
        target: Claim | None,
    ) -> Placement:
        """Choose the cores of a pod: reserved or held for it, else any that no other pod holds.

        `target` is its reservation as the target of a migration; its claim replaces this.
        """
        if target is not None:
            placement = placement_of_claim(machine.topology, request, target)
            if placement is not None:
                return placement
            ledger = ledger.after(LedgerChange(releases=(target.uid,)))
        reserved = ledger.claims.get(args.uid)
        if reserved is not None:
            placement = placement_of_claim(machine.topology, request, reserved)
            if placement is not None:
                return placement
            ledger = ledger.after(LedgerChange(releases=(args.uid,)))
        if (
            hold is not None
            and (hold.node, hold.fingerprint) == (args.node, machine.topology.fingerprint)
            and machine.can_give(hold.claim, ledger)
            and not self._has_far_devices(args, machine, ledger, request, hold.placement)
        ):
            return hold.placement
        message = ""
        for holds in (self._pending.held_on(args.node, but=args.uid), ()):
            devices = self._cache.free_devices(machine, ledger, holds)
            answer = place(machine.topology, machine.free(ledger, holds, devices), request)
            if isinstance(answer, Placement):
                return answer
            message = answer.message
        raise Refused(f"node {args.node}: {message}")

    def _has_far_devices(
        self,
        args: BindingArgs,
        machine: NodeMachine,
        ledger: Ledger,
        request: Request,
        placement: Placement,
    ) -> bool:
        """Whether a placement is not the best beside the devices that the pod will get now.

        They may have changed since Filter, and devices of resource claims are known only now.
        """
        if not (request.devices or request.device_nodes):
            return False
        devices = self._cache.free_devices(machine, ledger, self._pending.held_on(args.node, but=args.uid))
        return far_devices(machine.topology, devices, request, placement.cpus) > 0

    async def _leave_to_controller(self, args: BindingArgs, claim: Claim) -> None:
        """Raise Conflict for a claim that no longer fits machine or devices, unless the pod has it."""
        pod = await self._cluster.read_pod(args.namespace, args.name)
        if not is_bound_with(pod, claim, uid=args.uid, node=args.node):
            raise Conflict(
                f"node {args.node} or the pod's devices have changed since its cores were claimed; "
                "they are released soon"
            )

    # Step 5.

    async def _bind_unpinned(self, args: BindingArgs, requested: PendingRequest, deadline: float) -> None:
        annotations = floating_annotations(pod_uid=args.uid, node=args.node)
        await self._bind_pod(args, None, annotations, deadline)
        regarding = requested.vmi or pod_reference(args.namespace, args.name, args.uid)
        self._events.record(floating(regarding))

    async def _bind_pod(
        self,
        args: BindingArgs,
        decision: _Decision | None,
        annotations: Mapping[str, str],
        deadline: float,
    ) -> None:
        """Bind until it is known that the pod is bound or cannot be; in the latter case release its claim.

        A write without an answer may have taken effect, or may still do so. It is repeated: then it
        succeeds, or fails because the pod is bound, and the pod itself shows its cores. Nothing is
        sent after the deadline, since the controller may then have released the claim. The claim of a pod
        that is gone is left to the controller, too: it may have been bound, by this attempt or another, and
        its container may still run.
        """
        if asyncio.get_running_loop().time() > deadline:
            raise Unavailable(f"claiming cores of node {args.node} took too long; decide again")
        may_be_bound = False

        async def bind() -> None:
            nonlocal may_be_bound
            try:
                await self._cluster.bind(args.namespace, args.name, args.uid, args.node, annotations)
            except Unavailable as error:
                may_be_bound |= not (isinstance(error, ApiUnavailable) and error.untouched)
                raise

        claim = decision.claim if decision is not None else None
        try:
            await with_retries(bind, deadline=deadline, backoff=_BACKOFF, retried=_is_unanswered)
        except Unavailable:
            raise  # the claim stays: the pod may be bound, and the controller finds out
        except Conflict as error:
            pod = await self._cluster.read_pod(args.namespace, args.name)
            if is_bound_with(pod, claim, uid=args.uid, node=args.node):
                return
            if pod is not None and pod.uid == args.uid and (pod.node or not may_be_bound):
                await self._release(args, decision)
            raise Conflict(
                f"pod {args.namespace}/{args.name} cannot be bound to {args.node}: {error}"
            ) from error
        except Refused:
            raise  # the pod is gone
        except KvplaceError:
            if not may_be_bound:
                pod = await self._cluster.read_pod(args.namespace, args.name)
                if not is_bound_with(pod, claim, uid=args.uid, node=args.node):
                    await self._release(args, decision)
            raise

    async def _release(self, args: BindingArgs, decision: _Decision | None) -> None:
        """Release the claim that this attempt made, unless another replica has taken it over since."""
        if decision is None or not decision.is_new:
            return

        def decide(ledger: Ledger) -> tuple[LedgerChange, None]:
            is_ours = ledger.claims.get(args.uid) == decision.claim
            return LedgerChange(releases=(args.uid,) if is_ours else ()), None

        await self._cache.ledgers.change(args.node, decide)


def _is_unanswered(error: KvplaceError) -> bool:
    return isinstance(error, Unavailable)
