"""The annotation `kvplace.io/request`: a normalised request on its way from admission to the extender.

Only pod admission writes it; the extender reads nothing else of the pod.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from kvplace.core.annotations import (
    REQUEST,
    is_movable,
    may_migrate,
    wants_crane_result,
    wants_explanation,
    wants_room,
)
from kvplace.core.errors import BadAnnotation
from kvplace.core.json_fields import Fields
from kvplace.core.request import Request
from kvplace.core.request_json import read_request, request_document

VERSION = 1
_MAX_TEXT = 16 * 1024


@dataclass(frozen=True)
class PodRequest:
    """A request together with what is needed to answer it on the pod it came from."""

    request: Request
    vmi: str = ""
    """`namespace/name` of the VMI, empty for a plain pod."""
    explain: bool = False
    crane_result: bool = False
    """Whether the result is also written in Crane's annotation."""
    movable: bool = False
    """Whether it may get other cores while it runs, to make room for others."""
    may_migrate: bool = False
    """Whether it may go to another node for that, too."""
    make_room: bool = False
    """Whether movable VMs are to make room for it where it does not fit."""

    @classmethod
    def of(cls, request: Request, annotations: Mapping[str, str], *, vmi: str = "") -> PodRequest:
        """Complete a request with what the annotations of its object state; raises BadAnnotation."""
        return cls(
            request,
            vmi=vmi,
            explain=wants_explanation(annotations),
            crane_result=wants_crane_result(annotations),
            movable=is_movable(annotations),
            may_migrate=may_migrate(annotations),
            make_room=wants_room(annotations),
        )

    @property
    def vmi_name(self) -> str:
        """The name of the VMI without its namespace, empty for a plain pod."""
        return self.vmi.rpartition("/")[2]


def write_request(pod: PodRequest) -> str:
    """Write the annotation's one line."""
    document = {
        "version": VERSION,
        **request_document(pod.request),
        "vmi": pod.vmi,
        "explain": pod.explain,
        "craneResult": pod.crane_result,
    }
    if pod.movable:
        document["movable"] = True
    if pod.may_migrate:
        document["mayMigrate"] = True
    if pod.make_room:
        document["makeRoom"] = True
    return json.dumps(document, separators=(",", ":"))


@lru_cache(maxsize=1024)
def read_pod_request(text: str) -> PodRequest:
    """Read the annotation; raises BadAnnotation that names the field."""
    try:
        fields = _fields(text)
        return PodRequest(
            read_request(fields),
            vmi=fields.text("vmi", ""),
            explain=fields.raw.get("explain") is True,
            crane_result=fields.raw.get("craneResult") is True,
            movable=fields.raw.get("movable") is True,
            may_migrate=fields.raw.get("mayMigrate") is True,
            make_room=fields.raw.get("makeRoom") is True,
        )
    except ValueError as error:
        raise BadAnnotation(REQUEST, text, str(error)) from None


def _fields(text: str) -> Fields:
    if len(text) > _MAX_TEXT:
        raise ValueError(f"is longer than {_MAX_TEXT} characters")
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("is not valid JSON; only pod admission writes it: delete the pod") from None
    if not isinstance(raw, dict) or type(raw.get("version")) is not int or raw["version"] != VERSION:
        raise ValueError(f"must be an object of version {VERSION}; only pod admission writes it")
    return Fields(raw)
