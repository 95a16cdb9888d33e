"""Requests for one machine, answered one after the other as the extender would answer them.

The form of requests and answers is a stable interface for other programs. A line that is wrong gets an
error for an answer and takes nothing; the lines after it are answered all the same.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias, TypeVar

from kvplace.core import offered
from kvplace.core.allocate import place
from kvplace.core.cpu_map import write_cpu_map
from kvplace.core.cpuset import cpus_of, format_cpu_list, parse_cpu_list
from kvplace.core.errors import BadBody
from kvplace.core.free import free_of
from kvplace.core.ledger import Claim, ClaimState, Ledger, LedgerChange
from kvplace.core.placement import Placement, PodPlacement
from kvplace.core.quantity import parse_bytes
from kvplace.core.refusal import Refusal
from kvplace.core.request import (
    MAX_VCPUS,
    EmulatorThreads,
    GuestNuma,
    NumaMemory,
    OnFailure,
    Policy,
    Request,
    Scope,
    Smt,
)
from kvplace.core.topology import Topology

Json: TypeAlias = dict[str, Any]

_REQUEST_KEYS = (
    "id", "vcpus", "cpuSet", "policy", "smt", "emulatorThreads", "numaMemory", "guestNuma", "onFailure",
    "memory", "hugepages", "ioThreads", "free",
)  # fmt: skip
_POLICIES = tuple(policy for policy in offered.POLICIES if policy is not Policy.NONE)
_Word = TypeVar("_Word", bound=Enum)


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
            wish = _object(line)
            name = _id(wish, "release" if "release" in wish else "id")
            return self._release(wish, name) if "release" in wish else self._place(wish, name)
        except BadBody as error:
            document = {"id": name, "error": str(error)} if name else {"error": str(error)}
            return Answer(Outcome.WRONG, document, f"{name or 'request'}: {error}")

    def _place(self, wish: Json, name: str) -> Answer:
        _known_keys(wish, _REQUEST_KEYS)
        self._asked += 1
        uid = name or f"request-{self._asked}"
        if self._keep and uid in self._ledger.claims:
            raise BadBody(f"id {uid!r} holds CPUs already; release it first, or use another id")
        request = request_of(wish)
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
        _known_keys(wish, ("release",))
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


def request_of(wish: Mapping[str, Any]) -> Request:
    """Read a request from its JSON form, where all but `vcpus` may be left out; raises BadBody."""
    vcpus = _number(wish, "vcpus", MAX_VCPUS)
    if not vcpus:
        raise BadBody("vcpus is missing or 0; say how many vCPUs the VM has")
    return Request(
        vcpus=vcpus,
        scope=_word(wish, "cpuSet", Scope.ONE_SOCKET, offered.SCOPES),
        policy=_word(wish, "policy", Policy.EXCLUSIVE, _POLICIES),
        smt=_word(wish, "smt", Smt.PREFER, tuple(Smt)),
        emulator_threads=_word(wish, "emulatorThreads", EmulatorThreads.SHARED, tuple(EmulatorThreads)),
        numa_memory=_word(wish, "numaMemory", NumaMemory.PREFERRED, tuple(NumaMemory)),
        guest_numa=_word(wish, "guestNuma", GuestNuma.OFF, offered.GUEST_NUMAS),
        on_failure=_word(wish, "onFailure", OnFailure.WAIT, tuple(OnFailure)),
        memory=_bytes(wish.get("memory", 0), "memory"),
        huge_pages=_huge_pages(wish),
        io_threads=_number(wish, "ioThreads", 65535),
    )


def placement_document(machine: str, topology: Topology, placement: Placement, *, uid: str = "") -> Json:
    """Write a placement: the annotation `kvplace.io/placement` of a pod of that UID, and where it lies."""
    bound = PodPlacement.of(
        placement, pod_uid=uid, node=machine, topology=topology.fingerprint, on_failure=OnFailure.WAIT
    )
    document: Json = json.loads(bound.to_json())
    document["sockets"] = list(placement.packages)
    document["l3"] = list(placement.l3_groups)
    document["cpuMap"] = json.loads(
        write_cpu_map(topology, placement.vcpus or tuple(cpus_of(placement.cpus)))
    )
    return document


def refusal_document(refusal: Refusal) -> Json:
    """Write a refusal with its numbers."""
    return {
        "reason": refusal.reason.value,
        "message": refusal.message,
        "shortfall": dict(refusal.shortfall),
        "never": refusal.never,
    }


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


def _object(line: str) -> Json:
    try:
        wish = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadBody(f"the line is no JSON: {error}") from None
    if not isinstance(wish, dict):
        raise BadBody(f'the line must be a JSON object such as {{"vcpus": 8}}, not {type(wish).__name__}')
    return wish


def _id(wish: Json, key: str) -> str:
    value = wish.get(key, "")
    if not isinstance(value, str) or len(value) > 256 or (key in wish and not value):
        raise BadBody(f"{key} must be a text of 1 to 256 characters")
    return value


def _known_keys(wish: Json, known: tuple[str, ...]) -> None:
    for key in wish:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise BadBody(f"{key[:60]!r} is not known; {hint}")


def _word(wish: Mapping[str, Any], key: str, default: _Word, words: tuple[_Word, ...]) -> _Word:
    value = wish.get(key, default.value)
    for word in words:
        if word.value == value:
            return word
    everything = [str(word.value) for word in type(default)]
    unknown = "is not offered by this version" if value in everything else "is not known"
    raise BadBody(f"{key}: {value!r} {unknown}; it must be one of {', '.join(str(w.value) for w in words)}")


def _number(wish: Mapping[str, Any], key: str, most: int) -> int:
    value = wish.get(key, 0)
    if type(value) is not int or not 0 <= value <= most:
        raise BadBody(f"{key} is {value!r}; it must be a whole number up to {most}")
    return value


def _huge_pages(wish: Mapping[str, Any]) -> dict[int, int]:
    pages = wish.get("hugepages", {})
    if not isinstance(pages, dict):
        raise BadBody('hugepages must be an object of counts by page size such as {"1Gi": 8}')
    found: dict[int, int] = {}
    for size in pages:
        number = _number(pages, size, 1 << 40)
        page = _bytes(size, "hugepages")
        if not page:
            raise BadBody(f"hugepages: {size!r} is no page size; write 2Mi or 1Gi")
        if number:
            found[page] = found.get(page, 0) + number
    return found


def _bytes(value: object, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise BadBody(f"{key} is {value!r}; it must be a quantity such as 8Gi")
    try:
        count = parse_bytes(value)
    except ValueError as error:
        raise BadBody(f"{key}: {error}") from None
    if count > 1 << 60:
        raise BadBody(f"{key}: {value!r} is more than 1Ei")
    return count


def _listed(ids: tuple[int, ...]) -> str:
    return ",".join(str(number) for number in ids)
