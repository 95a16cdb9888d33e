"""NodeLedgers as JSON, and how they become records; a claim that has not changed is not read again.

A write changes one claim or a few, and every replica reads the whole ledger then: those of a full node are
dozens. So claims are remembered by their text.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec

from kvplace.core.errors import Corrupt
from kvplace.core.ledger import Claim, Ledger, claim_document, read_claim, read_ledger
from kvplace.core.scalars import NodeName, PodUid
from kvplace.kube.api_errors import NOT_JSON
from kvplace.kube.object_records import LedgerRecord
from kvplace.kube.objects import CustomObject, MetaWithWriters

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
