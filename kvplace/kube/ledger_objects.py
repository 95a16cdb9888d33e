"""NodeLedgers as JSON: how they become records, and the calls that read and write them.

`ApiCluster` makes the calls. Every write names the state that it was decided on: with a resource version,
which is never used twice, so it also identifies a ledger that was created again under the same name.

A ledger is replaced as a whole: for a patch the API server has to encode the stored ledger, to merge the
texts and to decode the result. Only a ledger that holds more than kvplace reads, such as a user's label or
a field of a newer version, is patched, so that this stays.

A write changes one claim or a few, and every replica reads the whole ledger then: those of a full node are
dozens. So claims are remembered by their text.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec

from kvplace.core.errors import Corrupt
from kvplace.core.ledger import (
    Claim,
    Ledger,
    LedgerChange,
    claim_document,
    ledger_document,
    merge_patch,
    read_claim,
    read_ledger,
    summary_document,
)
from kvplace.core.node_topology import API_VERSION, GROUP, VERSION
from kvplace.core.scalars import NodeName, PodUid
from kvplace.kube.api_errors import NOT_JSON
from kvplace.kube.object_records import LedgerRecord
from kvplace.kube.objects import CustomObject, MetaWithWriters
from kvplace.kube.session import METADATA_ONLY, Call, path_of

_REMEMBERED = 4096
"""Claims, of about 1 KB each with their texts: those of a hundred full nodes."""
_PLAIN = frozenset(("namespace", "pod", "vmi", "policy", "cpus", "owned", "memory", "since", "revision"))
"""Fields of a claim that have no parts which kvplace may not know, apart from the nodes of `memory`."""


class _Summary(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """The counts for people, as kvplace writes them."""

    pods: int = 0
    owned: int = 0
    shared: int = 0


class _LedgerSpec(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """The spec of a NodeLedger as kvplace writes it; its claims stay texts."""

    owners: dict[str, Any]
    claims: dict[str, msgspec.Raw]
    summary: _Summary = _Summary()


def ledger_record(document: CustomObject) -> LedgerRecord:
    """Read a NodeLedger; content that cannot be read becomes the record's problem."""
    metadata = document.metadata
    ledger, problem, is_whole = Ledger(), "", False
    try:
        ledger, is_whole = _ledger(document.spec)
    except (Corrupt, *NOT_JSON) as error:
        problem = str(error)
    return LedgerRecord(
        NodeName(metadata.name),
        ledger,
        metadata.resource_version,
        metadata.uid,
        problem,
        is_whole and not _somebodys(metadata),
    )


def _somebodys(metadata: MetaWithWriters) -> bool:
    """Whether a user has given the object what kvplace does not write."""
    given = (metadata.annotations, metadata.owner_references, metadata.finalizers)
    return bool(metadata.labels) or any(each is not None for each in given)


def _ledger(spec: msgspec.Raw) -> tuple[Ledger, bool]:
    """Read a ledger, and whether it reports all that the spec states."""
    try:
        found = _SPEC.decode(spec)
    except msgspec.ValidationError:
        return read_ledger(_JSON.decode(spec)), False  # which states what is wrong, if anything is
    is_whole = True

    def claim_of(uid: PodUid, raw: msgspec.Raw) -> Claim:
        nonlocal is_whole
        claim, says_all = _claim_of_text(uid, bytes(raw))  # a copy: the raw one keeps the whole event
        is_whole = is_whole and says_all
        return claim

    return read_ledger({"owners": found.owners, "claims": found.claims}, claim_of), is_whole


@lru_cache(maxsize=_REMEMBERED)
def _claim_of_text(uid: PodUid, text: bytes) -> tuple[Claim, bool]:
    """Read a claim, and whether it reports all that its text states."""
    document = _JSON.decode(text)
    claim = read_claim(uid, document)
    is_plain = document.keys() <= _PLAIN and len(document.get("memory") or ()) == len(claim.memory)
    return claim, is_plain or claim_document(claim) == document


_SPEC = msgspec.json.Decoder(_LedgerSpec)
_JSON: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


RESOURCE = "nodeledgers"
_WRITTEN_BY = {"fieldManager": "kvplace"}
_OURS = {**_WRITTEN_BY, "fieldValidation": "Ignore"}
"""Of a ledger that kvplace writes as a whole nothing reads warnings about fields, and to find them costs."""
_UNTRACKED: list[dict[str, str]] = [{}]
"""The `managedFields` that make the API server forget the writer of each field, until a user applies
the object. At later writes it then compares no fields either.
"""
_encode = msgspec.json.encode


def read_call(node: NodeName) -> Call:
    """Ask for the ledger of a node."""
    return Call("get", RESOURCE, _path(node), name=node)


def create_call(node: NodeName) -> Call:
    """Create an empty ledger."""
    return Call(
        "create",
        RESOURCE,
        _path(),
        name=node,
        query=_WRITTEN_BY,
        body=_encode(
            {
                "apiVersion": API_VERSION,
                "kind": "NodeLedger",
                "metadata": {"name": node},
                "spec": ledger_document(Ledger()),
            }
        ),
    )


def write_call(before: LedgerRecord, change: LedgerChange, after: Ledger) -> Call:
    """Change a ledger that still equals `before`; `after` is the result of the change."""
    metadata = {"resourceVersion": before.resource_version, "managedFields": _UNTRACKED}
    body: dict[str, object]
    if before.is_whole:
        verb, query = "update", _OURS
        body = {
            "apiVersion": API_VERSION,
            "kind": "NodeLedger",
            "metadata": {"name": before.node, **metadata},
            "spec": ledger_document(after),
        }
    else:
        verb, query = "patch", _WRITTEN_BY
        spec = {**merge_patch(before.ledger, change), "summary": summary_document(after)}
        body = {"metadata": metadata, "spec": spec}
    return Call(
        verb,
        RESOURCE,
        _path(before.node),
        name=before.node,
        query=query,
        body=_encode(body),
        accept=METADATA_ONLY,
    )


def delete_call(before: LedgerRecord) -> Call:
    """Delete a ledger that is still as `before` states."""
    preconditions = {"resourceVersion": before.resource_version, "uid": before.uid}
    return Call(
        "delete",
        RESOURCE,
        _path(before.node),
        name=before.node,
        body=_encode({"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": preconditions}),
    )


def _path(*node: str) -> str:
    return path_of("apis", GROUP, VERSION, RESOURCE, *node)
