"""Holds: cores that Filter has chosen for pods that are not bound yet.

They exist in this process only: they keep pods that are being scheduled from choosing the same cores. What
counts is the claim in the ledger. A hold ends with the bind of its pod, with the pod, or after a while. Where
the end leaves the cores without an owner, subscribers are called: another pod may have been refused because
of them.

Some pods are planned: they got their hold together with another pod, before kube-scheduler asked about them.
A planned hold becomes an ordinary one when kube-scheduler asks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvplace.core.ledger import Claim
from kvplace.core.placement import Placement
from kvplace.core.scalars import NodeName, PodUid


@dataclass(frozen=True, slots=True)
class Hold:
    """The offer of a node to a pod."""

    node: NodeName
    claim: Claim
    """The claim that its bind would store."""
    placement: Placement
    """What the claim stands for on the node's machine, which is the one with `fingerprint`."""
    fingerprint: str
    planned: bool = False
    """Whether kube-scheduler has not asked about the pod yet."""
    until: float = 0.0


class Holds:
    """Holds by pod UID and by node."""

    def __init__(
        self, *, seconds: float, clock: Callable[[], float], changed: Callable[[NodeName], None]
    ) -> None:
        """Hold for `seconds` of `clock`; `changed` is called with the node whenever its holds change."""
        self._seconds = seconds
        self._clock = clock
        self._changed = changed
        self._holds: dict[PodUid, Hold] = {}
        """The oldest first."""
        self._on_node: dict[NodeName, dict[PodUid, Claim]] = {}
        self._subscribers: list[Callable[[NodeName], None]] = []

    def __len__(self) -> int:
        """Count the pods that hold something, expired holds included."""
        return len(self._holds)

    def subscribe(self, left: Callable[[NodeName], None]) -> None:
        """Call `left` with the node whenever cores are no longer held and no claim has taken them."""
        self._subscribers.append(left)

    async def run(self) -> None:
        """End holds as soon as their time is over, until cancelled."""
        while True:
            oldest = next(iter(self._holds.values()), None)
            # A hold that begins during the pause ends after it.
            await asyncio.sleep(self._seconds if oldest is None else oldest.until - self._clock())
            self.drop_expired()

    def add(self, hold: Hold) -> None:
        """Begin a hold; it replaces an earlier hold of the pod."""
        uid = hold.claim.uid
        self.drop(uid)
        self._holds[uid] = replace(hold, until=self._clock() + self._seconds)
        self._on_node.setdefault(hold.node, {})[uid] = hold.claim
        self._changed(hold.node)

    def drop(self, uid: PodUid) -> None:
        """End the hold of a pod, if it has one, since its cores are taken: by its claim, or other holds."""
        hold = self._holds.pop(uid, None)
        if hold is not None:
            held = self._on_node[hold.node]
            del held[uid]
            if not held:
                del self._on_node[hold.node]
            self._changed(hold.node)

    def leave(self, uid: PodUid) -> None:
        """End the hold of a pod, if it has one, and leave its cores to other pods."""
        hold = self._holds.get(uid)
        self.drop(uid)
        if hold is not None:
            self.left(hold.node)

    def left(self, node: NodeName) -> None:
        """Call the subscribers: cores of a node are no longer held."""
        for left in self._subscribers:
            left(node)

    def drop_expired(self) -> None:
        """End the expired holds; the oldest come first."""
        now = self._clock()
        for uid, hold in list(self._holds.items()):
            if hold.until > now:
                break
            self.leave(uid)

    def of_pod(self, uid: PodUid, node: NodeName | None = None) -> Hold | None:
        """Return the hold of a pod; with a node only a hold there."""
        hold = self._holds.get(uid)
        return hold if hold is not None and node in (None, hold.node) else None

    def node_of(self, uid: PodUid) -> NodeName | None:
        """Return the node where a pod has a hold."""
        hold = self._holds.get(uid)
        return hold.node if hold is not None else None

    def on_node(self, node: NodeName, *, but: PodUid | None = None) -> tuple[Claim, ...]:
        """Return the holds of a node, without the one of the pod `but`."""
        return tuple(claim for uid, claim in self._on_node.get(node, {}).items() if uid != but)

    def planned_node(self, uid: PodUid) -> NodeName | None:
        """Return the node that a pod is planned for; None once kube-scheduler has asked about it."""
        hold = self._holds.get(uid)
        return hold.node if hold is not None and hold.planned else None

    def planned_on(self, node: NodeName) -> list[PodUid]:
        """Return the pods that are planned for a node."""
        return [uid for uid in self._on_node.get(node, ()) if self._holds[uid].planned]

    @property
    def planned_nodes(self) -> set[NodeName]:
        """The nodes that pods are planned for."""
        return {hold.node for hold in self._holds.values() if hold.planned}

    def asked(self, uid: PodUid) -> None:
        """Make the planned hold of a pod an ordinary one, which begins now."""
        hold = self._holds.pop(uid)
        self._holds[uid] = replace(hold, planned=False, until=self._clock() + self._seconds)
