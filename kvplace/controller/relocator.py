"""Other cores for running pods: carries out the steps of `relocation_step` on one node after the other.

Any number of replicas may work on one pod. A step that another replica has made already is a write that
changes nothing, or one that the API server refuses; the next check decides again.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping

from prometheus_client import Counter

from kvplace.controller.cluster import ControllerClient, PodIndex
from kvplace.controller.relocation_step import (
    Asked,
    Begin,
    Cannot,
    Finish,
    GoBack,
    Nothing,
    Resume,
    Step,
    Wait,
    Write,
    next_step,
    place_again,
)
from kvplace.core.annotations import is_movable, read_options
from kvplace.core.claim_changes import (
    claim_after_relocation,
    claim_while_relocating,
    claim_with_lost_relocation,
    claim_without_lost_relocation,
    held_by_others,
    way_back,
)
from kvplace.core.cpuset import format_cpu_list
from kvplace.core.errors import BadAnnotation, Conflict, Forbidden, KvplaceError, Refused
from kvplace.core.ledger import Claim, Ledger, LedgerChange, Relocation, claim_of
from kvplace.core.placement import Placement, PodPlacement, result_annotations
from kvplace.core.request import Policy
from kvplace.core.request_json import read_pod_request
from kvplace.core.scalars import NO_CPUS, NodeName
from kvplace.core.well_known_names import (
    CPU_MAP,
    CRANE_RESULT,
    PLACE_AGAIN,
    PLACEMENT,
    RELOCATED,
    about_pod,
)
from kvplace.kube.events import (
    EventRecorder,
    owner_reference,
    relocated,
    relocation_refused,
)
from kvplace.kube.object_records import Condition, PodRecord, VmiRecord
from kvplace.kube.store import Store
from kvplace.nodes.node_cache import PAUSE_AFTER_EDIT_S, PEACE_S, NodeCache
from kvplace.nodes.node_machine import Unusable

log = logging.getLogger(__name__)

RELOCATIONS = Counter("kvplace_controller_relocations_total", "Running pods that got other cores.")

_STEPS = 4
"""Steps for one pod in one check; from Begin to Wait it takes two."""


class Relocator:
    """Gives running pods the cores that their edited annotations request."""

    def __init__(
        self,
        cluster: ControllerClient,
        cache: NodeCache,
        index: PodIndex,
        vmis: Store[str, VmiRecord],
        events: EventRecorder,
        *,
        freed: Callable[[NodeName], None],
        look_again: Callable[[NodeName, float], None],
    ) -> None:
        """`vmis` are the edited ones; `freed` is called with a node where cores were released.

        `look_again` has a node worked on after some seconds.
        """
        self._cluster = cluster
        self._cache = cache
        self._index = index
        self._vmis = vmis
        self._events = events
        self._freed = freed
        self._look_again = look_again

    async def relocate(self, node: NodeName) -> None:
        """Make all possible steps on a node; then raises the error of a write for one pod."""
        claims, described = self._cache.ledger(node).claims, self._cache.topologies.get(node)
        due = [
            pod
            for pod in self._index.on_node(node)
            if ((claim := claims.get(pod.uid)) is not None and claim.relocation is not None)
            or self._is_edited(pod)
            or (described is not None and described.devices is not None and pod.uid in described.devices.pods)
        ]
        failed: KvplaceError | None = None
        for pod in due:
            try:
                await self._relocate_pod(node, pod)
            except KvplaceError as error:
                failed = error
        if failed is not None:
            raise failed

    def _is_edited(self, pod: PodRecord) -> bool:
        return pod.vmi_uid in self._vmis.records if pod.vmi else bool(pod.asking)

    async def _relocate_pod(self, node: NodeName, pod: PodRecord) -> None:
        for _ in range(_STEPS):
            if not await self._step(node, pod):
                return
            live = await self._cluster.read_pod(pod.namespace, pod.name)
            if live is None or live.uid != pod.uid:
                return
            pod = live

    async def _step(self, node: NodeName, pod: PodRecord) -> bool:
        """Make the next step for a pod; returns whether another one may follow at once."""
        try:
            asked = self._asked(pod)
        except BadAnnotation as error:
            await self._cannot(pod, str(error))
            return False
        step = self._next(node, pod, asked)
        match step:
            case Nothing() | Wait():
                return False
            case Cannot(why):
                await self._cannot(pod, why)
                return False
            case Begin():
                pause_s = PEACE_S if step.only_better else PAUSE_AFTER_EDIT_S
                if rest_s := self._cache.relocation_times.rest_s(node, pod.uid, pause_s):
                    self._look_again(node, rest_s)
                    return False
                return await self._begin(node, pod, step)
            case Write(following):
                await self._write(node, pod, following)
                return False  # the agent is next
            case Finish():
                return await self._finish(node, pod, step)
            case GoBack(failed, why):
                return await self._go_back(node, pod, failed, why)
            case Resume():
                return await self._resume(node, pod, step)

    def _next(self, node: NodeName, pod: PodRecord, asked: Asked | None) -> Step:
        return next_step(
            pod,
            self._cache.ledger(node),
            asked,
            self._cache.topologies.get(node),
            enforces=self._cache.enforcement(node).by_agent,
            migrates=self._migrates(pod),
        )

    def _asked(self, pod: PodRecord) -> Asked | None:
        """Read the edited request of a pod; None where it was not edited."""
        asking = pod.asking
        if pod.vmi:
            vmi = self._vmis.get(pod.vmi_uid)
            # The creator of a pod writes its owner; only one in its own namespace can be true.
            asking = vmi.asking if vmi is not None and vmi.namespace == pod.namespace else {}
        options = read_options(asking)
        if options is None:
            return None
        return Asked(options, asking.get(PLACE_AGAIN, ""), is_movable(asking))

    def _migrates(self, pod: PodRecord) -> bool:
        others = self._index.of_vmi(pod.vmi_uid)
        return any(
            other.uid != pod.uid and other.namespace == pod.namespace and not other.has_ended
            for other in others
        )

    async def _is_as_stored(self, pod: PodRecord) -> bool:
        """Read whether a pod runs by the placement that the cache knows: a relocation may have just ended."""
        return await self._read_as_stored(pod) is not None

    async def _read_as_stored(self, pod: PodRecord) -> PodRecord | None:
        live = await self._cluster.read_pod(pod.namespace, pod.name)
        if live is None or live.uid != pod.uid or live.has_ended or live.placement != pod.placement:
            return None
        return live

    # Begin.

    async def _may_begin(self, node: NodeName, pod: PodRecord, step: Begin) -> bool:
        """Read whether a pod is as the step supposes: one that follows its devices may have a QEMU by now."""
        live = await self._read_as_stored(pod)
        return live is not None and (not step.device_nodes or self._next(node, live, None) == step)

    async def _begin(self, node: NodeName, pod: PodRecord, step: Begin) -> bool:
        """Claim a new placement beside the present one; returns whether that was done."""
        if not await self._may_begin(node, pod, step) or not await self._is_counted(node, pod, step):
            return False

        def decide(ledger: Ledger) -> tuple[LedgerChange, str]:
            stored = ledger.claims.get(pod.uid)
            if stored != step.claim:
                return LedgerChange(), ""  # conflict with another writer
            machine = self._cache.machine(node)
            if isinstance(machine, Unusable):
                return LedgerChange(), f"node {node}: {machine.problem}"
            answer = place_again(machine, ledger, pod, step, pins_memory=self._pins_memory(pod, step))
            if isinstance(answer, str):
                return LedgerChange(), f"node {node}: {answer}"
            options = step.pod_request.request.options
            following = PodPlacement(
                pod.uid,
                node,
                machine.topology.fingerprint,
                options.on_failure,
                answer,
                enforced=step.previous is not None and step.previous.enforced,
                revision=step.revision,
                options=options,
                device_numa=options.device_numa,
            )
            moving = claim_while_relocating(stored or _empty_claim(pod), Relocation(following, step.previous))
            return LedgerChange(claims=(moving,)), ""

        why = await self._cache.ledgers.change(node, decide)
        if why:
            nodes = ", ".join(map(str, sorted(step.device_nodes)))
            await self._cannot(pod, f"its devices are on NUMA node {nodes}; {why}" if nodes else why)
        return not why

    async def _is_counted(self, node: NodeName, pod: PodRecord, step: Begin) -> bool:
        """Let quotas and kube-scheduler count the CPUs that a pod is to get; returns whether they do.

        Only where there is room for it, so that a pod pays for nothing that it does not get.
        """
        request = step.pod_request.request
        if pod.resources.get("cpu", 0) >= request.least_millicores:
            return True
        machine = self._cache.machine(node)
        if isinstance(machine, Unusable):
            return True  # the next step gives the reason if not
        ledger, pins_memory = self._cache.ledger(node), self._pins_memory(pod, step)
        if isinstance(place_again(machine, ledger, pod, step, pins_memory=pins_memory), str):
            return True
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

    # Write.

    async def _write(self, node: NodeName, pod: PodRecord, following: PodPlacement) -> None:
        machine = self._cache.machine(node)
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
            log.info("a placement was not written: %s", error, extra=_about(node, pod))

    # Finish and GoBack. Each answers on the pod first: while the ledger has the relocation, the step is made
    # again after a failure of either write. A replica with a late cache must not answer.

    async def _finish(self, node: NodeName, pod: PodRecord, step: Finish) -> bool:
        """Answer, and release the CPUs that are no longer used; returns whether that was done."""
        if not await self._is_as_stored(pod):
            return False
        in_effect = step.in_effect
        event = relocated(owner_reference(pod), node, in_effect)
        if not step.is_way_back:
            await self._answer(pod, Condition(RELOCATED, True, "Relocated", event.note))
        elif (said := pod.condition(RELOCATED)) is None or said.status:
            why = f"revision {in_effect.revision - 1} failed on {node} and was undone"
            await self._answer(pod, Condition(RELOCATED, False, "NotRelocated", why))
        relocation: Relocation | None = None

        def decide(ledger: Ledger) -> tuple[LedgerChange, None]:
            nonlocal relocation
            claim = ledger.claims.get(pod.uid)
            if claim is None or claim.relocation is None:
                return LedgerChange(), None
            if claim.relocation.next.revision > in_effect.revision:
                return LedgerChange(), None  # another replica has gone on
            relocation = claim.relocation
            after = claim_after_relocation(claim, in_effect)
            return LedgerChange(claims=(after,)) if after else LedgerChange(releases=(pod.uid,)), None

        await self._cache.ledgers.change(node, decide)
        if relocation is None:
            return True
        self._freed(node)
        if relocation.is_way_back:
            return True
        RELOCATIONS.inc()
        log.info(
            "relocated to CPUs %s",
            format_cpu_list(in_effect.placement.cpus) or "of the shared pool",
            extra=_about(node, pod),
        )
        self._events.record(event)
        return True

    async def _go_back(self, node: NodeName, pod: PodRecord, failed: PodPlacement, why: str) -> bool:
        """Answer, and make the placement before the next one; returns whether that was done."""
        if not await self._is_as_stored(pod):
            return False
        await self._cannot(pod, f"revision {failed.revision} failed on {node} and was undone: {why}")

        def decide(ledger: Ledger) -> tuple[LedgerChange, None]:
            claim = ledger.claims.get(pod.uid)
            if claim is None or claim.relocation is None or claim.relocation.next.revision > failed.revision:
                return LedgerChange(), None
            return LedgerChange(claims=(way_back(claim, failed),)), None

        await self._cache.ledgers.change(node, decide)
        return True

    # Resume.

    async def _resume(self, node: NodeName, pod: PodRecord, step: Resume) -> bool:
        """Claim again the placement in effect, beside the newest one; returns whether that was done.

        Where others have CPUs of the newest placement by now, the pod goes back to the placement in effect.
        """
        if not await self._is_as_stored(pod):
            return False
        lost = step.relocation

        def decide(ledger: Ledger) -> tuple[LedgerChange, tuple[bool, str]]:
            stored = ledger.claims.get(pod.uid)
            if stored != step.claim:
                return LedgerChange(), (True, "")  # conflict with another writer
            empty = _empty_claim(pod)
            claim = claim_with_lost_relocation(ledger, stored or empty, lost)
            taken = held_by_others(ledger, claim)
            if not taken:
                return LedgerChange(claims=(claim,)), (True, "")
            why = (
                f"revision {lost.next.revision} cannot be in effect on {node}: "
                f"CPUs {format_cpu_list(taken)} belong to others by now"
            )
            claim = claim_without_lost_relocation(ledger, stored or empty, lost)
            if held_by_others(ledger, claim) & ~(stored or empty).cpus:
                return LedgerChange(), (False, f"{why}, and so do the CPUs that it runs on; restart it")
            return LedgerChange(claims=(claim,)), (True, why)

        is_resumed, why = await self._cache.ledgers.change(node, decide)
        if why:
            await self._cannot(pod, why)
        return is_resumed

    def _pins_memory(self, pod: PodRecord, step: Begin) -> bool:
        """Whether devices of the host access its memory; before its QEMU starts none does."""
        has_devices = step.pod_request.request.pins_memory or self._cache.dra.gives_devices(pod)
        return has_devices and not step.device_nodes

    # Answers.

    async def _cannot(self, pod: PodRecord, why: str) -> None:
        """State that nothing changes, and why."""
        event = relocation_refused(owner_reference(pod), why)
        self._events.record(event)
        await self._answer(pod, Condition(RELOCATED, False, "NotRelocated", why))

    async def _answer(self, pod: PodRecord, condition: Condition) -> None:
        if pod.condition(RELOCATED) == condition:
            return
        with contextlib.suppress(Refused):  # the pod is gone
            await self._cluster.set_pod_condition(pod, condition)


def _empty_claim(pod: PodRecord) -> Claim:
    nothing = Placement(Policy.NONE, (), NO_CPUS)
    return claim_of(pod.uid, nothing, namespace=pod.namespace, pod=pod.name, vmi=pod.vmi)


def _about(node: NodeName, pod: PodRecord) -> dict[str, object]:
    return about_pod(pod.uid, pod.namespace, pod.name, vmi=pod.vmi, node=node)
