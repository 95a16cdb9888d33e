"""Writes a placement into a domain: thread pins, the memory binding and, on request, guest NUMA cells.

The result survives all three readers on the way to QEMU: KubeVirt's partial schema (which drops unknown
elements from the input of its next call), libvirt's parser (which silently drops some contradictions, so
those are refused here) and the unprivileged session driver (which can pin threads and bind memory, and
refuses shares, quotas and real-time schedulers).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from lxml import etree

from kvplace.core.errors import BadDomainXml
from kvplace.core.placement import Placement
from kvplace.core.request import Policy
from kvplace.core.scalars import NO_CPUS, CpuId, NumaId
from kvplace.domainxml.cells import mirror_host
from kvplace.domainxml.document import only_child, parse
from kvplace.domainxml.host_devices import AssignedDevice, assigned_devices, place_devices
from kvplace.domainxml.memory import bind_memory
from kvplace.domainxml.pins import io_threads_of, pin_threads, remove_pins, vcpus_of

_UNKNOWN: Mapping[CpuId, NumaId] = MappingProxyType({})
_UNBOUND = Placement(Policy.NONE, (), NO_CPUS)


def _ignore(_sentence: str) -> None:
    pass


def rewrite(
    xml: bytes,
    placement: Placement,
    node_of_cpu: Mapping[CpuId, NumaId] = _UNKNOWN,
    warn: Callable[[str], None] = _ignore,
    node_of_device: Mapping[str, NumaId] | None = None,
) -> bytes:
    """Pin every vCPU, the emulator and every I/O thread of a domain, and bind its memory.

    A guest with `guest-numa: mirror` gets its NUMA cells, too, and its devices in them where
    `node_of_device` has the NUMA node of each address on the host. The result depends on the arguments alone:
    rewriting a result with another placement gives the same as rewriting the original with it, except that
    guest cells, once written, are not removed again. `node_of_cpu` (CPU to host NUMA node) is only needed to
    bind the cells that KubeVirt wrote to a node each. `warn` gets a sentence when less can be done than was
    asked for. Raises BadDomainXml with one sentence; never returns less than a whole document.
    """
    document = parse(xml)
    root = document.root
    vcpus, io_threads = vcpus_of(root), io_threads_of(root)
    _make_static(only_child(root, "vcpu"))
    pin_threads(root, placement, vcpus, io_threads)
    if placement.guest_cells:
        mirror_host(root, placement, vcpus, warn)
        place_devices(root, placement.guest_cells, node_of_device or {}, warn)
    bind_memory(root, placement, node_of_cpu, warn)
    return document.to_bytes()


def devices_of(xml: bytes) -> tuple[AssignedDevice, ...]:
    """List the PCI and mediated devices that a domain gets; raises BadDomainXml."""
    return tuple(device for _, device in assigned_devices(parse(xml).root))


def unpin(xml: bytes) -> bytes:
    """Remove every pin and memory binding: the numbers of another machine mean nothing on this one."""
    document = parse(xml)
    remove_pins(document.root)
    bind_memory(document.root, _UNBOUND, _UNKNOWN, _ignore)
    return document.to_bytes()


def _make_static(vcpu: etree._Element | None) -> None:
    """Set placement='static': with `auto` libvirt would ask numad for CPUs instead."""
    if vcpu is None:
        return
    if vcpu.get("placement") == "auto" and vcpu.get("cpuset"):
        raise BadDomainXml(
            "<vcpu> has placement='auto' and a cpuset, which libvirt silently drops; remove one of the two"
        )
    vcpu.set("placement", "static")
