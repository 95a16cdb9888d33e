"""Kubernetes events: every reason that kvplace writes, and how often events are written.

An event (events.k8s.io/v1) reports a change or a refusal to the owner of a VM. Components give one to an
`EventRecorder`, which never holds them up. A fact that an object of Kubernetes states already gets no event:
the cores of a VM are on its pod. kube-scheduler may try a pod again every second, with equal messages or with
messages that change all the time. So the recorder writes equal messages once in a while, and only a limited
number of changing ones.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Any, Protocol

from kvplace.core.cpuset import format_cpu_list
from kvplace.core.errors import KvplaceError
from kvplace.core.node_devices import PodDevice
from kvplace.core.placement import PodPlacement
from kvplace.core.quantity import first_of
from kvplace.core.scalars import NodeName, NumaId, PodUid
from kvplace.kube.object_records import PodRecord

log = logging.getLogger(__name__)

PERIOD_S = 300.0
"""An equal message about the same object is not written again for so long."""
MESSAGES_PER_PERIOD = 5
"""Different messages of one reason about one object that are written in a period; more are dropped."""
_REMEMBERED = 10_000
"""Pairs of object and reason with a remembered message; the oldest is forgotten first."""
_NOTE_LIMIT = 1024
"""Bytes that the API server takes of a note."""
_UNWRITTEN = 1_000
"""Events that wait for the API server at most; more are dropped."""
AT_ONCE = 16
"""Events that are written at the same time: more would take the connections that bind pods."""
_MOST_NAMED = 4
"""Devices that one event names."""
_LAST_S = 5.0
"""How long the end of a process waits for events that are not written yet."""


class EventReason(Enum):
    """The reason of an event, for machines."""

    DOES_NOT_FIT = "DoesNotFit"
    """Why no node can hold a VM."""
    FLOATING = "Floating"
    """A VM is bound without cores of its own."""
    CORES_OVERLAP = "CoresOverlap"
    """A running pod uses CPUs that the ledger gives to another pod."""
    RELOCATED = "Relocated"
    """Which cores a running VM has now."""
    NOT_RELOCATED = "NotRelocated"
    """Why a running VM does not get the cores that its edited annotations request."""
    MAKING_ROOM = "MakingRoom"
    """A move, to the VM that moves and to the VM that waits for it."""
    ROOM_NOT_MADE = "RoomNotMade"
    """Why the moves that were to make room for a VM have not made it."""
    PINNING_DRIFT = "PinningDrift"
    """Threads of a VM were found elsewhere than the agent had left them."""
    DEVICE_NOT_LOCAL = "DeviceNotLocal"
    """A VM has started with devices that are not beside its cores."""

    @property
    def type(self) -> str:
        """How the event is shown by `kubectl describe`."""
        return "Normal" if self in (EventReason.RELOCATED, EventReason.MAKING_ROOM) else "Warning"

    @property
    def action(self) -> str:
        """The action that was tried."""
        match self:
            case EventReason.FLOATING:
                return "Binding"
            case EventReason.DOES_NOT_FIT:
                return "Placing"
            case EventReason.CORES_OVERLAP:
                return "Reclaiming"
            case EventReason.RELOCATED | EventReason.NOT_RELOCATED:
                return "Relocating"
            case EventReason.MAKING_ROOM | EventReason.ROOM_NOT_MADE:
                return "MakingRoom"
            case EventReason.PINNING_DRIFT:
                return "Pinning"
            case EventReason.DEVICE_NOT_LOCAL:
                return "Starting"


@dataclass(frozen=True, slots=True)
class ObjectReference:
    """The object that an event is about."""

    kind: str
    """Pod, Node or VirtualMachineInstance."""
    namespace: str
    """Empty for a node."""
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class EventRecord:
    """One event."""

    regarding: ObjectReference
    reason: EventReason
    note: str
    """One sentence for people."""

    @property
    def namespace(self) -> str:
        """The namespace of the event; those about objects without one are in `default`."""
        return self.regarding.namespace or "default"

    def document(self, *, controller: str, instance: str, now: datetime) -> dict[str, Any]:
        """Return the object of events.k8s.io/v1; a note that is too long for the API server is cut."""
        about, reason = self.regarding, self.reason
        return {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"generateName": about.name[:200].rstrip(".-") + "-", "namespace": self.namespace},
            "eventTime": now.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "reportingController": controller,
            "reportingInstance": instance,
            "type": reason.type,
            "reason": reason.value,
            "action": reason.action,
            "note": self.note.encode()[:_NOTE_LIMIT].decode(errors="ignore"),
            "regarding": {
                "apiVersion": "kubevirt.io/v1" if about.kind == "VirtualMachineInstance" else "v1",
                "kind": about.kind,
                "name": about.name,
                "namespace": about.namespace,
                "uid": about.uid,
            },
        }


def pod_reference(namespace: str, name: str, uid: PodUid) -> ObjectReference:
    """Refer to a pod."""
    return ObjectReference("Pod", namespace, name, uid)


def vmi_reference(namespace: str, name: str, uid: str) -> ObjectReference:
    """Refer to a VirtualMachineInstance."""
    return ObjectReference("VirtualMachineInstance", namespace, name, uid)


def owner_reference(pod: PodRecord) -> ObjectReference:
    """Refer to the object that a pod's owner reads: its VirtualMachineInstance, or a plain pod itself."""
    if pod.vmi:
        return vmi_reference(pod.namespace, pod.vmi, pod.vmi_uid)
    return pod_reference(pod.namespace, pod.name, pod.uid)


