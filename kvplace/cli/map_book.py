"""Reading who has which CPUs of a machine, in any form in which that is written down.

    answers of `kvplace place --keep -o json`    a line each; releases and moves count
    a NodeLedger, or a list of them              as `kubectl get nodeledger -o yaml` prints it
    pods, or a list of them                      by their annotations, as `kubectl get pods -o json` has them
    annotations `kvplace.io/placement`           a line each
    what `kvplace plan -o json` or yaml prints   running VMs after their moves, and those it places

Books that contradict themselves are read all the same: the map is where one sees it.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvplace.core.cpu_map import CPU_MAP
from kvplace.core.cpuset import cpus_of, parse_cpu_list
from kvplace.core.drawing.occupancy import printable
from kvplace.core.errors import BadAnnotation, BadBody, Corrupt
from kvplace.core.ledger import Claim, ClaimState, Ledger, read_ledger
from kvplace.core.occupant import claim_of
from kvplace.core.placement import PLACEMENT, PodPlacement
from kvplace.core.request import Policy
from kvplace.core.strict_json import json_object, kind_of

FORMS = (
    "lines of `kvplace place --keep -o json`, a plan of `kvplace plan -o json`, a NodeLedger, "
    f"pods with their annotations, or annotations {PLACEMENT}, a line each"
)
_MOST_BYTES = 64 * 1024 * 1024
_ANSWERS = ("placement", "refusal", "released", "error", "moves")

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Book:
    """Who has what, and what the reader should know about how it was read."""

    ledger: Ledger
    notes: tuple[str, ...] = ()

    def claim_of(self, name: str) -> Claim:
        """Find a VM by its id, pod or VMI, with or without its namespace; raises BadBody."""
        called: dict[str, list[Claim]] = {}
        for claim in self.ledger.claims.values():
            names = {claim.uid, claim.pod, claim.vmi}
            for known in names | {f"{claim.namespace}/{known}" for known in names}:
                called.setdefault(known, []).append(claim)
        claims = called.get(name, []) if name else []
        if len(claims) == 1:
            return claims[0]
        if claims:
            uids = ", ".join(claim.uid for claim in claims)
            raise BadBody(f"{printable(name)!r} is the name of several; name one of them by its UID: {uids}")
        near = difflib.get_close_matches(name, called, n=1)
        hint = f"; did you mean {printable(near[0])!r}?" if near else ""
        raise BadBody(f"{printable(name)[:60]!r} has no CPUs in --placements{hint}")


def read_book(source: str, machine: str, fingerprint: str, *, node: str | None = None) -> Book:
    """Read a file, or stdin for `-`, for the machine of that name and fingerprint.

    `node` says which of several nodes is meant; without it that is the one with the machine's name. Raises
    BadBody, also when the text has nothing on that node.
    """
    what = "--placements" if source == "-" else f"--placements {source}"
    from kvplace.simulate.documents import read_text

    reader = _Reader(what, fingerprint)
    for where, document in _documents(read_text(source, what, _MOST_BYTES), what):
        reader.read(document, where)
    return reader.book(machine, node)


@dataclass(slots=True)
class _Node:
    claims: dict[str, Claim] = field(default_factory=dict)
    owners: dict[int, str] = field(default_factory=dict)
    elsewhere: int = 0
    """How many placements were made for a machine with another fingerprint."""


class _Reader:
    def __init__(self, what: str, fingerprint: str) -> None:
        self._what = what
        self._fingerprint = fingerprint
        self._nodes: dict[str, _Node] = {}
        self._notes: list[str] = []

    def read(self, document: Json, where: str) -> None:
        items = document.get("items")
        if str(document.get("kind", "")).endswith("List") and isinstance(items, list):
            for number, item in enumerate(items):
                self.read(self._object(item, f"items[{number}]"), f"items[{number}]")
        elif "spec" in document and document.get("kind", "NodeLedger") == "NodeLedger":
            self._ledger(document, where)
        elif document.get("kind") == "Pod":
            self._pod(document, where)
        elif "placed" in document:
            self._plan(document, where)
        elif any(key in document for key in _ANSWERS):
            self._answer(document, where)
        elif "podUid" in document:
            placement = self._placement(document, where)
            self._take(placement.node, placement, _claim(placement, placement.pod_uid or where), where)
        else:
            raise self._bad(where, f"is nothing that says who has which CPUs; give {FORMS}")

    def book(self, machine: str, wanted: str | None) -> Book:
        chosen = self._chosen(machine) if wanted is None else self._named(wanted)
        nodes = [self._nodes[name] for name in dict.fromkeys((chosen, "")) if name in self._nodes]
        elsewhere = sum(node.elsewhere for node in nodes)
        if elsewhere:
            self._notes.append(
                f"{elsewhere} placements were made for a machine with another fingerprint than this one"
            )
        claims: dict[str, Claim] = {}
        owners: dict[int, str] = {}
        for node in nodes:
            claims |= node.claims
            owners |= node.owners
        return Book(Ledger(owners, claims), tuple(self._notes))

    def _chosen(self, machine: str) -> str:
        named = sorted(filter(None, self._nodes))
        chosen = machine if machine in named or not named else named[0]
        if chosen != machine and len(named) > 1:
            raise BadBody(
                f"{self._what} is about the nodes {_few(named)}, none of them called {machine}; "
                "say with --node which one to draw"
            )
        if chosen != machine:
            self._notes.append(f"{self._what} is about node {printable(chosen)}, drawn on {machine}")
        if len(named) > 1:
            self._notes.append(f"{self._what} is also about {len(named) - 1} other nodes, which are left out")
        return chosen

    def _named(self, name: str) -> str:
        named = sorted(filter(None, self._nodes))
        if name in named:
            return name
        near = difflib.get_close_matches(name, named, n=1)
        if near:
            hint = f"did you mean {printable(near[0])!r}?"
        else:
            hint = f"it is about {_few(named)}" if named else "it names no node; leave out --node"
        raise BadBody(f"{self._what} says of no VM on a node {printable(name)[:60]!r}; {hint}")

    def _ledger(self, document: Json, where: str) -> None:
        spec = document.get("spec")
        try:
            ledger = read_ledger({} if spec is None else spec)
        except Corrupt as error:
            raise self._bad(where, str(error)) from None
        name = self._object(document.get("metadata") or {}, f"{where} metadata").get("name", "")
        node = self._nodes.setdefault(str(name), _Node())
        node.claims |= ledger.claims
        node.owners |= ledger.owners

    def _pod(self, document: Json, where: str) -> None:
        metadata = self._object(document.get("metadata") or {}, f"{where} metadata")
        annotations = self._object(metadata.get("annotations") or {}, f"{where} annotations")
        status = self._object(document.get("status") or {}, f"{where} status")
        if status.get("phase") in ("Succeeded", "Failed"):
            return
        if PLACEMENT in annotations:
            placement = self._parsed(str(annotations[PLACEMENT]), where)
        elif CPU_MAP in annotations:
            placement = self._of_cpu_map(str(annotations[CPU_MAP]), where)
        else:
            return
        if placement.floats:
            return
        uid = str(metadata.get("uid") or where)
        if placement.pod_uid not in ("", uid):
            name = printable(str(metadata.get("name", uid)))
            self._notes.append(f"{where}: pod {name} carries the placement of another pod; it is left out")
            return
        spec = self._object(document.get("spec") or {}, f"{where} spec")
        claim = _claim(placement, uid)
        claim = replace(
            claim,
            namespace=str(metadata.get("namespace", "")),
            pod=str(metadata.get("name", claim.uid)),
            vmi=_owning_vmi(metadata.get("ownerReferences")),
        )
        self._take(placement.node or str(spec.get("nodeName", "")), placement, claim, where)

    def _plan(self, document: Json, where: str) -> None:
        """Running VMs stand in a plan where they are before its moves, placed ones as they will be after."""
        self._seats(document, "running", where)
        self._moves(document, where)
        self._seats(document, "placed", where)

    def _seats(self, document: Json, key: str, where: str) -> None:
        for number, vm in enumerate(self._list(document, key, where)):
            at = f"{where} {key}[{number}]".lstrip()
            self._seat(self._object(vm, at), at)

    def _seat(self, vm: Json, where: str) -> None:
        placement = self._placement(self._object(vm.get("placement"), f"{where} placement".lstrip()), where)
        self._take(placement.node, placement, _claim(placement, str(vm.get("id") or where)), where)

    def _answer(self, document: Json, where: str) -> None:
        if "released" in document:
            self._release(str(document["released"]), where)
        self._moves(document, where)
        if "placement" in document:
            self._seat(document, where)

    def _release(self, uid: str, where: str) -> None:
        nodes = [node for node in self._nodes.values() if uid in node.claims]
        if not nodes:
            self._notes.append(f"{where}: {printable(uid)!r} is released and had nothing")
        for node in nodes:
            self._drop(node, uid)

    def _moves(self, document: Json, where: str) -> None:
        for move in self._list(document, "moves", where):
            self._move(self._object(move, f"{where} move".lstrip()), where)

    def _move(self, move: Json, where: str) -> None:
        uid = str(move.get("id"))
        node = next((node for node in self._nodes.values() if uid in node.claims), None)
        if node is None:
            self._notes.append(f"{where}: {printable(uid)!r} is moved and had nothing")
            return
        claim = node.claims[uid]
        if "placement" in move:
            moved = self._placement(self._object(move["placement"], f"{where} move"), where)
            after = replace(_claim(moved, uid), namespace=claim.namespace, pod=claim.pod, vmi=claim.vmi)
        else:
            cpus = self._cpus(move.get("to"), where)
            after = replace(claim, cpus=cpus, owned=cpus if claim.owned else 0)
        self._drop(node, uid)
        self._put(node, after)

    def _take(self, name: str, placement: PodPlacement, claim: Claim, where: str) -> None:
        node = self._nodes.setdefault(name, _Node())
        node.elsewhere += bool(placement.topology) and placement.topology != self._fingerprint
        if claim.uid in node.claims:
            self._notes.append(
                f"{where}: {printable(claim.uid)!r} is placed again without a release; both are drawn"
            )
            claim = replace(claim, uid=f"{claim.uid} ({where})", pod=f"{claim.pod} ({where})")
        self._put(node, claim)

    def _put(self, node: _Node, claim: Claim) -> None:
        node.claims[claim.uid] = claim
        for cpu in cpus_of(claim.owned):
            node.owners.setdefault(cpu, claim.uid)

    def _drop(self, node: _Node, uid: str) -> None:
        del node.claims[uid]
        node.owners = {cpu: owner for cpu, owner in node.owners.items() if owner != uid}
        for claim in node.claims.values():
            for cpu in cpus_of(claim.owned):
                node.owners.setdefault(cpu, claim.uid)

    def _placement(self, document: Json, where: str) -> PodPlacement:
        return self._parsed(json.dumps(document, default=str), where)

    def _parsed(self, text: str, where: str) -> PodPlacement:
        try:
            return PodPlacement.from_json(text)
        except BadAnnotation as error:
            raise self._bad(where, f"the placement {error.mend}") from None

    def _of_cpu_map(self, text: str, where: str) -> PodPlacement:
        try:
            return PodPlacement.of_cpu_map(text)
        except BadAnnotation as error:
            raise self._bad(where, f"the {CPU_MAP} {error.mend}") from None

    def _cpus(self, value: object, where: str) -> int:
        try:
            return parse_cpu_list(value if isinstance(value, str) else repr(value), what="to")
        except ValueError as error:
            raise self._bad(where, str(error)) from None

    def _object(self, value: object, where: str) -> Json:
        if not isinstance(value, Mapping):
            raise self._bad(where, f"is no object but {kind_of(value)}")
        return value

    def _list(self, document: Json, key: str, where: str) -> list[object]:
        value = document.get(key, [])
        if not isinstance(value, list):
            raise self._bad(where, f"{key} must be a list")
        return value

    def _bad(self, where: str, mend: str) -> BadBody:
        return BadBody(f"{self._what}: {f'{where}: ' if where else ''}{mend}")


def _claim(placement: PodPlacement, uid: str) -> Claim:
    alone = placement.policy is Policy.EXCLUSIVE
    owned = placement.owned or (placement.cpus if alone else 0)
    return replace(claim_of(uid, placement), state=ClaimState.BOUND, owned=owned)


def _few(names: list[str]) -> str:
    return ", ".join(map(printable, names[:5])) + (" and others" if len(names) > 5 else "")


def _owning_vmi(references: object) -> str:
    for reference in references if isinstance(references, list) else ():
        if isinstance(reference, Mapping) and reference.get("kind") == "VirtualMachineInstance":
            return str(reference.get("name", ""))
    return ""


def _documents(text: str, what: str) -> Iterator[tuple[str, Json]]:
    """Take a text apart: a JSON object on each line, or one document in JSON or YAML."""
    from kvplace.simulate.documents import read_document

    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        return
    if len(lines) == 1 or not _is_object(lines[0][1]):
        yield "", read_document(text, what).keys
        return
    for number, line in lines:
        yield f"line {number}", json_object(line, what=f"{what}: line {number}")


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def read_found(texts: Iterable[str], book: Book) -> dict[str, int]:
    """Read `--found VM=CPUS`, once for each VM, by the UID of its claim; raises BadBody."""
    found: dict[str, int] = {}
    for text in texts:
        name, equals, cpus = text.rpartition("=")
        if not equals:
            raise BadBody(f"--found {printable(text)[:60]!r} is not of the form VM=CPUS, for instance db=4-7")
        try:
            claim = book.claim_of(name)
            found[claim.uid] = found.get(claim.uid, 0) | parse_cpu_list(cpus, what="CPUs")
        except (BadBody, ValueError) as error:
            raise BadBody(f"--found: {error}") from None
    return found
