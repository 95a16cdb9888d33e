"""The calls that read and write NodeLedgers, as values; `ApiCluster` makes them.

Every write names the state that it was decided on: with a resource version, which is never used twice, so it
also identifies a ledger that was created again under the same name.

A ledger is replaced as a whole: for a patch the API server has to encode the stored ledger, to merge the
texts and to decode the result. Only a ledger that holds more than kvplace reads, such as a user's label or
a field of a newer version, is patched, so that this stays.
"""

from __future__ import annotations

import msgspec

from kvplace.core.ledger import Ledger, LedgerChange, ledger_document, merge_patch, summary_document
from kvplace.core.node_topology import API_VERSION, GROUP, VERSION
from kvplace.core.scalars import NodeName
from kvplace.kube.object_records import LedgerRecord
from kvplace.kube.session import METADATA_ONLY, Call, path_of

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
