"""Requests for one machine, answered one after the other as the extender would answer them.

The form of requests and answers is a stable interface for other programs. A line that is wrong gets an
error for an answer and takes nothing; the lines after it are answered all the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from kvplace.core.allocator.allocate import place
from kvplace.core.answer_json import move_document, placement_document, refusal_document
from kvplace.core.cpuset import format_cpu_list, parse_cpu_list
from kvplace.core.errors import BadBody
from kvplace.core.free import free_of
from kvplace.core.ledger import Ledger, LedgerChange
from kvplace.core.occupant import Occupant, claim_of
from kvplace.core.placement import Placement
from kvplace.core.refusal import Refusal
from kvplace.core.request import Request
from kvplace.core.request_json import id_of, request_of
from kvplace.core.room.make_room import Move, make_room
from kvplace.core.room.mending import Mend, mends, move_text
from kvplace.core.strict_json import Json, json_object, known_keys, shown
from kvplace.core.topology import Topology

MOST_BYTES = 1024 * 1024
"""Length from which on a line is no request."""
_MOST_MENDED = 4096


class Outcome(Enum):
    """What became of one line."""

    PLACED = "placed"
    REFUSED = "refused"
    RELEASED = "released"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer, as JSON and for people."""

    outcome: Outcome
    document: Json
    sentence: str


