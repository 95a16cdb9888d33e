"""Claims collected node by node from answers, plans, ledgers and pods, and the node that `kvplace map` draws.

Claims that contradict each other are kept: the map is where one sees them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from kvplace.core.cpuset import cpus_of
from kvplace.core.drawing.occupancy import printable
from kvplace.core.errors import BadAnnotation, BadBody, Corrupt
from kvplace.core.ledger import Claim, Ledger, claim_of, read_ledger
from kvplace.core.node_topology import API_VERSION
from kvplace.core.placement import Placement, PodPlacement
from kvplace.core.quantity import counted
from kvplace.core.request import Policy
from kvplace.core.scalars import CpuId, PodUid
from kvplace.core.strict_json import Json, did_you_mean, json_object, kind_of, known_keys, shown
from kvplace.core.well_known_names import PLACEMENT

if TYPE_CHECKING:
    from kvplace.kube.object_records import PodRecord


FORMATS = (
    "answers of `kvplace place --keep -o json`, a plan of `kvplace plan -o json`, a NodeLedger, "
    f"pods with their annotations, or annotations {PLACEMENT}"
)
_MAX_BYTES = 64 * 1024 * 1024
_ANSWER_KEYS = {"placement", "refusal", "released", "error", "moves", "running", "placed"}


@dataclass(frozen=True, slots=True)
class NodeClaims:
    """The claims on one node, and notes for the reader."""

    ledger: Ledger
    notes: tuple[str, ...] = ()
    placements: Mapping[PodUid, Placement] = field(default_factory=lambda: MappingProxyType({}))
    """By the UIDs of the claims that were made from placements, which state more than a ledger."""

    def find(self, name: str) -> Claim:
        """Find a claim by id, pod, VMI or UID, with or without the namespace; raises BadBody."""
        by_name: dict[str, list[Claim]] = {}
        for claim in self.ledger.claims.values():
            names = {claim.uid, claim.pod, claim.vmi}
            for each in names | {f"{claim.namespace}/{each}" for each in names}:
                by_name.setdefault(each, []).append(claim)
        claims = by_name.get(name, []) if name else []
        if len(claims) == 1:
            return claims[0]
        if claims:
            uids = ", ".join(claim.uid for claim in claims)
            raise BadBody(f"{printable(name)!r} is the name of several VMs; give one of the UIDs {uids}")
        raise BadBody(f"no VM {printable(name)[:60]!r} in --placements{_suggestion(name, by_name)}")


@dataclass(slots=True)
class _Node:
    stored: Ledger = field(default_factory=Ledger)
    """From a NodeLedger."""
    placed: dict[PodUid, tuple[Claim, Placement]] = field(default_factory=dict)
    """From placements, by UID."""
    other_machine: int = 0
    """How many placements were made for a machine with another fingerprint."""


class ClaimsByNode:
    """The claims that one document describes. Claims without a node count for any machine.

    `where` is a position in the document, for notes and errors; empty for the whole.
    """

    def __init__(self, what: str, fingerprint: str) -> None:
        """`what` is the document's name, `fingerprint` the machine's that will be drawn."""
        self._what = what
        self._fingerprint = fingerprint
        self._nodes: dict[str, _Node] = {}
        self._notes: list[str] = []

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of the nodes that are described."""
        return tuple(sorted(filter(None, self._nodes)))

    def on_node(self, machine: str, wanted: str | None) -> NodeClaims:
        """Return the claims on the wanted node, else on the node with the machine's name; raises BadBody."""
        name = self._chosen(machine) if wanted is None else self._checked(wanted)
        owners: dict[CpuId, PodUid] = {}
        claims: dict[PodUid, Claim] = {}
        placements: dict[PodUid, Placement] = {}
        other_machine = 0
        for node in (self._nodes[each] for each in dict.fromkeys((name, "")) if each in self._nodes):
            claims |= node.stored.claims
            owners |= node.stored.owners
            for uid, (claim, placement) in node.placed.items():
                claims[uid], placements[uid] = claim, placement
                owners = dict.fromkeys(cpus_of(claim.owned), uid) | owners
            other_machine += node.other_machine
        if other_machine:
            others = counted(other_machine, "placement")
            self._note("", f"{self._what} contains {others} made for a machine with another fingerprint")
        if not claims and not owners:
            self._note("", f"{self._what} contains no VM on this machine")
        return NodeClaims(Ledger(owners, claims), tuple(self._notes), placements)

    def _chosen(self, machine: str) -> str:
        names = self.nodes
        if not names or machine in names:
            chosen = machine
        elif len(names) == 1:
            (chosen,) = names
            self._note("", f"{self._what} describes node {printable(chosen)}, drawn on {machine}")
        else:
            raise BadBody(
                f"{self._what} describes the nodes {_few(names)}, none of them named {machine}; "
                "choose one with --node"
            )
        if len(names) > 1:
            self._note("", f"{self._what} also describes {counted(len(names) - 1, 'other node')}, not drawn")
        return chosen

    def _checked(self, name: str) -> str:
        names = self.nodes
        if name in names:
            return name
        suggestion = _suggestion(name, names)
        if not suggestion:
            suggestion = f"; it describes {_few(names)}" if names else "; it names no node, leave out --node"
        raise BadBody(f"{self._what} contains no VM on node {printable(name)[:60]!r}{suggestion}")

    def read(self, document: Json, where: str) -> None:
        """Add the claims of a document in any form; raises BadBody."""
        kind = document.get("kind", "")
        if str(kind).endswith("List") and "items" in document:
            for item, at in self._entries(document, "items", where):
                self.read(item, at)
        elif kind == "Pod":
            self._read_pod(document, where)
        elif "spec" in document and kind in ("", "NodeLedger"):
            self._read_ledger(document, where)
        elif "podUid" in document:
            self._read_vm({"id": document["podUid"], "placement": document}, where)
        elif not _ANSWER_KEYS.isdisjoint(document):
            self._read_answer(document, where)
        else:
            raise self._bad(where, f"this is not a known form of placements; give {FORMATS}")

    def _read_answer(self, document: Json, where: str) -> None:
        """Read an answer, or a plan: its running VMs are where they were before its moves."""
        if "released" in document:
            uid = PodUid(str(document["released"]))
            for node in self._holding(uid, where, "released"):
                del node.placed[uid]
        for vm, at in self._entries(document, "running", where):
            self._read_vm(vm, at)
        for vm, at in self._entries(document, "moves", where):
            claim, placement = _claim(self._placement(vm, at), str(vm.get("id")))
            for node in self._holding(claim.uid, where, "moved")[:1]:
                node.placed[claim.uid] = claim, placement
        if "placement" in document:
            self._read_vm(document, where)
        for vm, at in self._entries(document, "placed", where):
            self._read_vm(vm, at)

    def _read_vm(self, vm: Json, where: str) -> None:
        self._add(self._placement(vm, where), where, str(vm.get("id") or where))

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

    def _read_ledger(self, document: Json, where: str) -> None:
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
        name = str(metadata.get("name", "")) if isinstance(metadata, Mapping) else ""
        self._nodes.setdefault(name, _Node()).stored = ledger

    def _read_pod(self, document: Json, where: str) -> None:
        import msgspec

        from kvplace.kube.object_parts import fault_of
        from kvplace.kube.objects import PodObject, pod_record

        try:
            # As text again: much of a pod stays text until it is needed.
            pod = pod_record(msgspec.json.decode(msgspec.json.encode(document), type=PodObject))
        except msgspec.ValidationError as error:
            raise self._bad(where, f"is not a valid Pod: {fault_of(error)}") from None
        if pod.has_ended or not (pod.placement or pod.cpu_map):
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
            self._note(where, f"pod {name} carries the placement of another pod; it is left out")
            return
        bound = replace(bound, node=bound.node or pod.node)
        self._add(bound, where, uid, pod)

    def _add(self, bound: PodPlacement, where: str, uid: str, pod: PodRecord | None = None) -> None:
        """Add the claim of a VM on its node, unless it runs unpinned."""
        if bound.placement.floats:
            return
        claim, placement = _claim(bound, uid)
        if pod is not None:
            claim = replace(claim, namespace=pod.namespace, pod=pod.name or claim.pod, vmi=pod.vmi)
        node = self._nodes.setdefault(bound.node, _Node())
        node.other_machine += bound.topology not in ("", self._fingerprint)
        if claim.uid in node.placed:
            self._note(where, f"{printable(claim.uid)!r} is placed again without a release; both are drawn")
            claim = replace(claim, uid=PodUid(f"{claim.uid} ({where})"), pod=f"{claim.pod} ({where})")
        node.placed[claim.uid] = claim, placement

    def _holding(self, uid: PodUid, where: str, verb: str) -> list[_Node]:
        nodes = [node for node in self._nodes.values() if uid in node.placed]
        if not nodes:
            self._note(where, f"{printable(uid)!r} is {verb} but was not placed")
        return nodes

    def _entries(self, document: Json, key: str, where: str) -> Iterator[tuple[Json, str]]:
        """Yield the mappings of a list, and where each stands."""
        entries = document.get(key, [])
        if not isinstance(entries, list):
            raise self._bad(where, f"{key} must be a list, not {kind_of(entries)}")
        for number, entry in enumerate(entries):
            at = f"{where} {key}[{number}]".lstrip()
            if not isinstance(entry, dict):
                raise self._bad(at, f"must be a mapping, not {kind_of(entry)}")
            yield entry, at

    def _note(self, where: str, sentence: str) -> None:
        self._notes.append(f"{where}: {sentence}" if where else sentence)

    def _bad(self, where: str, sentence: str) -> BadBody:
        return BadBody(f"{self._what}: {where}: {sentence}" if where else f"{self._what}: {sentence}")


