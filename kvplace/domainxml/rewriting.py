"""The one question of this room: the same domain, with its threads and memory where the placement says.

What is written survives all three readers on the way to QEMU: KubeVirt's partial schema (unknown elements
are gone from the input of its next call), libvirt's parser (which drops some contradictions without a
word, so those are refused here) and the unprivileged session driver (which can pin threads and bind
memory, and refuses shares, quotas and real-time schedulers).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from lxml import etree

from kvplace.core.errors import BadDomainXml
from kvplace.core.placement import Placement
from kvplace.domainxml.cells import mirror_host
from kvplace.domainxml.document import parse
from kvplace.domainxml.memory import bind_memory
from kvplace.domainxml.pins import pin_threads
from kvplace.domainxml.threads import io_threads_of, only_child, vcpus_of

_NOTHING_KNOWN: Mapping[int, int] = MappingProxyType({})


def _tell_nobody(_sentence: str) -> None:
    pass


def rewrite(
    xml: bytes,
    placement: Placement,
    node_of_cpu: Mapping[int, int] = _NOTHING_KNOWN,
    tell: Callable[[str], None] = _tell_nobody,
) -> bytes:
    """Pin every vCPU, the emulator and every I/O thread of a domain, and bind its memory.

    A guest that mirrors the host gets its cells, too. The answer depends on the arguments alone and on
    nothing that an earlier rewriting left: rewriting an answer with another placement gives what rewriting
    the original with it would have given, except that guest cells, once written, are not taken out again.
    `node_of_cpu` (CPU to host NUMA node) is needed only to give other guests' NUMA cells memory of their
    own node. `tell` is given a sentence when less can be done than was asked for.
    Raises BadDomainXml with one sentence; never answers with less than a whole document.
    """
    document = parse(xml)
    root = document.root
    vcpus, io_threads = vcpus_of(root), io_threads_of(root)
    _make_static(only_child(root, "vcpu"))
    pin_threads(root, placement, vcpus, io_threads)
    if placement.guest_cells:
        mirror_host(root, placement, vcpus, tell)
    bind_memory(root, placement, node_of_cpu)
    return document.to_bytes()


def _make_static(vcpu: etree._Element | None) -> None:
    """Say that the pins are ours: with `auto` libvirt would ask numad instead."""
    if vcpu is None:
        return
    if vcpu.get("placement") == "auto" and vcpu.get("cpuset"):
        raise BadDomainXml(
            "<vcpu> has placement='auto' and a cpuset, which libvirt drops without a word; remove one of them"
        )
    vcpu.set("placement", "static")
