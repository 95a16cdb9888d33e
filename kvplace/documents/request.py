"""Requests of VMs inside a document, and the document of `kvplace plan`: a list of them.

`core` reads a request, as it does for every command. A request in a list may have an id, a count, and, for a
live cluster, the demands that a pod's spec states on its node besides cores.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import (
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)

from kvplace.core.errors import BadBody
from kvplace.core.json_fields import OPTION_KEYS
from kvplace.core.node_devices import MOST_DEVICES
from kvplace.core.request import MAX_VCPUS, PinningOptions, Policy, Request
from kvplace.core.request_json import MAX_IO_THREADS, read_strict_request
from kvplace.core.strict_json import Json, shown
from kvplace.documents.model import DIALECT, DocumentModel, Text, checked_by

NodeSelector: TypeAlias = dict[str, str]
_OPTIONS = {
    "cpuSet": "The domain that must contain all CPUs of the VM.",
    "policy": "Whether other VMs may use the CPUs.",
    "smt": "How vCPUs share cores.",
    "emulatorThreads": "Where QEMU's own threads run.",
    "numaMemory": "How memory is bound to NUMA nodes.",
    "guestNuma": "Whether the guest sees the NUMA nodes of the host.",
    "deviceNuma": "How near the cores must be to the VM's devices.",
    "onFailure": "Whether a VM that fits on no node waits, or runs unpinned.",
}
REQUEST_EXAMPLE = """\
{"vcpus": 8, "cpuSet": "one-numa", "smt": "require", "emulatorThreads": "isolate", "memory": "32Gi"}
"""
REQUESTS_EXAMPLE = """\
# VMs for `kvplace plan --requests FILE`. `kvplace schema requests` has all keys and words.
requests:
- {id: db, vcpus: 8, cpuSet: one-numa, smt: require, memory: 32Gi}
- {id: router, vcpus: 6, cpuSet: one-l3, emulatorThreads: isolate, memory: 8Gi}
- {id: web, count: 20, vcpus: 2, memory: 4Gi}      # web-01 to web-20
"""
MOST_VMS = 20_000
_BESIDE = ("id", "count", "nodeSelector", "tolerations", "affinity")
_DEMANDS = ("node_selector", "tolerations", "affinity")


class TolerationKeys(DocumentModel):
    """A taint that does not keep the VM away."""

    key: Text | None = None
    """Empty for all keys."""
    operator: Literal["Exists", "Equal"] | None = None
    value: str | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Empty for all effects."""


class Expression(DocumentModel):
    """One condition on a label."""

    key: Text
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"]
    values: tuple[str, ...] | None = None


class NodeTerm(DocumentModel):
    """Conditions that must all hold."""

    match_expressions: tuple[Expression, ...] | None = None
    match_fields: tuple[Expression, ...] | None = None


class NodeTerms(DocumentModel):
    """Terms; one of them must select the node."""

    node_selector_terms: Annotated[tuple[NodeTerm, ...], Field(min_length=1)]


class NodeAffinityKeys(DocumentModel):
    """The demand on the node; preferences do not matter to a plan."""

    required: NodeTerms = Field(alias="requiredDuringSchedulingIgnoredDuringExecution")


class AffinityKeys(DocumentModel):
    """The part of a pod's affinity that is about nodes; a plan does not consider affinity to pods."""

    node_affinity: NodeAffinityKeys


def _option(key: str) -> dict[str, Any]:
    default = getattr(PinningOptions(), OPTION_KEYS[key])
    words = [word.value for word in type(default) if word is not Policy.NONE]
    return {"enum": words, "default": default.value, "description": _OPTIONS[key]}


REQUEST_SCHEMA: dict[str, Any] = {
    "title": "Request",
    "description": "The request of one VM.",
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
    return read_strict_request(content)


RequestKeys: TypeAlias = Annotated[Request, PlainValidator(checked_by(_read)), WithJsonSchema(REQUEST_SCHEMA)]
"""A field that holds one request."""


def _flat(schema: dict[str, Any]) -> None:
    request = schema["properties"].pop("request")
    schema["properties"] |= request["properties"]
    schema["required"] = request["required"]


class RequestedVms(DocumentModel):
    """One VM, or `count` equal VMs: the keys of a request, with `id` and `count` beside them.

    On a live cluster also its demands on its node, as in the spec of a pod.
    """

    model_config = ConfigDict(json_schema_extra=_flat)

    id: Text | None = None
    """A name that no other VM has."""
    count: Annotated[int, Field(strict=True, ge=1, le=MOST_VMS)] | None = None
    """Makes so many VMs of the same request, named id-01, id-02, ..."""
    node_selector: NodeSelector | None = None
    """Labels that its node must have."""
    tolerations: tuple[TolerationKeys, ...] | None = None
    affinity: AffinityKeys | None = None
    request: RequestKeys

    @property
    def demands(self) -> Json:
        """The demand on its node, as in the spec of a pod; empty without one."""
        return self.model_dump(include=set(_DEMANDS), by_alias=True, exclude_none=True)

    @model_validator(mode="wrap")
    @classmethod
    def _split(cls, content: Any, read: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(content, dict):
            return read(content)
        request = checked_by(lambda keys: read_strict_request(keys, also=_BESIDE))(content)
        return read({key: content[key] for key in _BESIDE if key in content} | {"request": request})


class RequestsDocument(DocumentModel):
    """VMs to plan. A file may also hold the list alone, or one VM per line as JSON."""

    requests: Annotated[tuple[RequestedVms, ...], Field(max_length=MOST_VMS)]