def _claim(bound: PodPlacement, uid: str) -> tuple[Claim, Placement]:
    """Make the claim of a placement; a bare cpu-map does not state which CPUs are owned."""
    placement = bound.placement
    if placement.policy is Policy.EXCLUSIVE and not placement.owned:
        placement = replace(placement, owned=placement.cpus)
    return claim_of(PodUid(uid or "unnamed"), placement), placement


def _suggestion(name: str, known: Iterable[str]) -> str:
    return did_you_mean(name, map(printable, known))


def _few(names: Sequence[str]) -> str:
    return ", ".join(map(printable, names[:5])) + (" and others" if len(names) > 5 else "")


def read_placements(source: str, machine: str, fingerprint: str, *, node: str | None = None) -> NodeClaims:
    """Read a file, or stdin for `-`, for the machine of that name and fingerprint; raises BadBody.

    `node` chooses one of several nodes; by default it is the node with the machine's name.
    """
    return read_claims(source, fingerprint).on_node(machine, node)


def read_claims(source: str, fingerprint: str) -> ClaimsByNode:
    """Read the claims on all nodes of a file, or of stdin for `-`; raises BadBody."""
    from kvplace.documents.reading import read_source, source_name

    what = source_name(source)
    claims = ClaimsByNode(what, fingerprint)
    documents = list(_documents(read_source(source, what, _MAX_BYTES), what))
    if not documents:
        raise BadBody(f"{what} contains no placements; give {FORMATS}")
    for where, document in documents:
        claims.read(document, where)
    return claims


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
