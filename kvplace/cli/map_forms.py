"""Reading who has which CPUs of a machine, in any form in which that is written down.

answers of `kvplace place --keep -o json`    a line each; releases and moves count
a NodeLedger, or a list of them              as `kubectl get nodeledger -o yaml` prints it
pods, or a list of them                      by their annotations, as `kubectl get pods -o json` has them
annotations `kvplace.io/placement`           a line each
what `kvplace plan -o json` or yaml prints   running VMs after their moves, and those it places
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from kvplace.cli.map_book import Book, NodeBooks
from kvplace.core.cpu_map import CPU_MAP
from kvplace.core.cpuset import parse_cpu_list
from kvplace.core.drawing.occupancy import printable
from kvplace.core.errors import BadAnnotation, BadBody, Corrupt
from kvplace.core.ledger import Claim, ClaimState, claim_of, read_ledger
from kvplace.core.placement import PLACEMENT, PodPlacement
from kvplace.core.request import Policy
from kvplace.core.strict_json import json_object, kind_of

FORMS = (
    "lines of `kvplace place --keep -o json`, a plan of `kvplace plan -o json`, a NodeLedger, "
    f"pods with their annotations, or annotations {PLACEMENT}, a line each"
)
_MOST_BYTES = 64 * 1024 * 1024
_UNNAMED = "unnamed"
_ANSWERS = ("placement", "refusal", "released", "error", "moves")

Json = Mapping[str, Any]


def read_book(source: str, machine: str, fingerprint: str, *, node: str | None = None) -> Book:
    """Read a file, or stdin for `-`, for the machine of that name and fingerprint.

    `node` says which of several nodes is meant; without it that is the one with the machine's name. Raises
    BadBody, also when the text has nothing on that node.
    """
    what = "--placements" if source == "-" else f"--placements {source}"
    from kvplace.documents.reading import read_text

    reader = _Reader(what, fingerprint)
    for where, document in _documents(read_text(source, what, _MOST_BYTES), what):
        reader.read(document, where)
    return reader.nodes.book(machine, node)


class _Reader:
    def __init__(self, what: str, fingerprint: str) -> None:
        self._what = what
        self._fingerprint = fingerprint
        self.nodes = NodeBooks(what)

    def read(self, document: Json, where: str) -> None:
        items = document.get("items")
        if str(document.get("kind", "")).endswith("List") and isinstance(items, list):
            for number, item in enumerate(items):
                at = f"items[{number}]"
                self.read(self._object(item, at), at)
        elif "spec" in document and document.get("kind", "NodeLedger") == "NodeLedger":
            self._ledger(document, where)
        elif document.get("kind") == "Pod":
            self._pod(document, where)
        elif "placed" in document:
            self._plan(document, where)
        elif any(key in document for key in _ANSWERS):
            self._answer(document, where)
        elif "podUid" in document:
            self._annotation(document, where)
        else:
            raise self._bad(where, f"is nothing that says who has which CPUs; give {FORMS}")

    def _ledger(self, document: Json, where: str) -> None:
        spec = document.get("spec")
        try:
            ledger = read_ledger({} if spec is None else spec)
        except Corrupt as error:
            raise self._bad(where, str(error)) from None
        name = self._object(document.get("metadata") or {}, where, "metadata").get("name", "")
        self.nodes.add(str(name), ledger)

    def _pod(self, document: Json, where: str) -> None:
        metadata = self._object(document.get("metadata") or {}, where, "metadata")
        annotations = self._object(metadata.get("annotations") or {}, where, "annotations")
        status = self._object(document.get("status") or {}, where, "status")
        if status.get("phase") in ("Succeeded", "Failed"):
            return
        if PLACEMENT in annotations:
            bound = self._parsed(str(annotations[PLACEMENT]), where)
        elif CPU_MAP in annotations:
            bound = self._of_cpu_map(str(annotations[CPU_MAP]), where)
        else:
            return
        uid = str(metadata.get("uid") or where)
        if bound.pod_uid not in ("", uid):
            name = printable(str(metadata.get("name", uid)))
            self.nodes.note(where, f"pod {name} carries the placement of another pod; it is left out")
            return
        spec = self._object(document.get("spec") or {}, where, "spec")
        claim = _claim(bound, uid)
        claim = replace(
            claim,
            namespace=str(metadata.get("namespace", "")),
            pod=str(metadata.get("name", claim.uid)),
            vmi=_owning_vmi(metadata.get("ownerReferences")),
        )
        self._take(bound.node or str(spec.get("nodeName", "")), bound, claim, where)

    def _annotation(self, document: Json, where: str) -> None:
        bound = self._placement(document, where)
        self._take(bound.node, bound, _claim(bound, bound.pod_uid or where), where)

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
        bound = self._placement(self._object(vm.get("placement"), where, "placement"), where)
        self._take(bound.node, bound, _claim(bound, str(vm.get("id") or where)), where)

    def _answer(self, document: Json, where: str) -> None:
        if "released" in document:
            self.nodes.release(str(document["released"]), where)
        self._moves(document, where)
        if "placement" in document:
            self._seat(document, where)

    def _moves(self, document: Json, where: str) -> None:
        for move in self._list(document, "moves", where):
            self._move(self._object(move, where, "move"), where)

    def _move(self, move: Json, where: str) -> None:
        uid = str(move.get("id"))
        claim = self.nodes.claim_of(uid)
        if claim is None:
            self.nodes.note(where, f"{printable(uid)!r} is moved and had nothing")
        elif "placement" in move:
            moved = self._placement(self._object(move["placement"], where, "move"), where)
            named = replace(_claim(moved, uid), namespace=claim.namespace, pod=claim.pod, vmi=claim.vmi)
            self.nodes.move(named)
        else:
            cpus = self._cpus(move.get("to"), where)
            self.nodes.move(replace(claim, cpus=cpus, owned=cpus if claim.owned else 0))

    def _take(self, name: str, bound: PodPlacement, claim: Claim, where: str) -> None:
        """Seat a VM, unless its placement says that it runs unpinned."""
        if not bound.placement.floats:
            elsewhere = bound.topology not in ("", self._fingerprint)
            self.nodes.take(name, claim, where, elsewhere=elsewhere)

    def _placement(self, document: Json, where: str) -> PodPlacement:
        return self._parsed(json.dumps(document), where)

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

    def _object(self, value: object, *where: str) -> Json:
        if not isinstance(value, Mapping):
            raise self._bad(" ".join(filter(None, where)), f"is no object but {kind_of(value)}")
        return value

    def _list(self, document: Json, key: str, where: str) -> list[object]:
        value = document.get(key, [])
        if not isinstance(value, list):
            raise self._bad(where, f"{key} must be a list")
        return value

    def _bad(self, where: str, mend: str) -> BadBody:
        return BadBody(f"{self._what}: {f'{where}: ' if where else ''}{mend}")


def _claim(bound: PodPlacement, uid: str) -> Claim:
    placement = bound.placement
    alone = placement.policy is Policy.EXCLUSIVE
    owned = placement.owned or (placement.cpus if alone else 0)
    return replace(claim_of(uid or _UNNAMED, placement, state=ClaimState.BOUND), owned=owned)


def _owning_vmi(references: object) -> str:
    for reference in references if isinstance(references, list) else ():
        if isinstance(reference, Mapping) and reference.get("kind") == "VirtualMachineInstance":
            return str(reference.get("name", ""))
    return ""


def _documents(text: str, what: str) -> Iterator[tuple[str, Json]]:
    """Take a text apart: a JSON object on each line, or one document in JSON or YAML."""
    from kvplace.documents.reading import read_document

    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        return
    if len(lines) == 1 or not _is_object(lines[0][1]):
        yield "", read_document(text, what)
        return
    for number, line in lines:
        yield f"line {number}", json_object(line, what=f"{what}: line {number}")


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
