"""Suggestions for a VM that does not fit: for each kind of change the smallest one that makes it fit.

Every suggestion has been tried with the function that places VMs. That takes dozens of placements, so it is
done only where a user asks why, never while nodes are filtered.

Every command writes refusals, suggestions and moves in the same JSON form: a stable interface for programs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvplace.core.allocator.allocate import try_place
from kvplace.core.annotations import contradiction_in
from kvplace.core.cpuset import format_cpu_list
from kvplace.core.free_resources import Free
from kvplace.core.moves.make_room import Move, MovePlan, NoMoves, make_room
from kvplace.core.occupant import ClusterNode
from kvplace.core.placement import Placement, Refusal
from kvplace.core.quantity import about_bytes, bytes_in_pages, counted, format_bytes
from kvplace.core.request import (
    NARROW_FIRST,
    EmulatorThreads,
    Level,
    NumaMemory,
    PinningOptions,
    Policy,
    Request,
    Smt,
)
from kvplace.core.scalars import Bytes
from kvplace.core.strict_json import Json
from kvplace.core.topology import Topology

_WEAKER_SMT = {Smt.ISOLATE: (Smt.REQUIRE, Smt.PREFER), Smt.REQUIRE: (Smt.PREFER,), Smt.PREFER: ()}
_MEBIBYTE = Bytes(1 << 20)
_MAX_VCPU_TRIALS = 256
"""Numbers of vCPUs that are tried for a `spread` scope: its equal shares allow no binary search."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """One change that makes the VM fit."""

    field: str
    """The key of the request in its JSON form, or `moves`."""
    value: Any
    """The value that the key would need; None for moves."""
    sentence: str
    request: Request
    """The request with the change."""
    placement: Placement
    """The placement of the VM after the change."""
    moves: tuple[Move, ...] = ()
    """Running VMs that have to move first, in this order."""


@dataclass(frozen=True, slots=True)
class Suggestions:
    """All suggestions for one refused VM, the smallest change for its user first."""

    found: tuple[Suggestion, ...] = ()
    no_moves: NoMoves | None = None
    """The reason for no suggested moves, after a search."""


NO_SUGGESTIONS = Suggestions()


def find_suggestions(node: ClusterNode, free: Free, request: Request) -> Suggestions:
    """Find the changes that make a refused VM fit on a node with these free resources.

    1. Other VMs move.
    2. A weaker option: cpu-set, smt, emulator-threads, numa-memory.
    3. Fewer vCPUs, huge pages or bytes, the smallest share first.
    4. The VM shares its CPUs.
    """
    weaker = _WeakerRequests(node.topology, free, request)
    found = list(weaker.weaker_options())
    fewer = [*weaker.fewer_vcpus(), *weaker.fewer_pages(), *weaker.less_memory()]
    found += [suggestion for _, suggestion in sorted(fewer, key=lambda pair: pair[0])]
    found += weaker.sharing()
    if not node.running:
        return Suggestions(tuple(found))
    answer = make_room(node, request, most_moves=1)
    if isinstance(answer, NoMoves):
        return Suggestions(tuple(found), answer)
    moves = [_moves_suggestion(node.topology, request, answer)] if answer.moves else []
    return Suggestions((*moves, *found))


def _moves_suggestion(topology: Topology, request: Request, plan: MovePlan) -> Suggestion:
    text = ", then ".join(move_text(move) for move in plan.moves)
    sentence = f"move {text}, and it fits {where(topology, request, plan.placement)}"
    return Suggestion("moves", None, sentence, request, plan.placement, plan.moves)


def move_text(move: Move) -> str:
    """Write a move as part of a sentence."""
    before, after = (format_cpu_list(one.cpus | one.owned) for one in (move.before, move.after))
    memory = f" with {about_bytes(move.bytes_moved)} of memory" if move.bytes_moved else ""
    return f"{move.id} from {before} to {after}{memory}"


def where(topology: Topology, request: Request, placement: Placement) -> str:
    """Name the L3 group, sockets or NUMA nodes of a placement, as its scope does."""
    match request.options.scope.level:
        case Level.L3:
            return f"on L3 group {placement.l3_groups[0]}"
        case Level.SOCKET if topology.socket_noun == "socket":
            return _counted("socket", placement.packages)
        case _:
            return _counted("NUMA node", placement.numa_nodes)


def _counted(noun: str, ids: Sequence[int]) -> str:
    if len(ids) == 1:
        return f"on {noun} {ids[0]}"
    return f"on {noun}s {', '.join(map(str, ids[:-1]))} and {ids[-1]}"


class _WeakerRequests:
    """One refused request, and the free resources."""

    def __init__(self, topology: Topology, free: Free, request: Request) -> None:
        self._topology = topology
        self._free = free
        self._request = request
        self._answers: dict[Request, Placement | None] = {}

    def weaker_options(self) -> Iterator[Suggestion]:
        options = self._request.options
        wider = NARROW_FIRST[NARROW_FIRST.index(options.scope) + 1 :]
        yield from self._first(
            "cpuSet", "cpu-set", [(scope.value, replace(options, scope=scope)) for scope in wider]
        )
        yield from self._first(
            "smt", "smt", [(smt.value, replace(options, smt=smt)) for smt in _WEAKER_SMT[options.smt]]
        )
        if options.emulator_threads is EmulatorThreads.ISOLATE:
            shared = EmulatorThreads.SHARED
            changed = [(shared.value, replace(options, emulator_threads=shared))]
            yield from self._first("emulatorThreads", "emulator-threads", changed)
        if self._request.memory and options.numa_memory is not NumaMemory.OFF:
            off = NumaMemory.OFF
            yield from self._first(
                "numaMemory", "numa-memory", [(off.value, replace(options, numa_memory=off))]
            )

    def sharing(self) -> Iterator[Suggestion]:
        options, share = self._request.options, Policy.SHARE
        if options.policy is Policy.EXCLUSIVE:
            yield from self._first("policy", "cpu-policy", [(share.value, replace(options, policy=share))])

    def fewer_vcpus(self) -> Iterator[tuple[float, Suggestion]]:
        needed = self._request.vcpus
        most = min(needed - 1, self._free.pool.bit_count())

        def with_vcpus(count: int) -> Request:
            return replace(self._request, vcpus=count)

        if self._request.options.scope.evenly:
            counts = range(most, max(0, most - _MAX_VCPU_TRIALS), -1)
            best = next((count for count in counts if self._fits(with_vcpus(count))), 0)
        else:
            best = self._largest(most, with_vcpus)
        if best:
            what = f"with {counted(best, 'vCPU')}"
            yield (needed - best) / needed, self._suggestion("vcpus", best, what, with_vcpus(best))

    def fewer_pages(self) -> Iterator[tuple[float, Suggestion]]:
        for size, needed in sorted(self._request.huge_pages.items()):
            others = {of: n for of, n in self._request.huge_pages.items() if of != size}

            def with_pages(count: int, size: Bytes = size, others: dict[Bytes, int] = others) -> Request:
                pages = {**others, size: count} if count else others
                return replace(self._request, huge_pages=pages)

            if not self._fits(with_pages(0)):
                continue
            best = self._largest(needed - 1, with_pages)
            value = {format_bytes(of): n for of, n in with_pages(best).huge_pages.items()}
            page = f"huge pages of {format_bytes(size)}"
            what = f"with {best} {page} instead of {needed}" if best else f"without {page}"
            yield (needed - best) / needed, self._suggestion("hugepages", value, what, with_pages(best))

    def less_memory(self) -> Iterator[tuple[float, Suggestion]]:
        needed = self._request.memory
        paged = bytes_in_pages(self._request.huge_pages)
        least, most = -(-paged // _MEBIBYTE), (needed - 1) // _MEBIBYTE

        def with_memory(more: int) -> Request:
            return replace(self._request, memory=(least + more) * _MEBIBYTE)

        if most <= least or not self._fits(with_memory(1)):
            return
        best = self._largest(most - least, with_memory)
        if best:
            changed = with_memory(best)
            value = format_bytes(changed.memory)
            suggestion = self._suggestion("memory", value, f"with {value} of memory", changed)
            yield (needed - changed.memory) / needed, suggestion

    def _first(
        self, field: str, key: str, changed: Sequence[tuple[str, PinningOptions]]
    ) -> Iterator[Suggestion]:
        """Suggest the first of these (value, options with it) that makes the VM fit."""
        for value, options in changed:
            request = replace(self._request, options=options)
            if self._fits(request):
                yield self._suggestion(field, value, f"with {key} {value}", request)
                return

    def _largest(self, most: int, changed: Callable[[int], Request]) -> int:
        """The largest amount up to `most` that fits, by binary search; 0 when none does."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self._fits(changed(middle)):
                low = middle
            else:
                high = middle - 1
        return low

    def _place(self, request: Request) -> Placement | None:
        if request not in self._answers:
            self._answers[request] = try_place(self._topology, self._free, request)
        return self._answers[request]

    def _fits(self, request: Request) -> bool:
        """Whether the options are allowed together and the VM fits."""
        return contradiction_in(request.options) is None and self._place(request) is not None

    def _suggestion(self, field: str, value: Any, what: str, request: Request) -> Suggestion:
        placement = self._place(request)
        assert placement is not None
        return Suggestion(
            field, value, f"{what} it fits {where(self._topology, request, placement)}", request, placement
        )


