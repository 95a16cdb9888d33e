"""AdmissionReview v1: the API server's request, the decision about it, and the response that it accepts.

Only the fields that a response depends on are decoded. The object under review stays raw JSON until it is
needed. A decision is an `Admitted`; a refusal is a raised KvplaceError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal

import msgspec

from kvplace.admission.edits import Operation
from kvplace.core.errors import BadBody
from kvplace.core.well_known_names import FrontEnd

MAX_BODY_BYTES = 2 * 1024 * 1024
"""More than etcd stores of an object (1.5 MiB). An update shows the object twice; VMIs have some 10 KiB."""

_REASONS = {
    HTTPStatus.BAD_REQUEST: "BadRequest",
    HTTPStatus.CONFLICT: "Conflict",
    HTTPStatus.UNPROCESSABLE_ENTITY: "Invalid",
    HTTPStatus.SERVICE_UNAVAILABLE: "ServiceUnavailable",
}


class GroupVersionKind(msgspec.Struct, frozen=True):
    """The type of the object under review."""

    kind: str


class UserInfo(msgspec.Struct, frozen=True):
    """The sender of the request that is reviewed."""

    username: str = ""


class AdmissionRequest(msgspec.Struct, frozen=True, rename="camel"):
    """One request of the API server."""

    uid: str
    kind: GroupVersionKind
    operation: str
    name: str = ""
    """Empty where the API server is still to make it up (`generateName`)."""
    namespace: str = ""
    sub_resource: str = ""
    user_info: UserInfo = UserInfo()
    object: msgspec.Raw = msgspec.Raw(b"null")
    old_object: msgspec.Raw = msgspec.Raw(b"null")


class _Review(msgspec.Struct, frozen=True, rename="camel"):
    api_version: Literal["admission.k8s.io/v1"]
    kind: Literal["AdmissionReview"]
    request: AdmissionRequest


def read_review(body: bytes) -> AdmissionRequest:
    """Decode the request of a body; raises BadBody, which names the fault."""
    try:
        return msgspec.json.decode(body, type=_Review).request
    except RecursionError:
        raise BadBody("the body is nested too deeply for an AdmissionReview") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadBody(f"the body is not an AdmissionReview of admission.k8s.io/v1: {error}") from None


def read_object(text: msgspec.Raw, field: str) -> dict[str, Any]:
    """Decode the object under review; raises BadBody that names `field`."""
    try:
        value = msgspec.json.decode(text)
    except RecursionError:
        raise BadBody(f"request.{field} is nested too deeply for a Kubernetes object") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadBody(f"request.{field}: {error}") from None
    if not isinstance(value, dict):
        raise BadBody(f"request.{field} must be a JSON object")
    return value


def allow(uid: str, patch: Sequence[Operation], warnings: Sequence[str]) -> bytes:
    """Encode the response that allows a request; without operations the object stays unchanged."""
    response: dict[str, Any] = {"uid": uid, "allowed": True}
    if patch:
        # msgspec writes bytes as base64, which is what `patch` wants.
        response |= {"patchType": "JSONPatch", "patch": msgspec.json.encode(patch)}
    if warnings:
        response["warnings"] = list(warnings)
    return _encode(response)


def deny(uid: str, code: int, sentence: str) -> bytes:
    """Encode a refusal; the user reads its sentence after "admission webhook denied the request"."""
    status = {
        "status": "Failure",
        "code": code,
        "reason": _REASONS.get(HTTPStatus(code), "InternalError"),
        "message": sentence,
    }
    return _encode({"uid": uid, "allowed": False, "status": status})


def _encode(response: dict[str, Any]) -> bytes:
    return msgspec.json.encode(
        {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}
    )


@dataclass(frozen=True, slots=True)
class Admitted:
    """An object as it is to be stored, and warnings for its author."""

    object: Mapping[str, Any]
    warnings: tuple[str, ...] = ()
    patch: Sequence[Operation] = ()
    """The JSON Patch that makes `object` of the object under review; empty when nothing changes."""


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """The names that admission writes into objects."""

    sidecar_image: str
    """Image of the hook sidecar; its program is `kvplace-hook`."""
    scheduler_name: str = "kvplace-scheduler"
    """Scheduler of pods that do not name one."""
    kubevirt_controller: str = "system:serviceaccount:kubevirt:kubevirt-controller"
    """The user as which virt-controller creates the pods of VMs."""
    front_end: FrontEnd = FrontEnd.ANNOTATION
    """How KubeVirt comes to call the hooks of new VMIs."""
    other_schedulers: tuple[str, ...] = ()
    """Further schedulers that call our extender; pods may name them."""
