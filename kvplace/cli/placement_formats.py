"""Reads who holds which CPUs of a node from every document that kvplace or kubectl prints about it.

answers of `kvplace place -o json`          a line each; their moves and releases are applied
a plan of `kvplace plan -o json` or `yaml`  running VMs after their moves, and the VMs that it places
annotations `kvplace.io/placement`          a line each
a NodeLedger, or a list of them             `kubectl get nodeledgers -o yaml`
pods, or a list of them                     `kubectl get pods -A -o json`, by their annotations
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from kvplace.cli.claims_by_node import ClaimsByNode, NodeClaims, PlacedClaim
from kvplace.core.drawing.occupancy import printable
from kvplace.core.errors import BadAnnotation, BadBody, Corrupt
from kvplace.core.ledger import claim_of, read_ledger
from kvplace.core.node_topology import API_VERSION
from kvplace.core.placement import PLACEMENT, PodPlacement
from kvplace.core.request import Policy
from kvplace.core.scalars import PodUid
from kvplace.core.strict_json import json_object, kind_of, known_keys, shown

FORMATS = (
    "answers of `kvplace place --keep -o json`, a plan of `kvplace plan -o json`, a NodeLedger, "
    f"pods with their annotations, or annotations {PLACEMENT}"
)
_MAX_BYTES = 64 * 1024 * 1024
_ANSWER_KEYS = {"placement", "refusal", "released", "error", "moves", "running", "placed"}

Json = Mapping[str, Any]


def read_placements(source: str, machine: str, fingerprint: str, *, node: str | None = None) -> NodeClaims:
    """Read a file, or stdin for `-`, for the machine of that name and fingerprint; raises BadBody.

    `node` chooses one of several nodes; without it that is the one with the machine's name.
    """
    return read_claims(source, fingerprint).on_node(machine, node)


def read_claims(source: str, fingerprint: str) -> ClaimsByNode:
    """Read the claims on all nodes of a file, or of stdin for `-`; raises BadBody."""
    from kvplace.documents.reading import read_text, source_name

    what = source_name(source)
    reader = _Reader(what, fingerprint)
    documents = list(_documents(read_text(source, what, _MAX_BYTES), what))
    if not documents:
        raise BadBody(f"{what} contains no placements; give {FORMATS}")
    for where, document in documents:
        reader.read(document, where)
    return reader.claims


class _Reader:
    def __init__(self, what: str, fingerprint: str) -> None:
        self._what = what
        self._fingerprint = fingerprint
        self.claims = ClaimsByNode(what)

    def read(self, document: Json, where: str) -> None:
        kind = document.get("kind", "")
        if str(kind).endswith("List") and "items" in document:
            for item, at in self._entries(document, "items", where):
                self.read(item, at)
        elif kind == "Pod":
            self._pod(document, where)
        elif "spec" in document and kind in ("", "NodeLedger"):
            self._ledger(document, where)
        elif "podUid" in document:
            self._vm({"id": document["podUid"], "placement": document}, where)
        elif not _ANSWER_KEYS.isdisjoint(document):
            self._answer(document, where)
        else:
            raise self._bad(where, f"this is not a known form of placements; give {FORMATS}")

    def _answer(self, document: Json, where: str) -> None:
        """Read an answer, or a plan: its running VMs are where they were before its moves."""
        if "released" in document:
            self.claims.release(PodUid(str(document["released"])), where)
        for vm, at in self._entries(document, "running", where):
            self._vm(vm, at)
        for vm, at in self._entries(document, "moves", where):
            moved = self._placement(vm, at)
            self.claims.move(_placed(moved, str(vm.get("id"))), where)
        if "placement" in document:
            self._vm(document, where)
        for vm, at in self._entries(document, "placed", where):
            self._vm(vm, at)

    def _vm(self, vm: Json, where: str) -> None:
        bound = self._placement(vm, where)
        self._add(bound.node, bound, _placed(bound, str(vm.get("id") or where)), where)

    def _placement(self, vm: Json, where: str) -> PodPlacement:
        placement = vm.get("placement")
        if not isinstance(placement, Mapping):
            raise self._bad(where, f"placement must be a mapping, not {kind_of(placement)}")
        return self._parsed(json.dumps(placement), where)

    def _parsed(self, text: str, where: str) -> PodPlacement:
        try:
            return PodPlacement.from_json(text)
        except BadAnnotation as error:
            raise self._bad(where, f"the placement {error.fix}") from None

    def _ledger(self, document: Json, where: str) -> None:
        spec, metadata = document["spec"], document.get("metadata")
        version = document.get("apiVersion", API_VERSION)
        if version != API_VERSION:
            raise self._bad(where, f"apiVersion is {shown(version)}; it must be {API_VERSION}")
        try:
            ledger = read_ledger({} if spec is None else spec)
            known_keys(spec or {}, ("owners", "claims"))
        except Corrupt as error:
            raise self._bad(where, str(error)) from None
        except BadBody as error:
            raise self._bad(where, f"spec: {error}") from None
        self.claims.add_ledger(str(metadata.get("name", "")) if isinstance(metadata, Mapping) else "", ledger)

    def _pod(self, document: Json, where: str) -> None:
        import msgspec

        from kvplace.kube.objects import PodObject, pod_record

        try:
            # As text again: much of a pod stays text until it is needed.
            pod = pod_record(msgspec.json.decode(msgspec.json.encode(document), type=PodObject))
        except msgspec.ValidationError as error:
            raise self._bad(where, f"is not a valid Pod: {str(error).replace('`', '')}") from None
        if pod.phase in ("Succeeded", "Failed") or not (pod.placement or pod.cpu_map):
            return
        if pod.placement:
            bound = self._parsed(pod.placement, where)
        else:
            try:
                bound = PodPlacement.of_cpu_map(pod.cpu_map)
            except BadAnnotation as error:
                raise self._bad(where, f"the cpu-map {error.fix}") from None
        uid = pod.uid or where
        if bound.pod_uid not in ("", uid):
            name = printable(pod.name or uid)
            self.claims.note(where, f"pod {name} carries the placement of another pod; it is left out")
            return
        placed = _placed(bound, uid, namespace=pod.namespace, pod=pod.name, vmi=pod.vmi)
        self._add(bound.node or pod.node, bound, placed, where)

    def _add(self, node: str, bound: PodPlacement, placed: PlacedClaim, where: str) -> None:
        """Add a VM, unless it runs unpinned."""
        if not bound.placement.floats:
            other = bound.topology not in ("", self._fingerprint)
            self.claims.add(node, placed, where, other_machine=other)

    def _entries(self, document: Json, key: str, where: str) -> Iterator[tuple[Json, str]]:
        """Yield the mappings of a list, and where each stands."""
        entries = document.get(key, [])
        if not isinstance(entries, list):
            raise self._bad(where, f"{key} must be a list, not {kind_of(entries)}")
        for number, entry in enumerate(entries):
            at = f"{where} {key}[{number}]".lstrip()
            if not isinstance(entry, Mapping):
                raise self._bad(at, f"must be a mapping, not {kind_of(entry)}")
            yield entry, at

    def _bad(self, where: str, sentence: str) -> BadBody:
        return BadBody(f"{self._what}: {where}: {sentence}" if where else f"{self._what}: {sentence}")


def _placed(
    bound: PodPlacement, uid: str, *, namespace: str = "", pod: str = "", vmi: str = ""
) -> PlacedClaim:
    """Make the claim of a placement; a bare cpu-map does not state which CPUs are owned."""
    placement = bound.placement
    if placement.policy is Policy.EXCLUSIVE and not placement.owned:
        placement = replace(placement, owned=placement.cpus)
    claim = claim_of(PodUid(uid or "unnamed"), placement, namespace=namespace, pod=pod, vmi=vmi)
    return PlacedClaim(claim, placement)


def _documents(text: str, what: str) -> Iterator[tuple[str, Json]]:
    """Split a text: a JSON object on each line, or one document in JSON or YAML."""
    from kvplace.documents.reading import read_document

    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if len(lines) > 1 and _is_object(lines[0][1]):
        for number, line in lines:
            yield f"line {number}", json_object(line, what=f"{what}: line {number}")
    elif lines:
        yield "", read_document(text, what)


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
