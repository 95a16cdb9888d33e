"""Parts that all VMs of one template would share though each needs its own: disks, addresses, ids. Pure.

A template that was read from a cluster has the disks of that VM, and its MAC addresses and UUID where
KubeVirt or another client has written them into it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import msgspec

_T = TypeVar("_T", bound=msgspec.Struct)


class _Part(msgspec.Struct, frozen=True, rename="camel"):
    """Fields as KubeVirt spells them; `null` means the same as a missing field."""


class _Metadata(_Part, frozen=True):
    name: str | None = None


class _DataVolumeTemplate(_Part, frozen=True):
    metadata: _Metadata | None = None


class _DataVolume(_Part, frozen=True):
    name: str | None = None


class _Claim(_Part, frozen=True):
    claim_name: str | None = None
    read_only: bool | None = None


class _Volume(_Part, frozen=True):
    name: str | None = None
    persistent_volume_claim: _Claim | None = None
    data_volume: _DataVolume | None = None


class _Disk(_Part, frozen=True):
    name: str | None = None
    cdrom: dict[str, Any] | None = None


class _Interface(_Part, frozen=True):
    name: str | None = None
    mac_address: str | None = None


class _Devices(_Part, frozen=True):
    disks: list[_Disk] | None = None
    interfaces: list[_Interface] | None = None


class _Firmware(_Part, frozen=True):
    uuid: str | None = None
    serial: str | None = None


class _Domain(_Part, frozen=True):
    devices: _Devices | None = None
    firmware: _Firmware | None = None


class _VmiSpec(_Part, frozen=True):
    domain: _Domain | None = None
    volumes: list[_Volume] | None = None


class _VmiTemplate(_Part, frozen=True):
    spec: _VmiSpec | None = None


class _VmSpec(_Part, frozen=True):
    template: _VmiTemplate | None = None
    data_volume_templates: list[_DataVolumeTemplate] | None = None


def data_volumes(content: Mapping[str, Any]) -> tuple[str, ...]:
    """Name the DataVolumes that KubeVirt makes for the first VM, and that the others would take from it."""
    spec = _read(content["spec"], _VmSpec) if content["kind"] == "VirtualMachine" else _VmSpec()
    found = (one.metadata.name if one.metadata else None for one in spec.data_volume_templates or ())
    return tuple(name for name in found if name)


def common_parts(content: Mapping[str, Any]) -> tuple[str, ...]:
    """Name what else the VMs would have in common, in words for people."""
    spec: _VmiSpec | None
    if content["kind"] == "VirtualMachine":
        template = _read(content["spec"], _VmSpec).template
        spec = template.spec if template else None
    else:
        spec = _read(content["spec"], _VmiSpec)
    return () if spec is None else tuple(_parts(spec))


def _parts(spec: _VmiSpec) -> Iterator[str]:
    domain = spec.domain or _Domain()
    devices, firmware = domain.devices or _Devices(), domain.firmware or _Firmware()
    read_only = {disk.name for disk in devices.disks or () if disk.cdrom is not None}
    for volume in spec.volumes or ():
        claim, data_volume = volume.persistent_volume_claim, volume.data_volume
        if volume.name in read_only:
            continue
        if claim is not None and claim.claim_name and not claim.read_only:
            yield f"PersistentVolumeClaim {claim.claim_name}"
        if data_volume is not None and data_volume.name:
            yield f"DataVolume {data_volume.name}"
    for interface in devices.interfaces or ():
        if interface.mac_address:
            yield f"MAC address {interface.mac_address}"
    if firmware.uuid:
        yield f"firmware UUID {firmware.uuid}"
    if firmware.serial:
        yield f"firmware serial number {firmware.serial}"


def _read(content: object, kind: type[_T]) -> _T:
    """Read what concerns this module; where the shape is wrong the API server reports it."""
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError:
        return kind()
