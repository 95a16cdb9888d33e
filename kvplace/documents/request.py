"""One VM's request inside a document: read by core, which reads requests for every command."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any, TypeAlias

from pydantic import PlainValidator, WithJsonSchema

from kvplace.core.errors import BadBody
from kvplace.core.request import (
    MAX_VCPUS,
    EmulatorThreads,
    GuestNuma,
    NumaMemory,
    OnFailure,
    Policy,
    Request,
    Scope,
    Smt,
)
from kvplace.core.request_json import request_of
from kvplace.core.strict_json import shown
from kvplace.documents.model import DIALECT, checked_by

_QUANTITY = {"type": ["string", "integer"], "description": "A quantity such as 8Gi; a number is bytes."}


def _words(kind: type[Enum], default: Enum, description: str) -> dict[str, Any]:
    words = [member.value for member in kind if member is not Policy.NONE]
    return {"enum": words, "default": default.value, "description": description}


REQUEST_SCHEMA: dict[str, Any] = {
    "title": "Request",
    "description": "What one VM asks for.",
    "type": "object",
    "additionalProperties": False,
    "required": ["vcpus"],
    "properties": {
        "vcpus": {"type": "integer", "minimum": 1, "maximum": MAX_VCPUS},
        "cpuSet": _words(Scope, Scope.ONE_SOCKET, "Where all CPUs of the VM must lie."),
        "policy": _words(Policy, Policy.EXCLUSIVE, "Whether other VMs may use the CPUs."),
        "smt": _words(Smt, Smt.PREFER, "How vCPUs share cores."),
        "emulatorThreads": _words(EmulatorThreads, EmulatorThreads.SHARED, "Where QEMU's own threads run."),
        "numaMemory": _words(NumaMemory, NumaMemory.PREFERRED, "How memory is bound to NUMA nodes."),
        "guestNuma": _words(GuestNuma, GuestNuma.OFF, "Whether the guest sees the NUMA nodes of the host."),
        "onFailure": _words(OnFailure, OnFailure.WAIT, "What happens to a VM that does not fit."),
        "memory": _QUANTITY,
        "hugepages": {
            "type": "object",
            "description": "Number of huge pages by page size; they are part of memory.",
            "additionalProperties": {"type": "integer", "minimum": 0},
        },
        "ioThreads": {"type": "integer", "minimum": 0, "maximum": 65535},
    },
}
"""The JSON Schema of a request; the rules between keys are checked on reading only."""


def request_schema() -> dict[str, Any]:
    """Give the JSON Schema of one request, as `kvplace place` reads them."""
    return {"$schema": DIALECT} | REQUEST_SCHEMA


def _read(content: object) -> Request:
    if isinstance(content, Request):
        return content
    if not isinstance(content, Mapping):
        raise BadBody(f"{shown(content)} is not a request; it must be a mapping")
    return request_of(content)


RequestKeys: TypeAlias = Annotated[Request, PlainValidator(checked_by(_read)), WithJsonSchema(REQUEST_SCHEMA)]
"""A field that holds one request."""
