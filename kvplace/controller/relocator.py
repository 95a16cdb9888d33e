"""Other cores for running pods: carries out the steps of `relocation_step` on one node after the other.

Any number of replicas may work on one pod. A step that another replica has made already is a write that
changes nothing, or one that the API server refuses; the next check decides again.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping

from prometheus_client import Counter

from kvplace.controller.cluster import CheckedNode, ControllerClient, checked_node
from kvplace.controller.relocation_claims import claim_change
from kvplace.controller.relocation_step import Begin, Cannot, ClaimStep, Finish, Write, end_event, next_step
from kvplace.core.cpuset import format_cpu_list
from kvplace.core.errors import Conflict, Forbidden, KvplaceError, Refused
from kvplace.core.ledger import Ledger, LedgerChange
from kvplace.core.placement import PodPlacement, result_annotations
from kvplace.core.request_json import read_pod_request
from kvplace.core.scalars import NodeName
from kvplace.core.well_known_names import (
    CPU_MAP,
    CRANE_RESULT,
    PLACEMENT,
    RELOCATED,
    about_pod,
)
from kvplace.kube.events import EventReason, EventRecord, EventRecorder, owner_reference
from kvplace.kube.object_records import Condition, PodRecord
from kvplace.nodes.node_cache import PAUSE_AFTER_EDIT_S, PEACE_S, NodeCache
from kvplace.nodes.node_machine import Unusable

log = logging.getLogger(__name__)

RELOCATIONS = Counter("kvplace_controller_relocations_total", "Running pods that got other cores.")

_STEPS = 4
"""Steps for one pod in one check; from Begin to the agent it takes two."""


class Relocator:
    """Gives running pods the cores that their edited annotations request."""

    def __init__(
        self,
        cluster: ControllerClient,
        cache: NodeCache,
        events: EventRecorder,
        *,
        freed: Callable[[NodeName], None],
        look_again: Callable[[NodeName, float], None],
    ) -> None:
        """`freed` is called with a node where cores were released.

        `look_again` has a node worked on after some seconds.
        """
        self._cluster = cluster
        self._cache = cache
        self._events = events
        self._freed = freed
        self._look_again = look_again

    async def relocate(self, name: NodeName) -> None:
        """Make all possible steps on a node; then raises the error of a write for one pod."""
        node = checked_node(self._cache, name)
        devices = node.described.devices if node.described is not None else None
        relocating = {uid for uid, claim in node.ledger.claims.items() if claim.relocation is not None}
        due = {*relocating, *node.edits, *(devices.pods if devices is not None else ())}
        failed: KvplaceError | None = None
        for pod in [pod for uid, pod in node.bound.items() if uid in due]:
            try:
                await self._relocate_pod(pod, node)
            except KvplaceError as error:
                failed = error
        if failed is not None:
            raise failed

    async def _relocate_pod(self, pod: PodRecord, node: CheckedNode) -> None:
        """Make the steps for a pod; the API server shows for each whether its pod is still the same."""
        for _ in range(_STEPS):
            step = next_step(pod, node)
            if step is None:
                return
            if isinstance(step, Cannot):
                await self._cannot(pod, step.why)
                return
            if isinstance(step, Begin) and (rest_s := self._rest_s(pod, step)):
                self._look_again(pod.node, rest_s)
                return
            live = await self._cluster.read_pod(pod.namespace, pod.name)
            if live is None or live.uid != pod.uid:
                return
            follows_devices = isinstance(step, Begin) and step.device_nodes  # until there is a QEMU
            if live != pod or follows_devices:
                node = checked_node(self._cache, node.name)
                if next_step(live, node) != step:
                    return  # the watch is late: a relocation may have just ended
            if not await self._make(live, step):
                return
            pod, node = live, checked_node(self._cache, node.name)

    def _rest_s(self, pod: PodRecord, step: Begin) -> float:
        """Return how long a pod must still rest since it last got other cores."""
        pause_s = PEACE_S if step.only_better else PAUSE_AFTER_EDIT_S
        return self._cache.relocation_times.rest_s(pod.uid, pause_s)

    async def _make(self, pod: PodRecord, step: Write | ClaimStep) -> bool:
        """Make a step; returns whether another one may follow at once.

        The condition is set before the ledger ends a relocation: while the ledger has it, the step is made
        again after a failure of either write.
        """
        if isinstance(step, Write):
            await self._write(pod, step.next)
            return False  # the agent is next
        if isinstance(step, Begin) and not await self._is_counted(pod, step):
            return False
        is_changed = False

        def decide(ledger: Ledger) -> tuple[LedgerChange, str]:
            nonlocal is_changed
            change, why = self._decide(pod, step, ledger)
            is_changed |= bool(change)
            return change, why

        event = end_event(step, pod)
        if event is not None:
            await self._set_condition(pod, event)
        why = await self._cache.ledgers.change(pod.node, decide)
        if why:
            await self._cannot(pod, why)
        if is_changed and event is not None:
            self._events.record(event)
        if is_changed and isinstance(step, Finish):
            self._note_end(pod, step)
        return is_changed or not why

    def _decide(self, pod: PodRecord, step: ClaimStep, ledger: Ledger) -> tuple[LedgerChange, str]:
        dra_devices = self._cache.dra.gives_devices(pod)
        return claim_change(step, pod, ledger, self._cache.machine(pod.node), dra_devices=dra_devices)

    async def _is_counted(self, pod: PodRecord, step: Begin) -> bool:
        """Let quotas and kube-scheduler count the CPUs that a pod is to get; returns whether they do.

        Only where there is room for it, so that a pod pays for nothing that it does not get.
        """
        request = step.pod_request.request
        if pod.resources.get("cpu", 0) >= request.least_millicores:
            return True
        if not self._decide(pod, step, self._cache.ledger(pod.node))[0]:
            return True  # the step gives the reason
        paid = f"{pod.resources.get('cpu', 0)}m CPU, and needs {request.least_millicores}m"
        if not pod.vmi:
            await self._cannot(pod, f"the pod requests {paid}: raise the requests of its containers")
            return False
        try:
            await self._cluster.request_cpus(pod, request.least_millicores)
        except (Refused, Forbidden) as error:
            await self._cannot(pod, f"the pod requests {paid}, which the API server refuses: {error}")
            return False
        return True

    async def _write(self, pod: PodRecord, following: PodPlacement) -> None:
        machine = self._cache.machine(pod.node)
        if isinstance(machine, Unusable):
            return
        annotations: Mapping[str, str | None]
        # The name may be another machine's by now; then it has no sockets to sort the way back's CPUs into.
        if following.placement.floats or following.placement.cpus & ~machine.topology.cpus:
            annotations = {PLACEMENT: following.to_json(), CPU_MAP: None, CRANE_RESULT: None}
        else:
            crane_result = read_pod_request(pod.request).crane_result
            annotations = result_annotations(machine.topology, following, crane_result=crane_result)
        try:
            await self._cluster.replace_placement(pod.namespace, pod.name, pod.uid, annotations)
        except (Refused, Conflict) as error:
            log.info("a placement was not written: %s", error, extra=_about(pod))

    def _note_end(self, pod: PodRecord, step: Finish) -> None:
        """Have waiting pods retried; count and log that a pod has other cores."""
        self._freed(pod.node)
        if not step.is_way_back:
            RELOCATIONS.inc()
            cpus = format_cpu_list(step.in_effect.placement.cpus) or "of the shared pool"
            log.info("relocated to CPUs %s", cpus, extra=_about(pod))

    # Answers to the owner.

    async def _cannot(self, pod: PodRecord, why: str) -> None:
        """State that nothing changes, and why."""
        event = EventRecord(owner_reference(pod), EventReason.NOT_RELOCATED, why)
        self._events.record(event)
        await self._set_condition(pod, event)

    async def _set_condition(self, pod: PodRecord, event: EventRecord) -> None:
        is_relocated = event.reason is EventReason.RELOCATED
        condition = Condition(RELOCATED, is_relocated, event.reason.value, event.note)
        if pod.condition(RELOCATED) == condition:
            return
        with contextlib.suppress(Refused):  # the pod is gone
            await self._cluster.set_pod_condition(pod, condition)


def _about(pod: PodRecord) -> dict[str, object]:
    return about_pod(pod.uid, pod.namespace, pod.name, vmi=pod.vmi, node=pod.node)
