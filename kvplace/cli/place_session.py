"""The lines of `kvplace place`: requests and releases for one machine, answered in their order.

Requests and answers are a stable interface for other programs. A line that is invalid gets an error as its
answer and takes nothing; the lines after it are answered all the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, BinaryIO

from kvplace.cli.parameters import read_cpus
from kvplace.core.allocator.allocate import place
from kvplace.core.cpuset import format_cpu_list
from kvplace.core.device_locality import predicted_held, too_few_devices
from kvplace.core.errors import BadBody
from kvplace.core.free_resources import NOTHING_IN_USE
from kvplace.core.moves.make_room import MAX_MOVES, Move, MovePlan, make_room
from kvplace.core.moves.suggestions import (
    NO_SUGGESTIONS,
    Suggestions,
    find_suggestions,
    move_document,
    move_text,
    refusal_document,
)
from kvplace.core.node_devices import NodeDevices
from kvplace.core.occupant import ClusterNode, Occupant, devices_beside, occupant_of_claim
from kvplace.core.placement import Placement, Refusal, placement_document
from kvplace.core.request import Request
from kvplace.core.request_json import id_of, read_strict_request
from kvplace.core.scalars import CpuMask, NodeName
from kvplace.core.search_budget import MAX_STEPS, MAX_STEPS_THOROUGH, Watch, unwatched
from kvplace.core.strict_json import Json, json_object, known_keys, shown
from kvplace.core.topology import Topology

if TYPE_CHECKING:
    from kvplace.machines.machine import Machine

MAX_LINE_BYTES = 1024 * 1024
"""A line of this length or more is not read as a request."""
INTERRUPTED = "the search for moves was interrupted; a longer search may find better moves"
"""Marks an answer from a search that was ended early."""
_LINE = "the line"
"""How errors about a whole line begin."""


class AnswerKind(Enum):
    """The kind of answer to one line."""

    PLACED = "placed"
    REFUSED = "refused"
    RELEASED = "released"
    INVALID = "invalid"


@dataclass(frozen=True, slots=True)
class PlaceDecision:
    """The decision about one request, and the moves before it."""

    found: Placement | Refusal
    moves: tuple[Move, ...] = ()
    interrupted: bool = False
    """Whether the search for moves was ended early."""
    suggestions: Suggestions = NO_SUGGESTIONS
    """The changes that make a refused VM fit."""


@dataclass(frozen=True, slots=True)
class PlaceAnswer:
    """The answer to one request or release, as JSON and as a sentence for people."""

    kind: AnswerKind
    document: Json
    sentence: str
    decision: PlaceDecision | None = None
    """The request in the words of the sentence; None for a release and for an invalid line."""


class PlaceSession:
    """One machine and the VMs that were kept on it."""

    def __init__(
        self,
        machine: Machine,
        *,
        free: CpuMask | None = None,
        keep: bool = False,
        make_room: bool = False,
        thorough: bool = False,
        explain: bool = True,
    ) -> None:
        """Start with no VM on the machine.

        `free` are the CPUs for requests that do not name their own, all of them by default. `make_room` lets
        kept VMs move, and `thorough` searches 100 times as long for such moves. `explain` adds to each
        refusal the changes that make the VM fit.
        """
        self._machine = machine
        self._topology = machine.topology
        self._free = machine.topology.cpus if free is None else free
        self._keep = keep
        self._make_room = make_room
        self._thorough = thorough
        self._explain = explain
        in_use = () if machine.in_use == NOTHING_IN_USE else (machine.in_use.claim(),)
        self._others = tuple(occupant_of_claim(claim.pod, claim, machine.topology) for claim in in_use)
        self._kept: dict[str, Occupant] = {}

    @property
    def _max_steps(self) -> int:
        """Steps for each number of moves."""
        return MAX_STEPS_THOROUGH if self._thorough else MAX_STEPS

    @property
    def most_steps(self) -> int:
        """Steps that the search for moves may take for one line."""
        return MAX_MOVES * self._max_steps

    def answer(self, line: str | bytes, number: int = 1, watch: Watch = unwatched) -> PlaceAnswer:
        """Answer one line of JSON. A line without an id goes by its number, counted from 1.

        `watch` may end the search for moves; the answer then has the best moves found so far, and is marked.
        """
        name = ""
        try:
            document = json_object(_text(line), what=_LINE, like='{"vcpus": 8}')
            name = id_of(document, "release" if "release" in document else "id")
            if "release" in document:
                return self._release(document, name)
            return self._place(document, name, number, watch)
        except BadBody as error:
            place: Json = {"id": name} if name else {"line": number}
            about = name or f"line {number}"
            said = str(error)
            sentence = f"{about}{said.removeprefix(_LINE)}" if said.startswith(_LINE) else f"{about}: {said}"
            return PlaceAnswer(AnswerKind.INVALID, {**place, "error": said}, sentence)

    def _place(self, document: Json, name: str, number: int, watch: Watch) -> PlaceAnswer:
        uid = name or f"request-{number}"
        if self._keep:
            name = uid  # a kept VM can be moved and released by its id
        request = read_strict_request(document, also=("id", "free"))
        only = None
        if "free" in document:
            text = document["free"]
            if not isinstance(text, str):
                raise BadBody(f"free is {shown(text)}; it must be a CPU list such as '0-15,32-47'")
            only = free_cpus(text, "free", self._topology)
        return self.place(uid, request, only, name, watch)

    def place(
        self,
        uid: str,
        request: Request,
        only: CpuMask | None = None,
        name: str | None = None,
        watch: Watch = unwatched,
    ) -> PlaceAnswer:
        """Place one VM; raises BadBody where a kept VM has this `uid`.

        `only` replaces the free CPUs of the session; `name` is the id in the answer, by default `uid`.
        """
        name = uid if name is None else name
        if uid in self._kept:
            raise BadBody(f"id {uid!r} holds CPUs already; release it first, or use another id")
        only = (self._free if only is None else only) & ~self._machine.kubelet_cpus
        answer: Json = {"id": name} if name else {}
        decision = self._decide(request, only, watch)
        found, moves, suggestions = decision.found, decision.moves, decision.suggestions
        if decision.interrupted:
            answer["interrupted"] = INTERRUPTED
        if isinstance(found, Refusal):
            answer["refusal"] = refusal_document(found, suggestions)
            sentence = f"{uid}: {found.message}"
            if suggestions.found:
                sentence += f"; {suggestions.found[0].sentence}"
            if suggestions.no_moves is not None and not suggestions.no_moves.exact:
                sentence += f"; {suggestions.no_moves.sentence}"
            return PlaceAnswer(AnswerKind.REFUSED, answer, sentence, decision)
        if self._keep:
            self._take(uid, request, found, moves)
        answer["placement"] = placement_document(self._machine.name, self._topology, request, found, uid=name)
        cpus = ",".join(map(str, found.vcpus)) or format_cpu_list(found.cpus)
        sentence = f"{uid}: CPUs {cpus} ({', '.join(domain_phrases(found))})"
        if self._make_room:
            answer["moves"] = [self._moved(move) for move in moves]
            sentence += "".join(f"; move {move_text(move)}" for move in moves)
        if decision.interrupted:
            sentence += f"; {INTERRUPTED}"
        return PlaceAnswer(AnswerKind.PLACED, answer, sentence, decision)

    def _moved(self, move: Move) -> Json:
        request = self._kept[move.id].request
        placed = placement_document(self._machine.name, self._topology, request, move.after, uid=move.id)
        return {**move_document(move), "placement": placed}

    def _decide(self, request: Request, only: CpuMask, watch: Watch) -> PlaceDecision:
        refusal = too_few_devices(self._free_devices, request.devices)
        if refusal is not None:
            return PlaceDecision(refusal, ())
        no_moves = None
        topology, running = self._topology.giving_out(only), (*self._kept.values(), *self._others)
        node = ClusterNode(NodeName(self._machine.name), topology, running, devices=self._machine.devices)
        if self._make_room:
            found = make_room(node, request, max_steps=self._max_steps, watch=watch)
            if isinstance(found, MovePlan):
                return PlaceDecision(found.placement, found.moves, interrupted=found.interrupted)
            no_moves = found
        interrupted = no_moves is not None and no_moves.interrupted
        answer = place(self._topology, node.free, request)
        suggestions = NO_SUGGESTIONS
        if self._explain and isinstance(answer, Refusal):
            # With --make-room the moves were searched already.
            there = replace(node, running=()) if self._make_room or not self._kept else node
            suggestions = find_suggestions(there, node.free, request)
        if no_moves is not None:
            suggestions = replace(suggestions, no_moves=no_moves)
        return PlaceDecision(answer, (), interrupted, suggestions)

    @property
    def _free_devices(self) -> NodeDevices | None:
        """The devices that the kubelet will not have given to kept VMs."""
        return devices_beside(self._machine.devices, self._kept.values())

    def _take(self, uid: str, request: Request, placement: Placement, moves: tuple[Move, ...]) -> None:
        for move in moves:
            self._kept[move.id] = replace(self._kept[move.id], placement=move.after)
        devices = predicted_held(self._free_devices, request.devices)
        self._kept[uid] = Occupant(uid, request, placement, devices=devices)

    def _release(self, document: Json, name: str) -> PlaceAnswer:
        known_keys(document, ("release",))
        if not self._keep:
            raise BadBody("nothing is kept, so nothing can be released; call with --keep")
        occupant = self._kept.pop(name, None)
        if occupant is None:
            raise BadBody(f"id {name!r} holds no CPUs")
        cpus = format_cpu_list(occupant.placement.cpus | occupant.placement.owned)
        return PlaceAnswer(
            AnswerKind.RELEASED, {"released": name, "cpus": cpus}, f"{name}: released CPUs {cpus}"
        )


def free_cpus(text: str, what: str, topology: Topology) -> CpuMask:
    """Parse the list of free CPUs; raises BadBody when the machine does not have one of them."""
    cpus = read_cpus(text, what)
    if cpus & ~topology.cpus:
        raise BadBody(
            f"{what}: the machine has no CPU {format_cpu_list(cpus & ~topology.cpus)}; "
            f"it has {format_cpu_list(topology.cpus)}"
        )
    return cpus


def numbered_lines(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Read lines as they arrive, with their numbers from 1; blank lines count and are left out.

    Of a line that is too long only the beginning is returned, which is not read as a request.
    """
    number = 0
    while line := stream.readline(MAX_LINE_BYTES):
        number += 1
        rest = line
        while len(rest) >= MAX_LINE_BYTES and not rest.endswith(b"\n"):
            rest = stream.readline(MAX_LINE_BYTES)
        if text := line.strip(b" \t\r\n"):
            yield number, text if len(line) < MAX_LINE_BYTES else line


def _text(line: str | bytes) -> str:
    if len(line) >= MAX_LINE_BYTES:
        raise BadBody(f"{_LINE} is longer than {MAX_LINE_BYTES} bytes; write one request per line")
    if isinstance(line, str):
        return line
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadBody(
            f"{_LINE} is not valid UTF-8: byte {line[error.start]:#04x} at position {error.start + 1}"
        ) from None


def domain_phrases(placement: Placement) -> list[str]:
    """Name the sockets, NUMA nodes and L3 caches of a placement."""
    named = {"socket": placement.packages, "NUMA node": placement.numa_nodes, "L3": placement.l3_groups}
    return [f"{noun} {','.join(map(str, ids))}" for noun, ids in named.items() if ids]
