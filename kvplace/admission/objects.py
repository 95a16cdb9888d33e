"""The fields of pods, VMs and VMIs that admission decides on, typed.

VMIs arrive before the API server has validated them against their schema, so they may have any shape.
Decisions read these types; edits are made on copies of the raw objects, so that all other fields stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec

from kvplace.core.errors import BadBody, Misconfigured
from kvplace.core.json_fields import MAX_BYTES
from kvplace.core.quantity import MOST_PAGES, parse_bytes, parse_quantity
from kvplace.core.scalars import Bytes
from kvplace.core.strict_json import shown
from kvplace.core.well_known_names import FrontEnd
from kvplace.kube.object_parts import OwnerReference, fault_of

Quantity: TypeAlias = str | int | float
Quantities: TypeAlias = dict[str, Quantity]
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]


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


class _AdmittedObject(msgspec.Struct, frozen=True, rename="camel"):
    """Fields as Kubernetes spells them; `null` means the same as a missing field."""


class AdmittedMetadata(_AdmittedObject, frozen=True):
    """An object's `metadata`."""

    name: str | None = None
    generate_name: str | None = None
    namespace: str | None = None
    uid: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    owner_references: list[OwnerReference] | None = None
    deletion_timestamp: str | None = None


class AdmittedResources(_AdmittedObject, frozen=True):
    """Requests and limits of a container or of a VMI's domain."""

    requests: Quantities | None = None
    limits: Quantities | None = None

    @property
    def requested(self) -> Quantities:
        return self.requests or {}

    @property
    def limited(self) -> Quantities:
        return self.limits or {}


class Editable(_AdmittedObject, frozen=True):
    """An object that admission may edit, and decides nothing on."""


class AdmittedContainer(_AdmittedObject, frozen=True):
    """A container of a pod."""

    name: str
    command: list[str] | None = None
    resources: AdmittedResources | None = None
    env: list[Editable] | None = None
    volume_mounts: list[Editable] | None = None
    security_context: Editable | None = None
    restart_policy: str | None = None
    """`Always` makes an init container a sidecar: it continues to run beside the others."""

    @property
    def requested(self) -> Quantities:
        return self.resources.requested if self.resources else {}

    @property
    def limited(self) -> Quantities:
        return self.resources.limited if self.resources else {}


class FieldRef(_AdmittedObject, frozen=True):
    """A field of the pod itself."""

    field_path: str = ""


class DownwardItem(_AdmittedObject, frozen=True):
    """One file of a downward API volume."""

    path: str = ""
    field_ref: FieldRef | None = None


class DownwardVolume(_AdmittedObject, frozen=True):
    """A volume filled from the pod's own fields."""

    items: list[DownwardItem] | None = None


class Volume(_AdmittedObject, frozen=True):
    """A volume of a pod."""

    name: str
    downward: DownwardVolume | None = msgspec.field(default=None, name="downwardAPI")
    empty_dir: dict[str, Any] | None = None


class AdmittedPodSpec(_AdmittedObject, frozen=True):
    """A pod's `spec`."""

    containers: list[AdmittedContainer]
    init_containers: list[AdmittedContainer] | None = None
    ephemeral_containers: list[Editable] | None = None
    overhead: Quantities | None = None
    resources: AdmittedResources | None = None
    """Of the pod as a whole; the requests of its containers must fit into it."""
    volumes: list[Volume] | None = None
    scheduler_name: str | None = None
    node_name: str | None = None


class Pod(_AdmittedObject, frozen=True):
    """A pod."""

    spec: AdmittedPodSpec
    metadata: AdmittedMetadata = AdmittedMetadata()


class GuestNumaOfKubeVirt(_AdmittedObject, frozen=True):
    """A VMI's `spec.domain.cpu.numa`."""

    guest_mapping_passthrough: dict[str, Any] | None = None


class Cpu(_AdmittedObject, frozen=True):
    """A VMI's `spec.domain.cpu`."""

    sockets: _Count | None = None
    max_sockets: _Count | None = None
    cores: _Count | None = None
    threads: _Count | None = None
    numa: GuestNumaOfKubeVirt | None = None
    dedicated_cpu_placement: bool | None = None
    isolate_emulator_thread: bool | None = None


class HugePages(_AdmittedObject, frozen=True):
    """A VMI's `spec.domain.memory.hugepages`."""

    page_size: str | None = None


class Memory(_AdmittedObject, frozen=True):
    """A VMI's `spec.domain.memory`."""

    guest: Quantity | None = None
    hugepages: HugePages | None = None


class IoThreads(_AdmittedObject, frozen=True):
    """A VMI's `spec.domain.ioThreads`."""

    supplemental_pool_thread_count: _Count | None = None


class Disk(_AdmittedObject, frozen=True):
    """A disk of a VMI."""

    dedicated_io_thread: bool | None = msgspec.field(default=None, name="dedicatedIOThread")


class HostDevice(_AdmittedObject, frozen=True):
    """A GPU or another device of the host that a VMI gets."""

    device_name: str | None = None
    """The resource of its device plugin; None where a ResourceClaim has it."""


class Interface(_AdmittedObject, frozen=True):
    """A network interface of a VMI."""

    sriov: dict[str, Any] | None = None


class Devices(_AdmittedObject, frozen=True):
    """A VMI's `spec.domain.devices`."""

    disks: list[Disk] | None = None
    gpus: list[HostDevice] | None = None
    host_devices: list[HostDevice] | None = None
    interfaces: list[Interface] | None = None


