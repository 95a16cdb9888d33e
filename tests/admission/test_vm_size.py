"""A VM's size as KubeVirt itself computes it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from lxml import etree

from kvplace.admission.objects import Vmi, typed
from kvplace.admission.size import Size, size_of_vm
from kvplace.core.errors import Misconfigured
from kvplace.core.scalars import Bytes
from tests.admission.reviewed_objects import vmi
from tests.kubevirt_documents import DOMAINS

GI = Bytes(1 << 30)
each_vmi = pytest.mark.parametrize("path", sorted(DOMAINS.glob("*.vmi.json")), ids=lambda path: path.stem)


def size(raw: dict[str, Any]) -> Size:
    return size_of_vm(typed(raw, Vmi).spec.domain, "VirtualMachineInstance default/db: spec")


@each_vmi
def test_it_is_the_size_of_the_domain_that_kubevirt_makes_of_the_vmi(path: Path) -> None:
    domain = etree.parse(path.with_name(path.name.replace(".vmi.json", ".domain.xml"))).getroot()
    found = size(json.loads(path.read_text()))

    enabled = domain.findall("vcpus/vcpu[@enabled='yes']")
    assert found.vcpus == (len(enabled) if enabled else int(domain.findtext("vcpu") or ""))
    assert found.memory == int(domain.findtext("memory") or "")
    assert found.io_threads == _io_threads(domain)
    pages = domain.find("memoryBacking/hugepages")
    assert bool(found.huge_pages) is (pages is not None)


def _io_threads(domain: etree._Element) -> int:
    pool = {entry.get("id") for entry in domain.findall(".//driver/iothreads/iothread")}
    return len(pool) or int(domain.findtext("iothreads") or 0)


@pytest.mark.parametrize(
    ("domain", "vcpus"),
    [
        ({"cpu": {"sockets": 64, "cores": 64}}, 4096),
        ({"cpu": {"sockets": 2, "cores": 3, "threads": 2}}, 12),
        ({"cpu": {"cores": 2}}, 2),
        ({"cpu": {"cores": 2, "sockets": 0, "threads": 0}}, 2),
        ({"cpu": {"sockets": 1}, "resources": {"limits": {"cpu": "8"}}}, 1),
        ({"cpu": None, "resources": {"requests": {"cpu": "2500m"}}}, 3),
        ({"cpu": {}, "resources": {"requests": {"cpu": "2"}, "limits": {"cpu": 4}}}, 4),
        ({"cpu": None}, 1),
        ({"cpu": None, "resources": {"limits": {"cpu": "0"}}}, 1),
    ],
)
def test_vcpus_come_from_the_topology_else_the_limit_else_the_request_else_one(
    domain: dict[str, Any], vcpus: int
) -> None:
    assert size(vmi(**domain)).vcpus == vcpus


@pytest.mark.parametrize(
    ("domain", "memory", "huge_pages"),
    [
        ({"memory": {"guest": "8Gi"}, "resources": {"requests": {"memory": "9Gi"}}}, 8 * GI, {}),
        (
            {"memory": None, "resources": {"requests": {"memory": "2Gi"}, "limits": {"memory": "3Gi"}}},
            2 * GI,
            {},
        ),
        ({"memory": {}, "resources": {"limits": {"memory": "3Gi"}}}, 3 * GI, {}),
        ({"memory": None}, 0, {}),
        ({"memory": {"guest": "8Gi", "hugepages": {"pageSize": "1Gi"}}}, 8 * GI, {GI: 8}),
        ({"memory": {"guest": "1Ei"}}, 1 << 60, {}),
        ({"memory": {"guest": "5Mi", "hugepages": {"pageSize": "2Mi"}}}, 5 << 20, {2 << 20: 3}),
        ({"memory": {"hugepages": {"pageSize": "1Gi"}}}, GI, {GI: 1}),
    ],
)
def test_memory_is_that_of_the_guest_and_huge_pages_hold_all_of_it(
    domain: dict[str, Any], memory: int, huge_pages: dict[int, int]
) -> None:
    found = size(vmi(**domain))
    assert (found.memory, found.huge_pages) == (memory, huge_pages)


SHARED, OWN = {"name": "d"}, {"name": "d", "dedicatedIOThread": True}


@pytest.mark.parametrize(
    ("policy", "disks", "more", "threads"),
    [
        (None, [SHARED, SHARED], {}, 0),
        (None, [SHARED, SHARED, OWN], {}, 2),
        (None, [OWN], {}, 1),
        ("shared", [SHARED, SHARED, SHARED], {}, 1),
        ("shared", [SHARED, OWN, OWN], {}, 3),
        ("shared", [], {}, 0),
        ("auto", [SHARED] * 5, {}, 2),
        ("auto", [SHARED] * 5, {"resources": {"requests": {"cpu": "2"}}}, 4),
        ("auto", [SHARED] * 5 + [OWN], {"resources": {"requests": {"cpu": "2"}}}, 4),
        ("auto", [SHARED] * 3, {"resources": {"limits": {"cpu": "2"}}}, 3),
        ("auto", [SHARED] * 3, {"cpu": {"dedicatedCpuPlacement": True, "isolateEmulatorThread": True}}, 1),
        ("auto", [SHARED] * 3, {"cpu": {"dedicatedCpuPlacement": True}}, 2),
        ("auto", [SHARED] * 3, {"cpu": {"isolateEmulatorThread": True}}, 2),
        ("supplementalPool", [SHARED], {"ioThreads": {"supplementalPoolThreadCount": 6}}, 6),
        ("supplementalPool", [SHARED], {"ioThreads": {"supplementalPoolThreadCount": 256}}, 256),
        ("supplementalPool", [SHARED], {}, 0),
    ],
)
def test_io_threads_follow_the_policy_and_the_disks(
    policy: str | None, disks: list[dict[str, Any]], more: dict[str, Any], threads: int
) -> None:
    assert size(vmi(ioThreadsPolicy=policy, devices={"disks": disks}, **more)).io_threads == threads


AT = "VirtualMachineInstance default/db: spec.domain"


@pytest.mark.parametrize(
    ("domain", "sentence"),
    [
        (
            {"memory": {"guest": "4G1"}},
            f"{AT}.memory.guest: '4G1' is not a quantity such as 8Gi, 512Mi, 4 or 500m",
        ),
        (
            {"cpu": None, "resources": {"limits": {"cpu": "four"}}},
            f"{AT}.resources.limits.cpu: 'four' is not a quantity such as 8Gi, 512Mi, 4 or 500m",
        ),
        (
            {"cpu": None, "resources": {"requests": {"cpu": "-4"}}},
            f"{AT}.resources.requests.cpu: '-4' is negative; write the number of CPUs",
        ),
        *(
            (
                {"memory": None, "resources": {source: {"memory": "much"}}},
                f"{AT}.resources.{source}.memory: 'much' is not a quantity such as 8Gi, 512Mi, 4 or 500m",
            )
            for source in ("requests", "limits")
        ),
        (
            {"memory": {"hugepages": {"pageSize": "big"}}},
            f"{AT}.memory.hugepages.pageSize: 'big' is not a quantity such as 8Gi, 512Mi, 4 or 500m",
        ),
        (
            {"ioThreadsPolicy": "auto", "resources": {"requests": {"cpu": "two"}}},
            f"{AT}.resources.requests.cpu: 'two' is not a quantity such as 8Gi, 512Mi, 4 or 500m",
        ),
        (
            {"cpu": {"sockets": 100, "cores": 100}},
            f"{AT} has 10000 vCPUs; kvplace places VMs with 1 to 4096",
        ),
        (
            {"memory": {"guest": "1Gi", "hugepages": {"pageSize": "0"}}},
            f"{AT}.memory.hugepages.pageSize is 0; write 2Mi or 1Gi",
        ),
        (
            {"memory": {"guest": "1Ei", "hugepages": {"pageSize": "4Ki"}}},
            (
                f"{AT}.memory.hugepages.pageSize: 281474976710656 pages are more than 1099511627776; use "
                "larger ones"
            ),
        ),
        (
            {"memory": {"guest": "2Ei"}},
            f"{AT}.memory.guest: '2Ei' is more than 1Ei",
        ),
        (
            {"ioThreadsPolicy": "supplementalPool", "ioThreads": {"supplementalPoolThreadCount": 257}},
            f"{AT} has 257 I/O threads; kvplace places at most 256",
        ),
    ],
)
def test_an_invalid_size_is_refused_with_its_path(domain: dict[str, Any], sentence: str) -> None:
    with pytest.raises(Misconfigured, match=f"^{re.escape(sentence)}$"):
        size(vmi(**domain))


@pytest.mark.parametrize(
    ("domain", "sentence"),
    [
        ({"cpu": {"cores": "4"}}, "spec.domain.cpu.cores: expected int, got str"),
        ({"cpu": {"cores": -1}}, "spec.domain.cpu.cores: expected int >= 0"),
        ({"devices": []}, "spec.domain.devices: expected object, got array"),
    ],
)
def test_a_field_of_the_wrong_type_is_refused_with_its_path(domain: dict[str, Any], sentence: str) -> None:
    whole = f"VirtualMachineInstance db: {sentence}"
    with pytest.raises(Misconfigured, match=f"^{re.escape(whole)}$"):
        size(vmi(**domain))
