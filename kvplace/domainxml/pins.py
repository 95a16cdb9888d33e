"""`<cputune>`: the vCPUs and I/O threads of a domain, and the CPUs that these and the emulator may use.

Threads are counted as libvirt counts them. `<vcpu>` alone is not enough: KubeVirt includes every socket that
can be hot-plugged (sixteen for a VM of four), so the enabled entries of `<vcpus>`, or `current`, decide.

All pins are replaced, because KubeVirt passes the document two or three times per boot. Shares, quotas,
schedulers and cache allocations are not ours and stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lxml import etree

from kvplace.core.cpuset import format_cpu_list
from kvplace.core.errors import BadDomainXml
from kvplace.core.placement import Placement
from kvplace.core.quantity import counted
from kvplace.domainxml.document import add_to_root, align, only_child, remove, text_of

MAX_IDS = 65535
"""Most vCPUs, and most I/O threads, that a document may name (libvirt's schema for `<vcpu>`)."""


_PINS = ("vcpupin", "emulatorpin", "iothreadpin")


@dataclass(frozen=True, slots=True)
class Vcpus:
    """The ids of a domain's vCPUs, ascending."""

    enabled: tuple[int, ...]
    pluggable: tuple[int, ...]
    """Ids that are disabled now and can be plugged in while the VM runs."""


def vcpus_of(root: etree._Element) -> Vcpus:
    """Count the vCPUs; raises BadDomainXml where libvirt would refuse the count."""
    vcpu = only_child(root, "vcpu")
    most = 1 if vcpu is None else _number(text_of(vcpu), "<vcpu>", 1)
    entries = [] if (listed := only_child(root, "vcpus")) is None else listed.findall("vcpu")
    if entries:
        enabled = _enabled(entries, most)
    else:
        current = None if vcpu is None else vcpu.get("current")
        count = most if current is None else _number(current, "<vcpu current>", 1)
        if count > most:
            raise BadDomainXml(f"<vcpu current> is {count}, above the {most} vCPUs that <vcpu> allows")
        enabled = set(range(count))
    return Vcpus(
        enabled=tuple(sorted(enabled)),
        pluggable=tuple(number for number in range(most) if number not in enabled),
    )


def io_threads_of(root: etree._Element) -> tuple[int, ...]:
    """List the ids of the I/O threads that exist, ascending.

    The ids of `<iothreadids>` count first, then the lowest free ids up to `<iothreads>`. An `<iothreads>`
    inside the driver of a disk or controller only refers to these.
    """
    element = only_child(root, "iothreads")
    count = 0 if element is None else _number(text_of(element), "<iothreads>", 0)
    named: set[int] = set()
    for entry in root.iterfind("iothreadids/iothread"):
        number = _number(entry.get("id"), "<iothreadids><iothread id>", 1)
        if number in named:
            raise BadDomainXml(f"<iothreadids> contains I/O thread {number} twice")
        named.add(number)
    candidate = 1
    while len(named) < count:
        named.add(candidate)
        candidate += 1
    return tuple(sorted(named))


def _enabled(entries: list[etree._Element], most: int) -> set[int]:
    enabled: set[int] = set()
    for entry in entries:
        number = _number(entry.get("id"), "<vcpus><vcpu id>", 0)
        if number >= most:
            raise BadDomainXml(f"<vcpus> contains vCPU {number}, but <vcpu> allows only {most} vCPUs")
        if entry.get("enabled") == "yes":
            enabled.add(number)
    if 0 not in enabled:
        raise BadDomainXml("<vcpus> disables vCPU 0, which every VM needs; enable it")
    return enabled


def _number(text: str | None, where: str, least: int) -> int:
    written = (text or "").strip()
    number = int(written) if written.isascii() and written.isdigit() and len(written) <= 6 else -1
    if not least <= number <= MAX_IDS:
        raise BadDomainXml(f"{where} is {written[:40]!r}, not a whole number from {least} to {MAX_IDS}")
    return number


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
        yield etree.Element("vcpupin", vcpu=str(vcpu), cpuset=format_cpu_list(placement.cpus_of_vcpu(vcpu)))


def _emulator_pin(placement: Placement) -> Iterator[etree._Element]:
    if placement.emulator_cpus:
        yield etree.Element("emulatorpin", cpuset=format_cpu_list(placement.emulator_cpus))


def _io_thread_pins(placement: Placement, io_threads: tuple[int, ...]) -> Iterator[etree._Element]:
    for order, number in enumerate(io_threads):
        if cpus := placement.cpus_of_io_thread(order):
            yield etree.Element("iothreadpin", iothread=str(number), cpuset=format_cpu_list(cpus))