def refusal_document(refusal: Refusal, suggestions: Suggestions = NO_SUGGESTIONS) -> Json:
    """Write a refusal with its numbers, and with the changes that would make the VM fit."""
    document: Json = {
        "reason": refusal.reason.value,
        "message": refusal.message,
        "shortfall": dict(refusal.shortfall),
        "never": refusal.never,
    }
    if suggestions.found:
        document["suggestions"] = [suggestion_document(suggestion) for suggestion in suggestions.found]
    if suggestions.no_moves is not None and not suggestions.no_moves.exact:
        document["searchStopped"] = suggestions.no_moves.sentence
    return document


def suggestion_document(suggestion: Suggestion) -> Json:
    """Write a suggestion: the key that changes and its new value, or the moves."""
    document: Json = {"change": suggestion.field, "message": suggestion.sentence}
    if suggestion.moves:
        document["moves"] = [move_document(move) for move in suggestion.moves]
    else:
        document["value"] = suggestion.value
    return document


def move_document(move: Move) -> Json:
    """Write a move: all CPUs that a VM holds before and after it."""
    return {
        "id": move.id,
        "from": format_cpu_list(move.before.cpus | move.before.owned),
        "to": format_cpu_list(move.after.cpus | move.after.owned),
        "bytes": move.bytes_moved,
    }