class Placing:
    """One machine and what is taken on it."""

    def __init__(
        self,
        name: str,
        topology: Topology,
        *,
        free: int | None = None,
        foreign: int = 0,
        keep: bool = False,
        rearrange: bool = False,
        thorough: bool = False,
        explain: bool = True,
    ) -> None:
        """Begin with a machine on which nothing is kept.

        `free` are the CPUs that may be given out when a line does not say itself, `foreign` those that
        others hold in any case; `rearrange` lets kept VMs move so that a new one fits well, which a
        `thorough` search looks for however long it takes; `explain` says with each refusal what would mend
        it.
        """
        self._name = name
        self._topology = topology
        self._free = topology.cpus if free is None else free
        self._foreign = foreign
        self._keep = keep
        self._rearrange = rearrange
        self._thorough = thorough
        self._explain = explain
        self._ledger = Ledger()
        self._kept: dict[str, Occupant] = {}
        self._asked = 0
        self._mended: dict[tuple[Request, int], tuple[Mend, ...]] = {}
        """What was found for the machine as it stands, since the same VMs tend to be asked for again."""

    def answer(self, line: str | bytes, number: int = 0) -> Answer:
        """Answer one line of JSON; its number, where it has one, names it when it is wrong and has no id."""
        name = ""
        try:
            wish = json_object(_text(line), what="the line", like='{"vcpus": 8}')
            name = id_of(wish, "release" if "release" in wish else "id")
            return self._release(wish, name) if "release" in wish else self._place(wish, name)
        except BadBody as error:
            called: Json = {"id": name} if name else {"line": number} if number else {}
            told = name or (f"line {number}" if number else "request")
            return Answer(Outcome.WRONG, {**called, "error": str(error)}, f"{told}: {error}")

    def _place(self, wish: Json, name: str) -> Answer:
        self._asked += 1
        uid = name or f"request-{self._asked}"
        if self._keep and uid in self._kept:
            raise BadBody(f"id {uid!r} holds CPUs already; release it first, or use another id")
        request = request_of(wish, also=("id", "free"))
        only = (self._cpus(wish["free"]) if "free" in wish else self._free) & ~self._foreign
        document: Json = {"id": name} if name else {}
        found, moves = self._found(request, only)
        if isinstance(found, Refusal):
            mended = self._mends(request, only)
            document["refusal"] = refusal_document(found, mended)
            told = f"; {mended[0].sentence}" if mended else ""
            return Answer(Outcome.REFUSED, document, f"{uid}: {found.message}{told}")
        if self._keep:
            self._take(uid, request, found, moves)
        document["placement"] = placement_document(self._name, self._topology, request, found, uid=name)
        where = (
            f"socket {_listed(found.packages)}, NUMA node {_listed(found.numa_nodes)}, "
            f"L3 {_listed(found.l3_groups)}"
        )
        cpus = _listed(found.vcpus) or format_cpu_list(found.cpus)
        sentence = f"{uid}: CPUs {cpus} ({where})"
        if self._rearrange:
            document["moves"] = [self._moved(move) for move in moves]
            sentence += "".join(f"; move {move_text(move)}" for move in moves)
        return Answer(Outcome.PLACED, document, sentence)

    def _moved(self, move: Move) -> Json:
        request = self._kept[move.id].request
        placed = placement_document(self._name, self._topology, request, move.after, uid=move.id)
        return {**move_document(move), "placement": placed}

    def _found(self, request: Request, only: int) -> tuple[Placement | Refusal, tuple[Move, ...]]:
        if self._rearrange:
            running = tuple(self._kept.values())
            room = make_room(self._topology, running, request, only=only, thorough=self._thorough)
            if room is not None:
                return room.placement, room.moves
        return place(self._topology, free_of(self._topology, self._ledger, only=only), request), ()

    def _mends(self, request: Request, only: int) -> tuple[Mend, ...]:
        if not self._explain:
            return ()
        key = (request, only)
        if key not in self._mended:
            if len(self._mended) >= _MOST_MENDED:
                self._mended.clear()
            free = free_of(self._topology, self._ledger, only=only)
            found = mends(self._topology, free, request, tuple(self._kept.values()), only=only)
            self._mended[key] = found
        return self._mended[key]

    def _take(self, uid: str, request: Request, placement: Placement, moves: tuple[Move, ...]) -> None:
        """Write down each move, then the new VM: the ledger refuses a CPU that is taken."""
        self._mended.clear()
        for move in moves:
            self._ledger = self._ledger.after(LedgerChange(claims=(claim_of(move.id, move.after),)))
            self._kept[move.id] = replace(self._kept[move.id], placement=move.after)
        self._ledger = self._ledger.after(LedgerChange(claims=(claim_of(uid, placement),)))
        self._kept[uid] = Occupant(uid, request, placement)

    def _release(self, wish: Json, name: str) -> Answer:
        known_keys(wish, ("release",))
        if not self._keep:
            raise BadBody("nothing is kept, so nothing can be released; call with --keep")
        occupant = self._kept.pop(name, None)
        if occupant is None:
            raise BadBody(f"id {name!r} holds nothing")
        self._mended.clear()
        self._ledger = self._ledger.after(LedgerChange(releases=(name,)))
        cpus = format_cpu_list(occupant.placement.cpus | occupant.placement.owned)
        return Answer(Outcome.RELEASED, {"released": name, "cpus": cpus}, f"{name}: released CPUs {cpus}")

    def _cpus(self, value: object) -> int:
        if not isinstance(value, str):
            raise BadBody(f"free is {shown(value)}; it must be a CPU list such as '0-15,32-47'")
        return free_cpus(value, "free", self._topology)


def free_cpus(text: str, what: str, topology: Topology) -> int:
    """Read the CPUs that a user says are free; raises BadBody when the machine lacks one of them."""
    try:
        cpus = parse_cpu_list(text, what=what)
    except ValueError as error:
        raise BadBody(str(error)) from None
    if cpus & ~topology.cpus:
        raise BadBody(
            f"{what}: the machine has no CPU {format_cpu_list(cpus & ~topology.cpus)}; "
            f"it has {format_cpu_list(topology.cpus)}"
        )
    return cpus


def _text(line: str | bytes) -> str:
    if len(line) >= MOST_BYTES:
        raise BadBody(f"the line is longer than {MOST_BYTES} bytes; write one request per line")
    if isinstance(line, str):
        return line
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadBody(
            f"the line is no UTF-8: byte {line[error.start]:#04x} at position {error.start + 1}"
        ) from None


def _listed(ids: tuple[int, ...]) -> str:
    return ",".join(str(number) for number in ids)
