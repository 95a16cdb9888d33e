"""Cores that pods of high priority get once the pods that were evicted for them have ended.

Between an eviction and the end of the last QEMU pass seconds or minutes, and cores come free one VM after the
other. Nobody else may take them meanwhile: the evicted VM itself is created again at once and waits, and
kube-scheduler counts CPUs, not which ones. Like holds, reservations exist in this process only and are no
promise; a pod of higher priority may take what is reserved for a lower one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from kvplace.core.ledger import Claim
from kvplace.core.scalars import NodeName, PodUid

SECONDS = 30.0
"""How long a reservation stays after it was made or renewed."""
LONGEST_SECONDS = 900.0
"""How long it stays at most: a victim that does not end is nobody's promise."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """What one pod gets on one node."""

    node: NodeName
    claim: Claim
    priority: int
    victims: frozenset[PodUid]
    until: float = 0.0
    ends: float = 0.0


class Reservations:
    """Reservations by pod UID."""

    def __init__(self, *, clock: Callable[[], float], changed: Callable[[NodeName], None]) -> None:
        """`changed` is called with a node whenever something is reserved there or no longer."""
        self._clock = clock
        self._changed = changed
        self._by_pod: dict[PodUid, Reservation] = {}

    @property
    def by_pod(self) -> Mapping[PodUid, Reservation]:
        """The reservations by the UID of the pod that they are for."""
        return MappingProxyType(self._by_pod)

    def reserve(self, reservation: Reservation) -> None:
        """Reserve cores for a pod, instead of what was reserved for it before."""
        uid, now = reservation.claim.uid, self._clock()
        self.drop(uid)
        self._by_pod[uid] = replace(reservation, until=now + SECONDS, ends=now + LONGEST_SECONDS)
        self._changed(reservation.node)

    def renew(self, uid: PodUid) -> None:
        """Begin the time of a reservation again: its victims are ending."""
        known = self._by_pod[uid]
        self._by_pod[uid] = replace(known, until=min(known.ends, self._clock() + SECONDS))

    def drop(self, uid: PodUid) -> None:
        """End the reservation of a pod, if it has one."""
        known = self._by_pod.pop(uid, None)
        if known is not None:
            self._changed(known.node)

    def drop_expired(self) -> None:
        """End the reservations whose time is over."""
        now = self._clock()
        for uid in [uid for uid, known in self._by_pod.items() if known.until <= now]:
            self.drop(uid)

    def on_node(
        self, node: NodeName, *, but: PodUid | None = None, least: int | None = None
    ) -> Iterator[Claim]:
        """Return what is reserved on a node, except for the pod `but` and for priorities below `least`."""
        return (
            known.claim
            for uid, known in self._by_pod.items()
            if known.node == node and uid != but and (least is None or known.priority >= least)
        )
