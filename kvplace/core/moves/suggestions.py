"""What would make a VM fit that does not: of each kind of change the smallest one that really does.

Every suggestion is tried before it is told, by the same function that places VMs. That takes a score of
placements, so it is done for whoever asks why, never while nodes are filtered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvplace.core.allocator.allocate import try_place
from kvplace.core.contradictions import contradiction_in
from kvplace.core.cpuset import format_cpu_list
from kvplace.core.free import Free
from kvplace.core.moves.make_room import Move, Occupant, make_room
from kvplace.core.placement import Placement
from kvplace.core.quantity import about_bytes, counted, format_bytes
from kvplace.core.request import EmulatorThreads, NumaMemory, Policy, Request, Scope, Smt
from kvplace.core.topology import Topology

_SCOPES = (
    Scope.ONE_L3, Scope.ONE_NUMA, Scope.ONE_SOCKET, Scope.SPREAD_NUMA, Scope.SPREAD_SOCKETS, Scope.ANY,
)  # fmt: skip
"""From the narrowest to the widest."""
_WEAKER_SMT = {Smt.ISOLATE: (Smt.REQUIRE, Smt.PREFER), Smt.REQUIRE: (Smt.PREFER,), Smt.PREFER: ()}
_MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class Suggestion:
    """One change after which the VM fits."""

    field: str
    """The key of the request in its JSON form, or `moves`."""
    value: Any
    """What that key would have to say; for moves nothing."""
    sentence: str
    request: Request
    """The request so changed."""
    placement: Placement
    """Where the VM would sit then."""
    moves: tuple[Move, ...] = ()
    """Running VMs that have to move first, in this order."""


def find_suggestions(
    topology: Topology,
    free: Free,
    request: Request,
    occupants: Sequence[Occupant] = (),
    *,
    only: int | None = None,
    most_moves: int = 1,
) -> tuple[Suggestion, ...]:
    """Find what would make a refused VM fit, the least change for its user first.

    1. other VMs move (`occupants` are all that run there, `only` is as for `make_room`);
    2. a weaker word: cpu-set, smt, emulator-threads, numa-memory;
    3. less of something: vCPUs, huge pages, memory, the smallest share given up first;
    4. the CPUs are shared.
    """
    trial = _Trial(topology, free, request)
    found = [*trial.scopes(), *trial.words()]
    lesser = [*trial.fewer_vcpus(), *trial.fewer_pages(), *trial.less_memory()]
    found += [suggestion for _, suggestion in sorted(lesser, key=lambda pair: pair[0])]
    found += trial.sharing()
    if occupants and most_moves:
        room = make_room(topology, occupants, request, only=only, most_moves=most_moves)
        if room is not None and room.moves:
            text = ", then ".join(move_text(move) for move in room.moves)
            sentence = f"move {text}, and it fits {where(request, room.placement)}"
            found.insert(0, Suggestion("moves", None, sentence, request, room.placement, room.moves))
    return tuple(found)


def move_text(move: Move) -> str:
    """Write a move for a sentence."""
    before, after = (format_cpu_list(one.cpus | one.owned) for one in (move.before, move.after))
    memory = f" with {about_bytes(move.bytes_moved)} of memory" if move.bytes_moved else ""
    return f"{move.id} from {before} to {after}{memory}"


def where(request: Request, placement: Placement) -> str:
    """Say where a VM lies in the words of its scope."""
    match request.options.scope:
        case Scope.ONE_L3:
            return f"on L3 group {placement.l3_groups[0]}"
        case Scope.ONE_SOCKET | Scope.SPREAD_SOCKETS:
            return _counted("socket", placement.packages)
        case Scope.ONE_NUMA | Scope.SPREAD_NUMA | Scope.ANY:
            return _counted("NUMA node", placement.numa_nodes)


def _counted(noun: str, ids: Sequence[int]) -> str:
    if len(ids) == 1:
        return f"on {noun} {ids[0]}"
    return f"on {noun}s {', '.join(map(str, ids[:-1]))} and {ids[-1]}"


class _Trial:
    """One refused request and what is free for it."""

    def __init__(self, topology: Topology, free: Free, request: Request) -> None:
        self._topology = topology
        self._free = free
        self._request = request
        self._answers: dict[Request, Placement | None] = {}

    def scopes(self) -> Iterator[Suggestion]:
        wider = _SCOPES[_SCOPES.index(self._request.options.scope) + 1 :]
        yield from self._first(
            "cpuSet",
            "cpu-set",
            [replace(self._request, options=replace(self._request.options, scope=word)) for word in wider],
        )

    def words(self) -> Iterator[Suggestion]:
        request = self._request
        yield from self._first(
            "smt",
            "smt",
            [
                replace(request, options=replace(request.options, smt=word))
                for word in _WEAKER_SMT[request.options.smt]
            ],
        )
        if request.options.emulator_threads is EmulatorThreads.ISOLATE:
            shared = replace(
                request, options=replace(request.options, emulator_threads=EmulatorThreads.SHARED)
            )
            yield from self._first("emulatorThreads", "emulator-threads", [shared])
        if request.memory and request.options.numa_memory is not NumaMemory.OFF:
            off = replace(request, options=replace(request.options, numa_memory=NumaMemory.OFF))
            yield from self._first("numaMemory", "numa-memory", [off])

    def sharing(self) -> Iterator[Suggestion]:
        if self._request.options.policy is Policy.EXCLUSIVE:
            shared = replace(self._request, options=replace(self._request.options, policy=Policy.SHARE))
            yield from self._first("policy", "cpu-policy", [shared])

    def fewer_vcpus(self) -> Iterator[tuple[float, Suggestion]]:
        needed = self._request.vcpus

        def with_vcpus(count: int) -> Request:
            return replace(self._request, vcpus=count)

        if self._request.options.scope in (Scope.SPREAD_SOCKETS, Scope.SPREAD_NUMA):
            counts = range(min(needed - 1, self._free.pool.bit_count()), 0, -1)
            best = next((n for n in counts if self._fits(with_vcpus(n))), 0)  # equal shares have gaps
        else:
            best = self._largest(min(needed - 1, self._free.pool.bit_count()), with_vcpus)
        if best:
            what = f"with {counted(best, 'vCPU')}"
            yield (needed - best) / needed, self._suggestion("vcpus", best, what, with_vcpus(best))

    def fewer_pages(self) -> Iterator[tuple[float, Suggestion]]:
        for size, needed in sorted(self._request.huge_pages.items()):
            others = {of: n for of, n in self._request.huge_pages.items() if of != size}

            def with_pages(count: int, size: int = size, others: dict[int, int] = others) -> Request:
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
        paged = sum(size * count for size, count in self._request.huge_pages.items())
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

    def _first(self, field: str, key: str, changed: Sequence[Request]) -> Iterator[Suggestion]:
        """The first of these that fits; the word that has changed is the value."""
        for request in changed:
            if self._fits(request):
                value = next(
                    word.value
                    for word, old in zip(_words(request), _words(self._request), strict=True)
                    if word is not old
                )
                yield self._suggestion(field, value, f"with {key} {value}", request)
                return

    def _largest(self, most: int, changed: Callable[[int], Request]) -> int:
        """The largest amount up to `most` that fits, where more is never easier; 0 when none does."""
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
        """Whether a VM may ask for this, and fits."""
        return contradiction_in(request.options) is None and self._place(request) is not None

    def _suggestion(self, field: str, value: Any, what: str, request: Request) -> Suggestion:
        placement = self._place(request)
        assert placement is not None
        return Suggestion(field, value, f"{what} it fits {where(request, placement)}", request, placement)


def _words(request: Request) -> tuple[Scope | Smt | EmulatorThreads | NumaMemory | Policy, ...]:
    return (
        request.options.scope,
        request.options.smt,
        request.options.emulator_threads,
        request.options.numa_memory,
        request.options.policy,
    )
