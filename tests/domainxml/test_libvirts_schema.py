"""A document that libvirt's own schema accepts before, it accepts after."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lxml import etree

from kvplace.core.errors import BadDomainXml
from kvplace.core.placement import Placement
from kvplace.core.request import NumaMemory
from kvplace.core.scalars import NumaId
from kvplace.domainxml import rewrite
from tests.captured import captured_files, captured_folder
from tests.domainxml.host_devices import hostdev, source
from tests.domainxml.placements import MANY_VCPUS, mirroring, placements
from tests.kubevirt_documents import DOMAIN_FILES

TWO_NODES = replace(MANY_VCPUS, numa_nodes=(NumaId(0), NumaId(1)), numa_memory=NumaMemory.STRICT)
pytestmark = pytest.mark.debian_packages
SCHEMA = Path("/usr/share/libvirt/schemas/domain.rng")
CORPUS = [*captured_files("libvirt/domains", "*.xml"), *DOMAIN_FILES]


@cache
def schema() -> etree.RelaxNG:
    if not SCHEMA.exists():
        pytest.skip(f"{SCHEMA} is missing; install libvirt0")
    return etree.RelaxNG(file=str(SCHEMA))


def is_valid(xml: bytes) -> bool:
    return bool(schema().validate(etree.fromstring(xml)))


@cache
def valid_documents() -> list[Path]:
    captured_folder("libvirt/domains")
    return [path for path in CORPUS if is_valid(path.read_bytes())]


def test_most_of_the_corpus_is_valid_to_begin_with() -> None:
    assert len(valid_documents()) >= 60


@given(data=st.data(), placement=placements(least_vcpus=40))
def test_a_valid_document_stays_valid_whatever_the_placement(
    data: st.DataObject, placement: Placement
) -> None:
    path = data.draw(st.sampled_from(valid_documents()))
    answer = rewrite(path.read_bytes(), placement)
    assert is_valid(answer), f"{path.name}: {schema().error_log.last_error}\n{answer.decode()}"


@pytest.mark.parametrize("cells", [1, 2, 5])
def test_a_valid_document_stays_valid_when_its_guest_mirrors_the_host(cells: int) -> None:
    mirrored = 0
    for path in valid_documents():
        with contextlib.suppress(BadDomainXml):  # other architectures, guests of a few bytes
            answer = rewrite(path.read_bytes(), mirroring(cells=cells, vcpus=40, threads=2))
            assert is_valid(answer), f"{path.name}: {schema().error_log.last_error}\n{answer.decode()}"
            mirrored += 1
    assert mirrored > 50


def test_a_valid_document_stays_valid_with_devices_behind_expander_buses() -> None:
    nodes = {source(number): NumaId(number % 3) for number in range(12)}
    devices = "".join(map(hostdev, range(12))).encode()
    placed = 0
    for path in valid_documents():
        xml = re.sub(rb"machine=(.)[^'\"]*\1", b"machine='q35'", path.read_bytes())
        xml = xml.replace(b"</devices>", devices + b"</devices>")
        with contextlib.suppress(BadDomainXml):
            answer = rewrite(xml, mirroring(cells=3, vcpus=48, threads=1), node_of_device=nodes)
            assert is_valid(answer), f"{path.name}: {schema().error_log.last_error}\n{answer.decode()}"
            placed += b"ua-kvplace-cell-" in answer
    assert placed > 10


@pytest.mark.parametrize("placement", [MANY_VCPUS, TWO_NODES, mirroring(cells=3, vcpus=48, threads=2)])
def test_kubevirts_documents_are_valid_but_for_fields_that_it_leaves_empty(placement: Placement) -> None:
    for path in DOMAIN_FILES:
        if placement.guest_cells and ("s390x" in path.name or "numa-hugepages" in path.name):
            continue  # no cells there, or KubeVirt's own
        root = etree.fromstring(path.read_bytes())
        for name in ("sysinfo", "devices"):  # the schema refuses their empty parts, before and after
            for element in root.findall(name):
                root.remove(element)
        xml = etree.tostring(root)
        assert is_valid(xml), path.name
        assert is_valid(rewrite(xml, placement)), path.name