class VmiDomain(_AdmittedObject, frozen=True):
    """A VMI's `spec.domain`."""

    cpu: Cpu | None = None
    memory: Memory | None = None
    resources: AdmittedResources | None = None
    devices: Devices | None = None
    io_threads_policy: str | None = None
    io_threads: IoThreads | None = None


class VmiSpec(_AdmittedObject, frozen=True):
    """A VMI's `spec`."""

    domain: VmiDomain = VmiDomain()
    architecture: str | None = None


class Vmi(_AdmittedObject, frozen=True):
    """A VirtualMachineInstance."""

    spec: VmiSpec = VmiSpec()
    metadata: AdmittedMetadata = AdmittedMetadata()


class VmiTemplate(_AdmittedObject, frozen=True):
    """A VM's `spec.template`; its metadata may be left out altogether."""

    spec: VmiSpec = VmiSpec()
    metadata: AdmittedMetadata | None = None


class VmSpec(_AdmittedObject, frozen=True):
    """A VM's `spec`."""

    template: VmiTemplate = VmiTemplate()


class Vm(_AdmittedObject, frozen=True):
    """A VirtualMachine."""

    spec: VmSpec = VmSpec()
    metadata: AdmittedMetadata = AdmittedMetadata()


_Object = TypeVar("_Object", Pod, Vm, Vmi)
_LONGEST_NAME = 253
"""Characters of the longest valid name."""
_MOST_ANNOTATIONS = 256 * 1024
"""Characters of all annotations of an object that an API server stores, which checks this after us."""
_KINDS: dict[type[Any], str] = {Pod: "Pod", Vm: "VirtualMachine", Vmi: "VirtualMachineInstance"}


def typed(raw: Mapping[str, Any], kind: type[_Object]) -> _Object:
    """Convert an object to its type; raises BadBody that names the object and the field."""
    try:
        read = msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        metadata = raw.get("metadata")
        name = metadata.get("name") if isinstance(metadata, dict) else None
        who = f"{_KINDS[kind]} {name}" if isinstance(name, str) and name else _KINDS[kind]
        raise BadBody(f"{who}: {_unquoted(raw) or fault_of(error)}") from None
    length = sum(len(key) + len(value) for key, value in (read.metadata.annotations or {}).items())
    if length > _MOST_ANNOTATIONS:
        raise BadBody(
            f"{admitted_name(kind, read.metadata, '')}: its annotations are {length} characters; at most "
            f"{_MOST_ANNOTATIONS} can be stored"
        )
    return read


def _unquoted(raw: Mapping[str, Any]) -> str:
    """Name the first annotation or label that is not text, as YAML reads `true` and `5`; empty if all are."""
    for path in (("metadata",), ("spec", "template", "metadata")):
        for part in ("annotations", "labels"):
            found: Any = raw
            for key in (*path, part):
                found = found.get(key) if isinstance(found, Mapping) else None
            for key, value in found.items() if isinstance(found, Mapping) else ():
                if not isinstance(value, str):
                    where = ".".join((*path, part, str(key)))
                    return f"{where} is {shown(value)}; it must be a string, so quote it"
    return ""


def read_quantity(value: Quantity, where: str) -> Fraction:
    """Read a quantity of CPUs; raises Misconfigured that begins with `where`."""
    try:
        return parse_quantity(value)
    except ValueError as error:
        raise Misconfigured(f"{where}: {error}") from None


def read_bytes(value: Quantity, where: str) -> Bytes:
    """Read a quantity of bytes that a request can hold; raises Misconfigured that begins with `where`."""
    try:
        count = parse_bytes(value)
    except ValueError as error:
        raise Misconfigured(f"{where}: {error}") from None
    if count > MAX_BYTES:
        raise Misconfigured(f"{where}: {shown(value)} is more than 1Ei")
    return count


def is_guaranteed(spec: AdmittedPodSpec, what: str) -> bool:
    """Whether Kubernetes would put the pod into QoS class Guaranteed."""
    for container in [*spec.containers, *(spec.init_containers or [])]:
        for key, resource in (("cpu", "CPU"), ("memory", "memory")):
            limit = container.limited.get(key)
            if limit is None:
                return False
            where = f"{what}: container {container.name}: {resource}"
            if read_quantity(container.requested.get(key, limit), where) != read_quantity(limit, where):
                return False
    return True


def whole_pages(memory: Bytes, size: Bytes, where: str) -> int:
    """Count the pages of an amount of memory; raises Misconfigured for more than a request can hold."""
    count = -(-memory // size)
    if count > MOST_PAGES:
        raise Misconfigured(f"{where}: {count} pages are more than {MOST_PAGES}; use larger ones")
    return count


def admitted_name(kind: type[Pod | Vm | Vmi], metadata: AdmittedMetadata, namespace: str) -> str:
    """Name an object in a sentence, `Pod default/db-…` while the API server has not generated the name.

    It is not longer than a valid name makes it: the API server checks names only after the webhooks.
    """
    name = metadata.name or f"{(metadata.generate_name or '')[:_LONGEST_NAME]}…"
    within = namespace or metadata.namespace or "default"
    return f"{_KINDS[kind]} {within[:_LONGEST_NAME]}/{name[:_LONGEST_NAME]}"
