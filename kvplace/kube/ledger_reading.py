"""NodeLedgers as JSON, and how they become records; a claim that has not changed is not read again.

A write changes one claim or a few, and every replica reads the whole ledger then: those of a full node are
dozens. So claims are remembered by their text.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec

from kvplace.core.errors import Corrupt
from kvplace.core.ledger import Claim, Ledger, read_claim, read_ledger
from kvplace.core.scalars import NodeName, PodUid
from kvplace.kube.api_errors import NOT_JSON
from kvplace.kube.objects import CustomObject
from kvplace.kube.records import LedgerRecord

_REMEMBERED = 4096
"""Claims, of about 1 KB each with their texts: those of a hundred full nodes."""


class _LedgerSpec(msgspec.Struct, frozen=True, gc=False):
    """The spec of a NodeLedger; its claims stay texts."""

    owners: dict[str, Any]
    claims: dict[str, msgspec.Raw]


def ledger_record(document: CustomObject) -> LedgerRecord:
    """Read a NodeLedger; content that cannot be read becomes the record's problem."""
    metadata = document.metadata
    ledger, problem = Ledger(), ""
    try:
        ledger = _ledger(document.spec)
    except (Corrupt, *NOT_JSON) as error:
        problem = str(error)
    return LedgerRecord(NodeName(metadata.name), ledger, metadata.resource_version, metadata.uid, problem)


def _ledger(spec: msgspec.Raw) -> Ledger:
    try:
        found = _SPEC.decode(spec)
    except msgspec.ValidationError:
        return read_ledger(_JSON.decode(spec))  # which says what is wrong
    return read_ledger({"owners": found.owners, "claims": found.claims}, _claim_of_raw)


def _claim_of_raw(uid: PodUid, raw: msgspec.Raw) -> Claim:
    return _claim_of_text(uid, bytes(raw))  # a copy: the raw one keeps the whole event


@lru_cache(maxsize=_REMEMBERED)
def _claim_of_text(uid: PodUid, text: bytes) -> Claim:
    return read_claim(uid, _JSON.decode(text))


_SPEC = msgspec.json.Decoder(_LedgerSpec)
_JSON: msgspec.json.Decoder[Any] = msgspec.json.Decoder()
