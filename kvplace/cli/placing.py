"""Requests for one machine, answered one after the other as the extender would answer them.

The form of requests and answers is a stable interface for other programs. A line that is wrong gets an
error for an answer and takes nothing; the lines after it are answered all the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvplace.core.allocate import place
from kvplace.core.answer_json import placement_document, refusal_document
from kvplace.core.cpuset import format_cpu_list, parse_cpu_list
from kvplace.core.errors import BadBody
from kvplace.core.free import free_of
from kvplace.core.ledger import Claim, ClaimState, Ledger, LedgerChange
from kvplace.core.placement import Placement
from kvplace.core.refusal import Refusal
from kvplace.core.request_json import Json, id_of, json_object, known_keys, request_of
from kvplace.core.topology import Topology


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

    def __init__(self, name: str, topology: Topology, *, free: int | None = None, keep: bool = False) -> None:
        self._name = name
        self._topology = topology
        self._free = free
        self._keep = keep
        self._ledger = Ledger()
        self._asked = 0

    def answer(self, line: str) -> Answer:
        """Answer one line of JSON."""
        name = ""
        try:
            wish = json_object(line, what="the line")
            name = id_of(wish, "release" if "release" in wish else "id")
            return self._release(wish, name) if "release" in wish else self._place(wish, name)
        except BadBody as error:
            document = {"id": name, "error": str(error)} if name else {"error": str(error)}
            return Answer(Outcome.WRONG, document, f"{name or 'request'}: {error}")

    def _place(self, wish: Json, name: str) -> Answer:
        self._asked += 1
        uid = name or f"request-{self._asked}"
        if self._keep and uid in self._ledger.claims:
            raise BadBody(f"id {uid!r} holds CPUs already; release it first, or use another id")
        request = request_of(wish, also=("id", "free"))
        only = self._cpus(wish["free"]) if "free" in wish else self._free
        found = place(self._topology, free_of(self._topology, self._ledger, only=only), request)
        document: Json = {"id": name} if name else {}
        if isinstance(found, Refusal):
            document["refusal"] = refusal_document(found)
            return Answer(Outcome.REFUSED, document, f"{uid}: {found.message}")
        if self._keep:
            self._ledger = self._ledger.after(LedgerChange(claims=(_claim(uid, found),)))
        document["placement"] = placement_document(self._name, self._topology, found, uid=name)
        where = (
            f"socket {_listed(found.packages)}, NUMA node {_listed(found.numa_nodes)}, "
            f"L3 {_listed(found.l3_groups)}"
        )
        return Answer(Outcome.PLACED, document, f"{uid}: CPUs {_listed(found.vcpus)} ({where})")

    def _release(self, wish: Json, name: str) -> Answer:
        known_keys(wish, ("release",))
        if not self._keep:
            raise BadBody("nothing is kept, so nothing can be released; call with --keep")
        claim = self._ledger.claims.get(name)
        if claim is None:
            raise BadBody(f"id {name!r} holds nothing")
        self._ledger = self._ledger.after(LedgerChange(releases=(name,)))
        cpus = format_cpu_list(claim.cpus | claim.owned)
        return Answer(Outcome.RELEASED, {"released": name, "cpus": cpus}, f"{name}: released CPUs {cpus}")

    def _cpus(self, value: object) -> int:
        if not isinstance(value, str):
            raise BadBody(f"free is {value!r}; it must be a CPU list such as '0-15,32-47'")
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


def _claim(uid: str, placement: Placement) -> Claim:
    return Claim(
        uid=uid,
        namespace="",
        pod=uid,
        vmi="",
        policy=placement.policy,
        state=ClaimState.CLAIMED,
        cpus=placement.cpus,
        owned=placement.owned,
        memory=placement.memory,
        huge_pages=placement.huge_pages,
        since="",
    )


def _listed(ids: tuple[int, ...]) -> str:
    return ",".join(str(number) for number in ids)
