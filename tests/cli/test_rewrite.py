"""`kvplace rewrite` rewrites files as the hook rewrites domains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lxml import etree

from kvplace.cli.place_session import PlaceSession
from kvplace.core.cpuset import cpus_of, format_cpu_list
from kvplace.core.placement import PodPlacement
from kvplace.core.scalars import NodeName, PodUid
from kvplace.domainxml import rewrite
from kvplace.domainxml.pins import vcpus_of
from kvplace.machines.machine import Machine
from kvplace.machines.server_types import read_machine
from tests.cli.calls import Caller
from tests.kubevirt_documents import DOMAINS

DOMAIN = "<domain type='kvm'>\n  <name>vm</name>\n  <vcpu>2</vcpu>\n</domain>\n"


@pytest.fixture
def domain(tmp_path: Path) -> Path:
    path = tmp_path / "domain.xml"
    path.write_text(DOMAIN, encoding="utf-8")
    return path


def test_an_answer_of_place_pins_a_kubevirt_domain(kvplace: Caller, tmp_path: Path) -> None:
    xml = DOMAINS / "09-amd64-iothreads-shared.domain.xml"
    vcpus = len(vcpus_of(etree.fromstring(xml.read_bytes())).enabled)
    answer = PlaceSession(Machine("node", read_machine("epyc-7502p"))).answer(
        json.dumps({"vcpus": vcpus, "memory": "1Gi"})
    )
    placed = tmp_path / "placed.json"
    placed.write_text(json.dumps(answer.document), encoding="utf-8")
    called = kvplace("rewrite", "--domain", str(xml), "--placement", str(placed))
    assert called.code == 0
    placement = PodPlacement.from_json(json.dumps(answer.document["placement"]))
    assert called.out.encode() == rewrite(xml.read_bytes(), placement.placement)
    pins = etree.fromstring(called.out.encode()).findall("cputune/vcpupin")
    assert [int(pin.get("cpuset", "")) for pin in pins[:vcpus]] == answer.document["placement"]["vcpus"]


def test_a_mirrored_guest_gets_its_cells_and_stderr_reports_the_missing_parts(
    kvplace: Caller, tmp_path: Path
) -> None:
    xml = DOMAINS / "01-amd64-plain-4vcpu.domain.xml"
    server = read_machine("2x-epyc-9354")
    near, far = (next(iter(cpus_of(package.cpus & ~server.reserved))) for package in server.packages)
    free = format_cpu_list(server.core_of[near] | server.core_of[far])
    request = {"vcpus": 4, "cpuSet": "spread-numa", "guestNuma": "mirror", "memory": "4Gi", "free": free}
    placed = tmp_path / "placed.json"
    answer = PlaceSession(Machine("node", server)).answer(json.dumps(request))
    placed.write_text(json.dumps(answer.document), encoding="utf-8")
    called = kvplace("rewrite", "--domain", str(xml), "--placement", str(placed))
    assert called.code == 0
    cells = etree.fromstring(called.out.encode()).findall("cpu/numa/cell")
    assert [int(cell.get("memory", "")) for cell in cells] == [2 << 30, 2 << 30]
    assert called.err.startswith("kvplace: 12 vCPUs that can be plugged in later are assigned to the guest's")


def test_a_bare_cpu_map_or_an_annotation_is_enough(kvplace: Caller, domain: Path, tmp_path: Path) -> None:
    called = kvplace("rewrite", "--domain", str(domain), "--cpu-map", '{"socket0": ["2", "34"]}')
    assert '<vcpupin vcpu="1" cpuset="34"/>' in called.out
    annotation = tmp_path / "placement"
    placement = PodPlacement.of_cpu_map('{"socket0": ["2", "34"]}')
    annotation.write_text(placement.to_json(), encoding="utf-8")
    assert kvplace("rewrite", "--domain", str(domain), "--placement", str(annotation)).out == called.out
    again = kvplace("rewrite", "--domain", "-", "--placement", str(annotation), stdin=called.out)
    assert again.out == called.out


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        ("{", "placement.json is not valid JSON"),
        ("", "placement.json is empty"),
        ('{"placement": {}}\n{"placement": {}}\n', "contains 2 answers; give the answer for this VM only"),
        ('{"error": "what?"}', "placement.json contains no placement"),
        ('{"version": 1, "version": 1}', "duplicate key 'version'"),
        ("[]", "must be a JSON object"),
        ('{"refusal": {}}', "contains a refusal"),
        ('{"version": 9}', "has version 9"),
        (PodPlacement.floating(pod_uid=PodUid("u"), node=NodeName("n")).to_json(), "runs unpinned"),
    ],
)
def test_a_placement_that_pins_nothing_is_refused(
    kvplace: Caller, domain: Path, tmp_path: Path, placement: str, words: str
) -> None:
    path = tmp_path / "placement.json"
    path.write_text(placement, encoding="utf-8")
    called = kvplace("rewrite", "--domain", str(domain), "--placement", str(path))
    assert (called.code, called.out) == (2, "")
    assert words in called.err
    assert called.err.count("\n") == 1


def test_a_vmi_that_is_a_migration_target_gets_a_note(kvplace: Caller, domain: Path, tmp_path: Path) -> None:
    captured = DOMAINS / "01-amd64-plain-4vcpu.vmi.json"
    pinned = ("rewrite", "--domain", str(domain), "--cpu-map", '{"socket0": ["2", "34"]}')
    plain = kvplace(*pinned)
    assert kvplace(*pinned, "--vmi", str(captured)) == plain
    target = json.loads(captured.read_text(encoding="utf-8"))
    target.setdefault("status", {})["migrationState"] = {"targetPod": "virt-launcher-b"}
    shown = kvplace(*pinned, "--vmi", "-", stdin=json.dumps(target))
    assert (shown.code, shown.out) == (0, plain.out)
    assert "KubeVirt discards this answer" in shown.err


@pytest.mark.parametrize(
    ("vmi", "words"),
    [
        ("", "contains nothing"),
        ('{"kind": "Pod", "metadata": {}}', "is not a VirtualMachineInstance"),
        ('{"metadata": {}, "status": 3}', "status.migrationState must be a mapping"),
    ],
)
def test_a_document_that_is_not_a_vmi_is_refused(kvplace: Caller, domain: Path, vmi: str, words: str) -> None:
    pinned = ("rewrite", "--domain", str(domain), "--cpu-map", '{"socket0": ["2", "34"]}')
    called = kvplace(*pinned, "--vmi", "-", stdin=vmi)
    assert (called.code, called.out) == (2, "")
    assert words in called.err
    assert called.err.count("\n") == 1


@pytest.mark.parametrize(
    ("xml", "words"),
    [
        ("", "is empty"),
        ("<domain>", "not well-formed"),
        ("<network/>", "not <domain>"),
        ('<!DOCTYPE d [<!ENTITY a "b">]><domain>&a;</domain>', "DOCTYPE"),
        ("<domain><vcpu>3</vcpu></domain>", "3 vCPUs"),
    ],
)
def test_a_domain_that_cannot_be_pinned_is_refused(kvplace: Caller, xml: str, words: str) -> None:
    called = kvplace("rewrite", "--domain", "-", "--cpu-map", '{"socket0": ["2", "3"]}', stdin=xml)
    assert (called.code, called.out) == (2, "")
    assert words in called.err
    assert called.err.count("\n") == 1


def test_a_missing_file_and_an_invalid_cpu_map_are_named(
    kvplace: Caller, domain: Path, tmp_path: Path
) -> None:
    called = kvplace("rewrite", "--domain", str(tmp_path / "none.xml"), "--cpu-map", "{}")
    assert called.code == 2
    assert "none.xml cannot be read: No such file or directory" in called.err
    assert "--cpu-map '{}' names no CPU" in kvplace("rewrite", "--domain", str(domain), "--cpu-map", "{}").err
    both = kvplace("rewrite", "--domain", "-", "--placement", "-")
    assert "--domain and --placement cannot both be stdin" in both.err
