"""Tentative holds: cores that filter has chosen for pods whose bind has not come yet.

They exist in this process only: they keep pods that are being scheduled from choosing the same cores. What
counts is the claim in the ledger. A hold ends with its pod's bind, with the pod, or after a while. Where that
leaves its cores to nobody, subscribers hear of it: somebody may have been refused because of them.

Some pods are planned: they got their hold together with another pod, before kube-scheduler asked about them.
A planned hold becomes an ordinary one when kube-scheduler asks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvplace.core.ledger import Claim
from kvplace.core.scalars import NodeName, PodUid


@dataclass(frozen=True, slots=True)
class _Hold:
    node: NodeName
    until: float


class Holds:
    """Holds by pod UID and by node."""

    def __init__(
        self, *, seconds: float, clock: Callable[[], float], changed: Callable[[NodeName], None]
    ) -> None:
        """Hold for `seconds` of `clock`; `changed` is called with the node whenever its holds change."""
        self._seconds = seconds
        self._clock = clock
        self._changed = changed
        self._holds: dict[PodUid, _Hold] = {}
        self._on_node: dict[NodeName, dict[PodUid, Claim]] = {}
        self._planned: set[PodUid] = set()
        self._subscribers: list[Callable[[NodeName], None]] = []

    def __len__(self) -> int:
        """Count the pods that hold something, expired holds included."""
        return len(self._holds)

    def subscribe(self, left: Callable[[NodeName], None]) -> None:
        """Call `left` with the node whenever cores are no longer held for a pod, and are nobody else's."""
        self._subscribers.append(left)

    async def run(self) -> None:
        """End holds as soon as their time is over, until cancelled."""
        while True:
            oldest = next(iter(self._holds.values()), None)
            # A hold that begins during the pause ends after it.
            await asyncio.sleep(self._seconds if oldest is None else oldest.until - self._clock())
            self.drop_expired()

    def hold(self, node: NodeName, claim: Claim, *, planned: bool = False) -> None:
        """Hold what a pod would claim on a node; replaces its earlier hold."""
        uid = claim.uid
        self.drop(uid)
        self._holds[uid] = _Hold(node, self._clock() + self._seconds)
        self._on_node.setdefault(node, {})[uid] = claim
        if planned:
            self._planned.add(uid)
        self._changed(node)

    def drop(self, uid: PodUid) -> None:
        """End the hold of a pod, if it has one, since its cores are taken: by its claim, or other holds."""
        hold = self._holds.pop(uid, None)
        if hold is not None:
            held = self._on_node[hold.node]
            del held[uid]
            if not held:
                del self._on_node[hold.node]
            self._planned.discard(uid)
            self._changed(hold.node)

    def leave(self, uid: PodUid) -> None:
        """End the hold of a pod, if it has one, and leave its cores to whoever wants them."""
        node = self.node_of(uid)
        self.drop(uid)
        if node is not None:
            self.left(node)

    def left(self, node: NodeName) -> None:
        """Tell subscribers that cores of a node are held for nobody any more."""
        for left in self._subscribers:
            left(node)

    def drop_expired(self) -> None:
        """End the holds whose time is over; the oldest come first."""
        now = self._clock()
        for uid, hold in list(self._holds.items()):
            if hold.until > now:
                break
            self.leave(uid)

    def of_pod(self, uid: PodUid, node: NodeName) -> Claim | None:
        """Return what a pod holds on a node."""
        return self._on_node.get(node, {}).get(uid)

    def has(self, uid: PodUid) -> bool:
        """Return whether a pod has a hold."""
        return uid in self._holds

    def node_of(self, uid: PodUid) -> NodeName | None:
        """Return the node on which a pod has a hold."""
        hold = self._holds.get(uid)
        return hold.node if hold is not None else None

    def of_node(self, node: NodeName) -> list[Claim]:
        """Return what pods hold on a node."""
        return list(self._on_node.get(node, {}).values())

    def on_node(self, node: NodeName, *, but: PodUid | None = None) -> Iterator[Claim]:
        """Return what pods hold on a node, except for the pod `but`."""
        return (claim for uid, claim in self._on_node.get(node, {}).items() if uid != but)

    def planned_node(self, uid: PodUid) -> NodeName | None:
        """Return the node for which a pod is planned; None once kube-scheduler has asked about it."""
        return self._holds[uid].node if uid in self._planned else None

    def planned_on(self, node: NodeName) -> list[PodUid]:
        """Return the pods that are planned for a node."""
        return [uid for uid in self._on_node.get(node, ()) if uid in self._planned]

    @property
    def planned_nodes(self) -> set[NodeName]:
        """The nodes for which pods are planned."""
        return {self._holds[uid].node for uid in self._planned}

    def asked(self, uid: PodUid) -> None:
        """Make the planned hold of a pod an ordinary one, which begins now."""
        node = self._holds.pop(uid).node
        self._holds[uid] = _Hold(node, self._clock() + self._seconds)
        self._planned.discard(uid)
