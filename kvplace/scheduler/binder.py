"""Binding one pod: claim its cores in the node's ledger, then bind it with them in one write.

Idempotent by pod UID. A claim is given back only when it is known that the pod is not and will not be
bound with it; what is unknown is left to the controller, which looks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime

from kvplace.core.allocator.allocate import place
from kvplace.core.errors import Conflict, KvplaceError, Refused, Unavailable
from kvplace.core.ledger import Claim, Ledger, LedgerChange, claim_of
from kvplace.core.placement import Placement
from kvplace.core.request import OnFailure, Request
from kvplace.core.request_document import PodRequest
from kvplace.core.topology import Topology
from kvplace.kube.cluster import Cluster
from kvplace.kube.events import EventRecorder, floating, placed, pod_reference, vmi_reference
from kvplace.kube.records import PodRecord
from kvplace.nodes.node_cache import NodeCache
from kvplace.nodes.node_machine import NodeMachine, Unusable
from kvplace.scheduler.annotations import binding_annotations, floating_annotations
from kvplace.scheduler.claims import is_bound_as_meant, placed_again, release_of, rfc3339
from kvplace.scheduler.holds import Holds
from kvplace.scheduler.wire import BindingArgs
from kvplace.scheduler.wishes import Wishes

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Decided:
    """A claim, and the placement behind it on the machine as it was when that was decided."""

    claim: Claim
    placement: Placement | None
    """None when the claim is an earlier one that this machine would not give."""
    topology: Topology


class Binder:
    """Binds pods; one bind at a time for each."""

    def __init__(
        self,
        cluster: Cluster,
        cache: NodeCache,
        holds: Holds,
        wishes: Wishes,
        events: EventRecorder,
        *,
        seconds: float,
        pause_seconds: float,
        now: Callable[[], datetime],
    ) -> None:
        """A bind goes on for at most `seconds`; `pause_seconds` is the first pause after a lost answer."""
        self._cluster = cluster
        self._cache = cache
        self._holds = holds
        self._wishes = wishes
        self._events = events
        self._seconds = seconds
        self._pause_seconds = pause_seconds
        self._now = now
        self.under_way: dict[str, tuple[str, asyncio.Task[None]]] = {}
        """Node and task of each bind under way, by pod UID."""

    def begin(self, args: BindingArgs) -> asyncio.Task[None]:
        """Begin to bind a pod, or answer its bind under way; raises Conflict when that goes elsewhere.

        The task ends when the pod is bound, and raises a KvplaceError when it is not.
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

    def _bind_ended(self, uid: str, task: asyncio.Task[None]) -> None:
        self.under_way.pop(uid, None)
        if not task.cancelled():
            task.exception()  # marks it as seen: its caller may have given up

    async def _bind_and_log(self, args: BindingArgs) -> None:
        try:
            await self._bind(args)
        except KvplaceError as error:
            log.warning(
                "bind refused: %s",
                error,
                extra={"vm": f"{args.namespace}/{args.name}", "node": args.node, "uid": args.uid},
            )
            raise

    async def stop(self) -> None:
        """End at once, as a crash would: binds under way are given up where they are."""
        tasks = [task for _, task in self.under_way.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _bind(self, args: BindingArgs) -> None:
        deadline = asyncio.get_running_loop().time() + self._seconds
        if not self._cache.has_synced:
            raise Unavailable("kvplace has not read the cluster yet; it will in a moment")
        if args.node not in self._cache.nodes.records:
            raise Refused(f"node {args.node} is not known to the API server")
        known = self._cache.pods.get(args.uid)
        if known is not None and known.node == args.node and known.placement:
            return
        await self._refuse_if_bound_elsewhere(args, known)
        asked = await self._wishes.of_binding(args)
        wanted, explanation = asked.wanted, self._wishes.explanations.get(args.uid, "")
        try:
            decided = await self._claim_cores(args, wanted)
        except Refused:
            if wanted.request.options.on_failure is not OnFailure.FLOAT:
                raise
            unpinned = floating_annotations(pod_uid=args.uid, node=args.node)
            await self._bind_pod(args, None, unpinned, deadline)
            self._holds.drop(args.uid)
            self._events.record(floating(pod_reference(args.namespace, args.name, args.uid)))
            if asked.vmi is not None:
                self._events.record(floating(vmi_reference(args.namespace, asked.vmi.name, asked.vmi.uid)))
            return
        self._holds.drop(args.uid)
        placement = decided.placement
        if placement is None:
            await self._leave_to_controller(args, decided.claim)
            return
        annotations = binding_annotations(
            decided.topology,
            placement,
            wanted,
            pod_uid=args.uid,
            node=args.node,
            explanation=explanation,
        )
        await self._bind_pod(args, decided.claim, annotations, deadline)
        if asked.vmi is not None:  # the pod itself carries its cores and gets kube-scheduler's event
            about = vmi_reference(args.namespace, asked.vmi.name, asked.vmi.uid)
            self._events.record(placed(about, args.node, placement))

    async def _claim_cores(self, args: BindingArgs, wanted: PodRequest) -> _Decided:
        """Store the claim of one pod; a claim that is stored already is taken over and dated anew.

        The new date tells the controller, which gives back claims whose binding never came, that it is
        about to come.
        """
        snapshot = self._cache.snapshot(args.node)
        if isinstance(snapshot, Unusable):
            raise Refused(f"node {args.node}: {snapshot.problem}")
        ours: list[Claim] = []

        def decide(ledger: Ledger) -> tuple[LedgerChange, _Decided]:
            machine = self._cache.machine(args.node)
            if isinstance(machine, Unusable):
                raise Refused(f"node {args.node}: {machine.problem}")
            stored = ledger.claims.get(args.uid)
            if stored is not None:
                placement = placed_again(machine.topology, wanted.request, stored)
                renewed = placement is not None and stored not in ours
                claim = replace(stored, since=rfc3339(self._now())) if renewed else stored
            else:
                placement = self._place(args, wanted.request, machine, ledger)
                claim = claim_of(
                    args.uid,
                    placement,
                    namespace=args.namespace,
                    pod=args.name,
                    vmi=wanted.vmi.rpartition("/")[2],
                    since=rfc3339(self._now()),
                )
            ours.append(claim)
            change = LedgerChange(claims=(claim,) if claim != stored else ())
            return change, _Decided(claim, placement, machine.topology)

        return await self._cache.ledgers.change(args.node, decide)

    def _place(self, args: BindingArgs, request: Request, machine: NodeMachine, ledger: Ledger) -> Placement:
        """Choose the cores of one pod, given the ledger as it will be; where it can, out of others' holds."""
        message = ""
        for holds in (self._holds.on_node(args.node, but=args.uid), ()):
            answer = place(machine.topology, machine.free(ledger, holds), request)
            if isinstance(answer, Placement):
                return answer
            message = answer.message
        raise Refused(f"node {args.node}: {message}")

    async def _leave_to_controller(self, args: BindingArgs, claim: Claim) -> None:
        """Raise Conflict about a claim that the machine would not give now, unless the pod runs with it."""
        pod = await self._cluster.read_pod(args.namespace, args.name)
        if not is_bound_as_meant(pod, uid=args.uid, node=args.node, claim=claim):
            raise Conflict(
                f"node {args.node} has changed since this pod's cores were claimed; they are given back soon"
            )

    async def _bind_pod(
        self, args: BindingArgs, claim: Claim | None, annotations: dict[str, str], deadline: float
    ) -> None:
        """Bind until it is known to be done or known to be impossible; only then is the claim given back.

        A write without an answer may have happened, so the same write is tried again: it answers yes or
        that the pod is bound already, and then the pod itself tells to whom. After the deadline nothing is
        sent any more: by then the claim may be on its way back.
        """
        loop = asyncio.get_running_loop()
        pause = self._pause_seconds
        if loop.time() > deadline:
            raise Unavailable(f"claiming cores of node {args.node} took too long; decide again")
        while True:
            try:
                await self._cluster.bind(args.namespace, args.name, args.uid, args.node, annotations)
                return
            except Unavailable:
                if loop.time() + pause > deadline:
                    raise  # the claim stays: the pod may be bound; the controller finds out
                await asyncio.sleep(pause)
                pause *= 2
            except Conflict as error:
                pod = await self._cluster.read_pod(args.namespace, args.name)
                if is_bound_as_meant(pod, uid=args.uid, node=args.node, claim=claim):
                    return
                await self._release(args)
                raise Conflict(
                    f"pod {args.namespace}/{args.name} cannot be bound to {args.node}: {error}"
                ) from error
            except KvplaceError:
                await self._release(args)
                raise

    async def _release(self, args: BindingArgs) -> None:
        await self._cache.ledgers.change(args.node, lambda ledger: (release_of(ledger, args.uid), None))

    async def _refuse_if_bound_elsewhere(self, args: BindingArgs, known: PodRecord | None) -> None:
        """Raise Conflict when the pod is on a node already.

        What an earlier attempt claimed on other nodes stays until the pod is bound: its binding may still
        be under way. Then the controller gives it back.
        """
        if self._cache.ledgers.nodes_claimed_by(args.uid) - {args.node} and (known is None or not known.node):
            pod = await self._cluster.read_pod(args.namespace, args.name)
            known = pod if pod is not None and pod.uid == args.uid else known
        if known is not None and known.node not in ("", args.node):
            raise Conflict(f"pod {args.namespace}/{args.name} is already bound to {known.node}")