def floating(regarding: ObjectReference) -> EventRecord:
    """Report that a VM is bound without cores of its own."""
    note = "no cores fit, so the VM runs unpinned, as on-failure: float requests"
    return EventRecord(regarding, EventReason.FLOATING, note)


def relocated(regarding: ObjectReference, node: NodeName, bound: PodPlacement) -> EventRecord:
    """Report which cores a running VM has now."""
    placement = bound.placement
    where = (
        "the shared pool"
        if placement.floats
        else f"CPUs {format_cpu_list(placement.cpus)}, policy {placement.policy.value}"
    )
    note = f"revision {bound.revision}: {where} of {node}"
    return EventRecord(regarding, EventReason.RELOCATED, note)


def pinning_drift(regarding: ObjectReference, differences: str, *, repaired: bool) -> EventRecord:
    """Report that threads of a VM were found elsewhere than the agent had left them."""
    note = f"{differences}; {'set back' if repaired else 'not repaired yet'}"
    return EventRecord(regarding, EventReason.PINNING_DRIFT, note)


def device_not_local(
    regarding: ObjectReference, devices: Iterable[PodDevice], cores: Iterable[NumaId]
) -> EventRecord:
    """Report that a VM has started with devices that are not beside its cores."""
    named = [f"{one.resource} {one.address}".rstrip() + f" is on NUMA node {one.node}" for one in devices]
    where = ", ".join(map(str, cores))
    note = f"{first_of(named, _MOST_NAMED)}; the cores of the VM are on NUMA node {where}"
    return EventRecord(regarding, EventReason.DEVICE_NOT_LOCAL, note)


def _about(regarding: ObjectReference) -> dict[str, object]:
    """Name the object in a log line: only pods have `uid`, the key that joins lines."""
    name = f"{regarding.namespace}/{regarding.name}"
    return {"uid": regarding.uid, "pod": name} if regarding.kind == "Pod" else {"vm": name}


class EventWriter(Protocol):
    """The cluster calls of the recorder."""

    async def record_event(self, event: EventRecord) -> None:
        """Write one event."""
        ...


class EventRecorder:
    """Writes events in the background, each once in a while.

    An equal message of the same reason about the same object is not written twice within PERIOD_S; a changed
    one is, up to MESSAGES_PER_PERIOD of them. An event that could not be written is logged and counts as not
    written, so the next equal one is.
    """

    def __init__(self, cluster: EventWriter, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster = cluster
        self._clock = clock
        self._written: OrderedDict[tuple[ObjectReference, EventReason], dict[int, float]] = OrderedDict()
        """When which messages, by their hash, were written about an object.

        It is more than a UID: a pod in another namespace can name the UID of a VM as its owner's.
        """
        self._writing: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Semaphore(AT_ONCE)

    @property
    def unwritten(self) -> int:
        """How many events are still to be written."""
        return len(self._writing)

    def record(self, event: EventRecord) -> None:
        """Write an event soon, unless it was written lately or too many others about its object were."""
        if len(self._writing) >= _UNWRITTEN:
            log.warning(
                "event dropped, the API server is too slow: %s", event.note, extra=_about(event.regarding)
            )
        elif self._is_due(event):
            task = asyncio.get_running_loop().create_task(self._write(event))
            self._writing.add(task)
            task.add_done_callback(self._writing.discard)

    async def finish(self, within_s: float = _LAST_S) -> None:
        """Wait for all events to be written, up to a limit; the others are lost."""
        try:
            async with asyncio.timeout(within_s):
                while self._writing:
                    await asyncio.gather(*self._writing, return_exceptions=True)
        except TimeoutError:
            log.warning("some events are lost: the API server has not taken them within %s s", within_s)

    def _is_due(self, event: EventRecord) -> bool:
        """Return whether an event is to be written now, and remember it as written."""
        now = self._clock()
        key = (event.regarding, event.reason)
        written = {
            message: moment
            for message, moment in self._written.get(key, {}).items()
            if now - moment < PERIOD_S
        }
        message = hash(event.note)
        if message in written or len(written) >= MESSAGES_PER_PERIOD:
            return False
        self._written[key] = {**written, message: now}
        self._written.move_to_end(key)
        self._forget_old(now)
        return True

    def _forget_old(self, now: float) -> None:
        """Forget the oldest events that may be written again or are beyond the limit."""
        while self._written:
            key, written = next(iter(self._written.items()))
            is_over = now - max(written.values(), default=-PERIOD_S) >= PERIOD_S
            if not is_over and len(self._written) <= _REMEMBERED:
                break
            del self._written[key]

    async def _write(self, event: EventRecord) -> None:
        try:
            async with self._turn:
                await self._cluster.record_event(event)
        except KvplaceError as error:
            log.warning("event lost: %s", error, extra=_about(event.regarding))
            self._written.get((event.regarding, event.reason), {}).pop(hash(event.note), None)
