"""The answer to OnDefineDomain: pinned, or what the VM's owner wants instead."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvplace.core.errors import BadDomainXml, Corrupt, KvplaceError, Misconfigured
from kvplace.core.placement import PodPlacement
from kvplace.core.request import NumaMemory, OnFailure
from kvplace.core.scalars import CpuId, NodeName, PodUid
from kvplace.domainxml import MAX_DOMAIN_BYTES, rewrite
from kvplace.hook.define_domain import define_domain
from kvplace.hook.process import PodEnvironment
from tests.hook.machine import (
    DOMAIN,
    NODE,
    PLACEMENT,
    UID,
    VMI,
    PodFolder,
    broken,
    forbidden,
    logged,
    pod_environment,
    two_socket_machine,
    works,
)
from tests.kubevirt_documents import DOMAINS


def test_the_domain_is_pinned_as_the_placement_states_and_the_log_reports_it(
    env: PodEnvironment, pod: PodFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    pod.bind()
    assert define_domain(DOMAIN, VMI, env, works) == rewrite(DOMAIN, PLACEMENT)
    (line,) = logged(capfd)
    assert line["msg"] == (
        "pinned 4 vCPUs to CPUs 2-3,34-35, emulator to 0-1,32-33, memory preferred on NUMA nodes 0"
    )
    assert (line["level"], line["component"]) == ("info", "hook")
    assert (line["vm"], line["node"], line["uid"]) == ("ns/vm", NODE, "v-1")
    assert line["ts"].endswith("Z")


def test_three_chained_calls_with_kubevirts_documents_give_one_answer(
    env: PodEnvironment, pod: PodFolder
) -> None:
    pod.bind()
    folder = DOMAINS
    for name in ("01-amd64-plain-4vcpu", "09-amd64-iothreads-shared", "11-amd64-iothreads-supplementalpool"):
        xml = (folder / f"{name}.domain.xml").read_bytes()
        vmi = (folder / f"{name}.vmi.json").read_bytes()
        first = define_domain(xml, vmi, env, works)
        assert define_domain(define_domain(first, vmi, env, works), vmi, env, works) == first
        assert first != xml


def test_a_bare_cpu_map_is_sufficient(env: PodEnvironment, pod: PodFolder) -> None:
    pod.write("cpu-map", '{"socket0": ["2", "34", "3", "35"]}')
    answer = define_domain(DOMAIN, VMI, env, works)
    assert b'<vcpupin vcpu="1" cpuset="34"/>' in answer
    assert b"numatune" not in answer


OWNING = replace(PLACEMENT, owned=PLACEMENT.cpus)


@pytest.mark.parametrize("cpuset", ["0-1,4-33,36-63", "40-41"], ids=["the rest", "another NUMA node"])
def test_where_an_agent_protects_the_cpus_our_own_cpuset_decides_neither_pins_nor_memory(
    tmp_path: Path, cpuset: str, capfd: pytest.CaptureFixture[str]
) -> None:
    two_socket_machine(tmp_path, cpuset=cpuset)
    env = pod_environment(tmp_path)
    PodFolder(Path(env.pod_folder)).bind(OWNING, enforced=True)
    assert define_domain(DOMAIN, VMI, env, works) == rewrite(DOMAIN, OWNING)
    assert "memory preferred on NUMA nodes 0" in logged(capfd)[0]["msg"]


def test_a_vm_does_not_start_before_the_agent_protects_its_cpus(
    env: PodEnvironment, pod: PodFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    pod.bind(OWNING, enforced=True)
    with pytest.raises(Misconfigured, match="other containers may still use CPU 2-3,34-35"):
        define_domain(DOMAIN, VMI, env, works)
    (line,) = logged(capfd)
    assert (line["level"], line["msg"].partition(":")[0]) == ("error", "the VM waits")


def test_a_vm_that_may_float_starts_pinned_on_cpus_that_no_client_protects_and_the_log_warns(
    env: PodEnvironment, pod: PodFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    pod.bind(OWNING, enforced=True, on_failure=OnFailure.FLOAT)
    assert define_domain(DOMAIN, VMI, env, works) == rewrite(DOMAIN, OWNING)
    warning, pinned = logged(capfd)
    assert warning["level"] == "warning"
    assert warning["msg"].startswith("the VM starts because its on-failure is float: other containers may")
    assert pinned["msg"].startswith("pinned 4 vCPUs to CPUs 2-3,34-35")


def no_placement(pod: PodFolder) -> None:
    pod.write("placement", "")


def junk_placement(pod: PodFolder) -> None:
    pod.write("placement", "junk")


def forged_placement(pod: PodFolder) -> None:
    pod.bind(uid="another")


def placement_of_another_node(pod: PodFolder) -> None:
    pod.bind(node="worker-9")


def cpu_that_is_not_there(pod: PodFolder) -> None:
    pod.bind(replace(PLACEMENT, cpus=PLACEMENT.cpus | 1 << 200))


def cpu_map_outside_the_cpuset(pod: PodFolder) -> None:
    pod.write("cpu-map", '{"socket0": ["2", "34", "3", "900"]}')


def too_few_vcpus(pod: PodFolder) -> None:
    pod.bind(replace(PLACEMENT, vcpus=(CpuId(2), CpuId(34), CpuId(3))))


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (no_placement, "has neither the annotation"),
        (junk_placement, "is not valid JSON"),
        (forged_placement, "inherited or copied"),
        (placement_of_another_node, "made for node 'worker-9'"),
        (cpu_that_is_not_there, "CPU 200 of the placement is not online"),
        (cpu_map_outside_the_cpuset, "CPU 900 of the placement is not online"),
        (too_few_vcpus, "starts with 4 vCPUs"),
    ],
)
@pytest.mark.parametrize("on_failure", list(OnFailure))
def test_an_obstacle_to_pinning_is_an_error_or_an_unchanged_domain_by_on_failure(
    env: PodEnvironment,
    pod: PodFolder,
    capfd: pytest.CaptureFixture[str],
    spoil: Callable[[PodFolder], None],
    sentence: str,
    on_failure: OnFailure,
) -> None:
    pod.ask_for(on_failure)
    spoil(pod)
    if on_failure is OnFailure.WAIT:
        with pytest.raises(KvplaceError, match=sentence):
            define_domain(DOMAIN, VMI, env, works)
    else:
        assert define_domain(DOMAIN, VMI, env, works) == DOMAIN
    (line,) = logged(capfd)
    assert sentence in line["msg"]
    assert line["level"] == ("error" if on_failure is OnFailure.WAIT else "warning")


def test_with_float_an_invalid_document_is_returned_unchanged_but_never_empty(
    env: PodEnvironment, pod: PodFolder
) -> None:
    pod.bind()
    pod.ask_for(OnFailure.FLOAT)
    assert define_domain(b"<network/>", VMI, env, works) == b"<network/>"
    with pytest.raises(BadDomainXml, match="is empty"):
        define_domain(b"", VMI, env, works)


def test_a_floating_placement_leaves_the_domain_unchanged(
    env: PodEnvironment, pod: PodFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    floating = PodPlacement.floating(pod_uid=PodUid(UID), node=NodeName(NODE))
    pod.write("uid", UID)
    pod.write("placement", floating.to_json())
    assert define_domain(DOMAIN, VMI, env, works) == DOMAIN
    (line,) = logged(capfd)
    assert "starts unpinned: its pod has no cores" in line["msg"]


def test_without_on_failure_it_waits(env: PodEnvironment, pod: PodFolder) -> None:
    pod.bind()
    with pytest.raises(BadDomainXml):
        define_domain(b"<network/>", VMI, env, works)


def test_a_forbidden_memory_binding_is_removed_with_a_warning(
    env: PodEnvironment, pod: PodFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    pod.bind()
    answer = define_domain(DOMAIN, VMI, env, forbidden)
    assert answer == rewrite(DOMAIN, replace(PLACEMENT, numa_memory=NumaMemory.OFF))
    warning, _ = logged(capfd)
    assert warning["level"] == "warning"
    assert warning["msg"] == "memory is not bound: the pod's seccomp profile forbids mbind"


def test_a_forbidden_strict_binding_makes_the_vm_wait(env: PodEnvironment, pod: PodFolder) -> None:
    pod.bind(replace(PLACEMENT, numa_memory=NumaMemory.STRICT))
    with pytest.raises(Misconfigured, match="numa-memory strict is not possible"):
        define_domain(DOMAIN, VMI, env, forbidden)


def test_a_migration_target_gets_its_answer_and_the_log_states_that_kubevirt_discards_it(
    env: PodEnvironment, pod: PodFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    pod.bind()
    vmi = json.loads(VMI) | {"status": {"migrationState": {"targetPod": "virt-launcher-vm-y"}}}
    assert define_domain(DOMAIN, json.dumps(vmi).encode(), env, works) == rewrite(DOMAIN, PLACEMENT)
    assert "migration target" in logged(capfd)[0]["note"]


@pytest.mark.parametrize("vmi", [b"", b"null", b"[]", b"{}", b'{"metadata": 7}', b"\xff", b"[" * 100_000])
def test_a_vmi_that_cannot_be_read_costs_only_its_name_in_the_log(
    env: PodEnvironment, pod: PodFolder, capfd: pytest.CaptureFixture[str], vmi: bytes
) -> None:
    pod.bind()
    assert define_domain(DOMAIN, vmi, env, works) == rewrite(DOMAIN, PLACEMENT)
    assert logged(capfd)[0]["vm"] == ""


def test_an_unexpected_exception_is_an_error_that_asks_for_a_report_or_an_unchanged_domain(
    env: PodEnvironment, pod: PodFolder
) -> None:
    pod.bind()
    with pytest.raises(Corrupt, match="please report it"):
        define_domain(DOMAIN, VMI, env, broken)
    pod.ask_for(OnFailure.FLOAT)
    assert define_domain(DOMAIN, VMI, env, broken) == DOMAIN


def test_a_pinned_domain_always_fits_into_the_answer(env: PodEnvironment, pod: PodFolder) -> None:
    pod.bind(replace(PLACEMENT, cpus=sum(1 << cpu for cpu in range(0, 64, 2)) | PLACEMENT.cpus))
    xml = b"<domain><vcpu current='4'>65535</vcpu></domain>"
    assert len(xml) < MAX_DOMAIN_BYTES
    with pytest.raises(BadDomainXml, match="more than virt-launcher accepts"):
        define_domain(xml, VMI, env, works)
