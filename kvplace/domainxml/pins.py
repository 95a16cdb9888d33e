"""`<cputune>`: which CPUs each vCPU, the emulator and each I/O thread may use.

All pins are replaced, because KubeVirt passes the document two or three times per boot. Shares, quotas,
schedulers and cache allocations are not ours and stay.
"""

from __future__ import annotations

from collections.abc import Iterator

from lxml import etree

from kvplace.core.cpuset import format_cpu_list
from kvplace.core.errors import BadDomainXml
from kvplace.core.placement import Placement
from kvplace.core.quantity import counted
from kvplace.domainxml.threads import Vcpus
from kvplace.domainxml.whitespace import add_to_root, align, remove

_PINS = ("vcpupin", "emulatorpin", "iothreadpin")


def pin_threads(
    root: etree._Element, placement: Placement, vcpus: Vcpus, io_threads: tuple[int, ...]
) -> None:
    """Replace every pin; raises BadDomainXml when the placement has fewer CPUs than vCPUs are enabled."""
    pins = [*_vcpu_pins(placement, vcpus), *_emulator_pin(placement), *_io_thread_pins(placement, io_threads)]
    _replace_pins(root, pins)


def remove_pins(root: etree._Element) -> None:
    """Remove every pin."""
    _replace_pins(root, [])


def _replace_pins(root: etree._Element, pins: list[etree._Element]) -> None:
    sections = root.findall("cputune")
    if sections:
        cputune = sections[0]
    elif not pins:
        return
    else:
        cputune = etree.Element("cputune")
        vcpus_element = root.find("vcpus")
        add_to_root(root, cputune, after=vcpus_element if vcpus_element is not None else root.find("vcpu"))
    old = [child for child in cputune if child.tag in _PINS]
    place = cputune.index(old[0]) if old else len(cputune)
    for stale in old + [child for section in sections[1:] for child in section if child.tag in _PINS]:
        remove(stale)
    cputune[place:place] = pins
    align(root, cputune)


def _vcpu_pins(placement: Placement, vcpus: Vcpus) -> Iterator[etree._Element]:
    if placement.vcpus and vcpus.enabled[-1] >= len(placement.vcpus):
        raise BadDomainXml(
            f"the domain starts with {counted(len(vcpus.enabled), 'vCPU')} (highest id {vcpus.enabled[-1]}) "
            f"but the placement has CPUs for {len(placement.vcpus)}: the VM has changed since; restart it"
        )
    for vcpu in sorted(vcpus.enabled + vcpus.pluggable):
        yield _element("vcpupin", vcpu=str(vcpu), cpuset=format_cpu_list(placement.cpus_of_vcpu(vcpu)))


def _emulator_pin(placement: Placement) -> Iterator[etree._Element]:
    if placement.emulator_cpus:
        yield _element("emulatorpin", cpuset=format_cpu_list(placement.emulator_cpus))


def _io_thread_pins(placement: Placement, io_threads: tuple[int, ...]) -> Iterator[etree._Element]:
    for order, number in enumerate(io_threads):
        if cpus := placement.cpus_of_io_thread(order):
            yield _element("iothreadpin", iothread=str(number), cpuset=format_cpu_list(cpus))


def _element(name: str, **attributes: str) -> etree._Element:
    element = etree.Element(name)
    for key, value in attributes.items():
        element.set(key, value)
    return element
