"""The VMs that `kvplace plan` places: a list of requests, each with an optional id and count."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, ModelWrapValidatorHandler, model_validator
from pydantic.alias_generators import to_camel

from kvplace.core.request_json import request_of
from kvplace.core.strict_json import Json
from kvplace.documents.model import Document, Text, checked_by
from kvplace.documents.request import RequestKeys
from kvplace.documents.scheduling import AffinityKeys, NodeSelector, TolerationKeys

EXAMPLE = """\
# VMs for `kvplace plan --requests FILE`. `kvplace schema requests` has all keys and words.
requests:
- {id: db, vcpus: 8, cpuSet: one-numa, smt: require, memory: 32Gi}
- {id: router, vcpus: 6, cpuSet: one-l3, emulatorThreads: isolate, memory: 8Gi}
- {id: web, count: 20, vcpus: 2, memory: 4Gi}      # web-01 to web-20
"""
MOST_VMS = 20_000
_BESIDE = ("id", "count", "nodeSelector", "tolerations", "affinity")


_DEMANDS = ("node_selector", "tolerations", "affinity")


def _flat(schema: dict[str, Any]) -> None:
    request = schema["properties"].pop("request")
    schema["properties"] |= request["properties"]
    schema["required"] = request["required"]


class RequestedVms(Document):
    """One VM, or `count` equal ones: the keys of a request, with `id` and `count` beside them.

    On a live cluster also what it demands of its node, as in the spec of a pod.
    """

    model_config = ConfigDict(json_schema_extra=_flat, alias_generator=to_camel)

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
        """The demand on its node, as in the spec of a pod; empty where it states nothing."""
        return self.model_dump(include=set(_DEMANDS), by_alias=True, exclude_none=True)

    @model_validator(mode="wrap")
    @classmethod
    def _split(cls, content: Any, read: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(content, dict):
            return read(content)
        request = checked_by(lambda keys: request_of(keys, also=_BESIDE))(content)
        return read({key: content[key] for key in _BESIDE if key in content} | {"request": request})


class RequestsDocument(Document):
    """VMs to plan. A file may also hold the list alone, or one VM per line as JSON."""

    requests: Annotated[tuple[RequestedVms, ...], Field(max_length=MOST_VMS)]
