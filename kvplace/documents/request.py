"""One VM's request inside a document: read by core, which reads requests for every command."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

from pydantic import PlainValidator, WithJsonSchema

from kvplace.core.device_resources import MOST_DEVICES
from kvplace.core.errors import BadBody
from kvplace.core.options_json import OPTION_KEYS
from kvplace.core.request import MAX_VCPUS, PinningOptions, Policy, Request
from kvplace.core.request_json import MAX_IO_THREADS, request_of
from kvplace.core.strict_json import shown
from kvplace.documents.model import DIALECT, checked_by

_OPTIONS = {
    "cpuSet": "Where all CPUs of the VM must lie.",
    "policy": "Whether other VMs may use the CPUs.",
    "smt": "How vCPUs share cores.",
    "emulatorThreads": "Where QEMU's own threads run.",
    "numaMemory": "How memory is bound to NUMA nodes.",
    "guestNuma": "Whether the guest sees the NUMA nodes of the host.",
    "deviceNuma": "How near the cores must be to the VM's devices.",
    "onFailure": "What happens to a VM that does not fit.",
}


def _option(key: str) -> dict[str, Any]:
    default = getattr(PinningOptions(), OPTION_KEYS[key])
    words = [word.value for word in type(default) if word is not Policy.NONE]
    return {"enum": words, "default": default.value, "description": _OPTIONS[key]}


EXAMPLE = """\
{"vcpus": 8, "cpuSet": "one-numa", "smt": "require", "emulatorThreads": "isolate", "memory": "32Gi"}
"""
REQUEST_SCHEMA: dict[str, Any] = {
    "title": "Request",
    "description": "What one VM asks for.",
    "type": "object",
    "additionalProperties": False,
    "required": ["vcpus"],
    "properties": {
        "vcpus": {"type": "integer", "minimum": 1, "maximum": MAX_VCPUS},
        **{key: _option(key) for key in OPTION_KEYS},
        "memory": {
            "type": ["string", "integer"],
            "description": "A quantity such as 8Gi, or a number of bytes.",
        },
        "hugepages": {
            "type": "object",
            "description": "Number of huge pages by page size; they are part of memory.",
            "additionalProperties": {"type": "integer", "minimum": 0},
        },
        "ioThreads": {"type": "integer", "minimum": 0, "maximum": MAX_IO_THREADS},
        "devices": {
            "type": "object",
            "description": "Number of devices by the resource of their device plugin.",
            "additionalProperties": {"type": "integer", "minimum": 0, "maximum": MOST_DEVICES},
        },
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
