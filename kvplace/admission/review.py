"""AdmissionReview v1 on the wire: what the API server sends, and what it accepts as an answer.

Only the fields that an answer depends on are read; everything else may be there or not. The object under
review stays untouched text until somebody wants it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Literal

import msgspec

from kvplace.admission.json_patch import Operation
from kvplace.core.errors import BadBody, KvplaceError, http_status_of

MAX_BODY_BYTES = 10 * 1024 * 1024
"""Three times the largest request that an API server takes."""

_REASONS = {
    HTTPStatus.BAD_REQUEST: "BadRequest",
    HTTPStatus.CONFLICT: "Conflict",
    HTTPStatus.UNPROCESSABLE_ENTITY: "Invalid",
    HTTPStatus.SERVICE_UNAVAILABLE: "ServiceUnavailable",
}


class GroupVersionKind(msgspec.Struct, frozen=True):
    """What the object under review is."""

    kind: str
    group: str = ""
    version: str = ""


class AdmissionRequest(msgspec.Struct, frozen=True, rename="camel"):
    """One question of the API server."""

    uid: str
    kind: GroupVersionKind
    operation: str
    namespace: str = ""
    name: str = ""
    sub_resource: str = ""
    object: msgspec.Raw = msgspec.Raw(b"null")
    old_object: msgspec.Raw = msgspec.Raw(b"null")


class _Review(msgspec.Struct, frozen=True, rename="camel"):
    api_version: Literal["admission.k8s.io/v1"]
    kind: Literal["AdmissionReview"]
    request: AdmissionRequest


def read_review(body: bytes) -> AdmissionRequest:
    """Read the question out of a body; raises BadBody that says where it is wrong."""
    if len(body) > MAX_BODY_BYTES:
        raise BadBody(f"the body has {len(body)} bytes; an AdmissionReview has at most {MAX_BODY_BYTES}")
    try:
        return msgspec.json.decode(body, type=_Review).request
    except RecursionError:
        raise BadBody("the body is nested too deeply for an AdmissionReview") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadBody(f"the body is no AdmissionReview of admission.k8s.io/v1: {error}") from None


def read_object(text: msgspec.Raw, field: str) -> dict[str, Any]:
    """Read the object under review, which must be a JSON object; raises BadBody that names `field`."""
    try:
        value = msgspec.json.decode(text)
    except RecursionError:
        raise BadBody(f"request.{field} is nested too deeply for a Kubernetes object") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadBody(f"request.{field}: {error}") from None
    if not isinstance(value, dict):
        raise BadBody(f"request.{field} is no JSON object; only created and updated objects come here")
    return value


def allow(uid: str, patch: Sequence[Operation] = (), warnings: Sequence[str] = ()) -> bytes:
    """Write a yes; without operations the object stays byte for byte what it was."""
    response: dict[str, Any] = {"uid": uid, "allowed": True}
    if patch:
        # msgspec writes bytes as base64, which is what `patch` wants.
        response |= {"patchType": "JSONPatch", "patch": msgspec.json.encode(patch)}
    return _answer(response, warnings)


def deny(uid: str, error: KvplaceError, warnings: Sequence[str] = ()) -> bytes:
    """Write a no; its one sentence is what the user reads behind "admission webhook denied the request"."""
    code = http_status_of(error)
    status = {
        "status": "Failure",
        "code": code,
        "reason": _REASONS.get(HTTPStatus(code), "InternalError"),
        "message": str(error),
    }
    return _answer({"uid": uid, "allowed": False, "status": status}, warnings)


def _answer(response: Mapping[str, Any], warnings: Sequence[str]) -> bytes:
    if warnings:
        response = {**response, "warnings": list(warnings)}
    return msgspec.json.encode(
        {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}
    )
