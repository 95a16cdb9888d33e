"""Which vCPUs and I/O threads a domain has, counted as libvirt counts them.

`<vcpu>` alone is not enough: KubeVirt includes every socket that can be hot-plugged (sixteen for a VM of
four), so the enabled entries of `<vcpus>`, or `current`, decide.
"""

from __future__ import annotations

from dataclasses import dataclass

from lxml import etree

from kvplace.core.errors import BadDomainXml
from kvplace.domainxml.document import text_of

MAX_IDS = 65535
"""Most vCPUs, and most I/O threads, that a document may name (libvirt's schema for `<vcpu>`)."""


@dataclass(frozen=True, slots=True)
class Vcpus:
    """The ids of a domain's vCPUs, ascending."""

    enabled: tuple[int, ...]
    pluggable: tuple[int, ...]
    """Ids that are disabled now and can be plugged in while the VM runs."""


def only_child(root: etree._Element, name: str) -> etree._Element | None:
    """Find the one child of that name; raises BadDomainXml when there are several, which libvirt misreads."""
    found = root.findall(name)
    if len(found) > 1:
        raise BadDomainXml(f"the domain has {len(found)} <{name}> elements, but libvirt reads one; keep one")
    return found[0] if found else None


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
