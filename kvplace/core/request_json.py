"""The JSON form of a request: the one reader and writer of all commands, documents and annotations.

The keys are a stable interface. A mistake is reported in one sentence that names the key, its value and the
possible values.

The annotation `kvplace.io/request` carries a normalised request from admission to the extender. Only pod
admission writes it; the extender reads nothing else of the pod.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kvplace.core.annotations import (
    contradiction_in,
    is_movable,
    may_migrate,
    wants_crane_result,
    wants_explanation,
    wants_room,
)
from kvplace.core.errors import BadAnnotation, BadBody
from kvplace.core.json_fields import OPTION_KEYS, Fields, options_document, read_options_document
from kvplace.core.node_devices import read_device_counts, write_device_counts
from kvplace.core.quantity import about_bytes, bytes_in_pages, parse_memory, write_page_counts
from kvplace.core.request import MAX_VCPUS, GuestNuma, NumaMemory, Policy, Request, Smt
from kvplace.core.strict_json import Json, shown
from kvplace.core.well_known_names import (
    CPU_POLICY,
    CPU_SET,
    DEVICE_NUMA,
    EMULATOR_THREADS,
    GUEST_NUMA,
    NUMA_MEMORY,
    ON_FAILURE,
    PREFIX,
    REQUEST,
    SMT,
)

REQUEST_KEYS = ("vcpus", *OPTION_KEYS, "memory", "hugepages", "ioThreads", "devices")
MAX_IO_THREADS = 256
"""Far more than help any VM: KubeVirt makes two per vCPU by itself, and no more than the VM has disks."""
_MOST_ID = 256
_ANNOTATIONS = {
    CPU_SET: "cpuSet",
    CPU_POLICY: "policy",
    SMT: "smt",
    EMULATOR_THREADS: "emulatorThreads",
    NUMA_MEMORY: "numaMemory",
    GUEST_NUMA: "guestNuma",
    DEVICE_NUMA: "deviceNuma",
    ON_FAILURE: "onFailure",
}
_KEY_BY_ANNOTATION = {
    spelling: key
    for annotation, key in _ANNOTATIONS.items()
    for spelling in (annotation.removeprefix(PREFIX), PREFIX + annotation.removeprefix(PREFIX))
    if spelling != key
}
"""Key of a request by the annotation that sets the same, with and without its prefix."""
_KEYS = {Policy: "policy", Smt: "smt", NumaMemory: "numaMemory", GuestNuma: "guestNuma"}


def request_document(request: Request) -> Json:
    """Write a request; `read_request` gives it back unchanged."""
    return {
        "vcpus": request.vcpus,
        **options_document(request.options),
        "memory": request.memory,
        "hugepages": write_page_counts(request.huge_pages),
        "ioThreads": request.io_threads,
        "devices": write_device_counts(request.devices),
    }


def read_request(fields: Fields) -> Request:
    """Read a request, where only `vcpus` is required; raises ValueError that names the field."""
    return Request(
        vcpus=fields.whole("vcpus", MAX_VCPUS, least=1),
        options=read_options_document(fields),
        memory=fields.bytes("memory", 0),
        huge_pages={size: count for size, count in fields.page_counts("hugepages").items() if count},
        io_threads=fields.whole("ioThreads", MAX_IO_THREADS, default=0),
        devices=read_device_counts(fields.raw.get("devices", {}), fields.at("devices")),
    )


def read_strict_request(document: Mapping[str, Any], *, also: Iterable[str] = ()) -> Request:
    """Read a request that a person or program asks with; raises BadBody.

    More than `read_request` it refuses keys that are not known, options that exclude each other, memory
    without a unit and huge pages beyond the memory. A key may also be written as the annotation: `cpu-set`,
    `kvplace.io/smt`. `also` are the keys that the caller reads itself.
    """
    try:
        document = _without_annotations(document)
        fields = Fields(document)
        fields.only((*also, *REQUEST_KEYS))
        request = read_request(fields)
        if request.options.policy is Policy.NONE:
            others = ", ".join(policy.value for policy in Policy if policy is not Policy.NONE)
            raise ValueError(f"policy is 'none', which requests no CPUs; it must be one of {others}")
        _check_memory(request, document)
    except ValueError as error:
        raise BadBody(str(error)) from None
    found = contradiction_in(request.options)
    if found is not None:
        word, other = (f"{_KEYS[type(one)]}: {one.value!r}" for one in (found.word, found.other))
        raise BadBody(f"{word} contradicts {other}: {found.reason}")
    return request


def _without_annotations(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Write each annotation as the key of a request; raises ValueError where both spellings differ."""
    written: dict[str, Any] = {}
    spelt: dict[str, str] = {}
    for spelling, value in document.items():
        key = _KEY_BY_ANNOTATION.get(spelling, spelling)
        if key in written and written[key] != value:
            raise ValueError(f"{spelling}: {shown(value)} contradicts {spelt[key]}: {shown(written[key])}")
        written[key], spelt[key] = value, spelling
    return written


def id_of(document: Mapping[str, Any], key: str = "id") -> str:
    """Read an id, empty when there is none; raises BadBody unless it can be printed on one line."""
    value = document.get(key, "")
    if not isinstance(value, str) or len(value) > _MOST_ID or (key in document and not value):
        raise BadBody(f"{key} must be a string of 1 to {_MOST_ID} characters")
    if not value.isprintable():
        raise BadBody(f"{key} is {shown(value)}; it must consist of printable characters")
    return value


def _check_memory(request: Request, document: Mapping[str, Any]) -> None:
    """Refuse sizes without a unit, and more huge pages than memory: they are part of it."""
    for key, size in (
        ("memory", document.get("memory", 0)),
        *(("hugepages", size) for size in request.huge_pages),
    ):
        try:
            parse_memory(size)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from None
    paged = bytes_in_pages(request.huge_pages)
    if request.memory and paged - request.memory >= min(request.huge_pages, default=0) > 0:
        raise ValueError(
            f"hugepages hold {about_bytes(paged)}, more than the {about_bytes(request.memory)} of memory that"
            " they are part of"
        )


REQUEST_VERSION = 1
_MAX_TEXT = 16 * 1024


@dataclass(frozen=True)
class PodRequest:
    """A request together with the fields of its pod that an answer needs."""

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
        """Complete a request with the annotations of its object; raises BadAnnotation."""
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
        "version": REQUEST_VERSION,
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
    if not isinstance(raw, dict) or type(raw.get("version")) is not int or raw["version"] != REQUEST_VERSION:
        raise ValueError(f"must be an object of version {REQUEST_VERSION}; only pod admission writes it")
    return Fields(raw)
