"""The JSON form of a request: the one reader and writer of all commands, documents and annotations.

The keys are a stable interface. What is wrong is reported in one sentence that names the key, its value and
what it must be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvplace.core.annotations import (
    CPU_POLICY,
    CPU_SET,
    DEVICE_NUMA,
    EMULATOR_THREADS,
    GUEST_NUMA,
    NUMA_MEMORY,
    ON_FAILURE,
    PREFIX,
    SMT,
)
from kvplace.core.contradictions import contradiction_in
from kvplace.core.errors import BadBody
from kvplace.core.json_fields import OPTION_KEYS, Fields, options_document, read_options_document
from kvplace.core.node_devices import read_device_counts, write_device_counts
from kvplace.core.quantity import about_bytes, bytes_in_pages, parse_memory, write_page_counts
from kvplace.core.request import MAX_VCPUS, GuestNuma, NumaMemory, Policy, Request, Smt
from kvplace.core.strict_json import Json, shown

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
    """Read a request, where all but `vcpus` may be missing; raises ValueError that names the field."""
    return Request(
        vcpus=fields.whole("vcpus", MAX_VCPUS, least=1),
        options=read_options_document(fields),
        memory=fields.bytes("memory", 0),
        huge_pages={size: count for size, count in fields.page_counts("hugepages").items() if count},
        io_threads=fields.whole("ioThreads", MAX_IO_THREADS, default=0),
        devices=read_device_counts(fields.raw.get("devices", {}), fields.at("devices")),
    )


def request_of(document: Mapping[str, Any], *, also: Iterable[str] = ()) -> Request:
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
            raise ValueError(f"policy is 'none', which asks for nothing to place; it must be one of {others}")
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
    """Refuse sizes without a unit, and a page more than the memory: what is in huge pages is part of it."""
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
