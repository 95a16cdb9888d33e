"""From the pod's annotation to QEMU's threads: the hook's answer, given in the pod, started by libvirt."""

from dataclasses import replace
from pathlib import Path

import pytest

from harness.libvirt_session.daemon import LibvirtSession
from harness.libvirt_session.documents import minimal_domain, without_its_pod
from kvplace.core.cpuset import cpus_of, format_cpu_list, mask_of
from kvplace.core.placement import Placement
from kvplace.core.request import NumaMemory, OnFailure, Policy
from kvplace.core.scalars import Bytes, CpuId, CpuMask, NumaId
from kvplace.domainxml import rewrite
from tests.kubevirt_documents import DOMAINS
from tests.libvirt_session.hook_sidecar import Sidecar

libvirt = pytest.importorskip("libvirt", reason="libvirt-python is not installed")
pytestmark = pytest.mark.libvirt_session


def two_cpus(session: LibvirtSession) -> tuple[int, int]:
    first, second = list(cpus_of(CpuMask(session.group.effective())))[:2]
    return first, second


def placement_of_two_vcpus(session: LibvirtSession) -> Placement:
    """Crosses the vCPUs over, so that no default could give the same."""
    first, second = two_cpus(session)
    return Placement(
        policy=Policy.EXCLUSIVE,
        vcpus=(CpuId(second), CpuId(first)),
        cpus=mask_of([first, second]),
        emulator_cpus=mask_of([first]),
        io_thread_cpus=(mask_of([second]),),
        numa_nodes=(NumaId(0),),
        numa_memory=NumaMemory.STRICT,
        memory={NumaId(0): Bytes(64 << 20)},
    )


@pytest.fixture
def pod_folder(libvirt_session: LibvirtSession, request: pytest.FixtureRequest) -> Path:
    """A folder that the pod's user can read, gone with the daemon."""
    folder = libvirt_session.folder / f"pod-{abs(hash(request.node.nodeid))}"
    folder.mkdir()
    return folder


def test_the_hooks_answer_starts_with_every_thread_where_the_annotation_states(
    libvirt_session: LibvirtSession, pod_folder: Path
) -> None:
    placement = placement_of_two_vcpus(libvirt_session)
    domain = minimal_domain("answered", inside="<iothreads>2</iothreads>")
    answer = Sidecar(libvirt_session, pod_folder).answer(domain, placement)
    assert answer.returncode == 0, answer.stderr
    with libvirt_session.running(answer.stdout) as running:
        found = running.affinities()
    assert found.vcpus() == {vcpu: mask_of([cpu]) for vcpu, cpu in enumerate(placement.vcpus)}
    assert set(found.emulator().values()) == {placement.emulator_cpus}
    assert found.io_threads() == {1: placement.io_thread_cpus[0], 2: placement.io_thread_cpus[0]}


def test_kubevirts_own_document_goes_through_the_hook_and_starts(
    libvirt_session: LibvirtSession, pod_folder: Path
) -> None:
    first, _ = two_cpus(libvirt_session)
    pool = replace(
        placement_of_two_vcpus(libvirt_session),
        policy=Policy.NUMA,
        vcpus=(),
        cpus=mask_of([first]),
        emulator_cpus=mask_of([first]),
        io_thread_cpus=(),
    )
    document = (DOMAINS / "05-amd64-dedicated.domain.xml").read_text()
    answer = Sidecar(libvirt_session, pod_folder).answer(document, pool)
    assert answer.returncode == 0, answer.stderr
    xml = without_its_pod(answer.stdout.encode(), libvirt_session.folder / "run")
    with libvirt_session.running(xml) as running:
        found = running.affinities()
    assert len(found.vcpus()) == 4
    assert {thread.cpus for thread in found.threads} == {mask_of([first])}


def test_a_cpu_outside_the_pods_cpuset_is_named_by_the_hook_before_libvirt_stumbles_over_it(
    libvirt_session: LibvirtSession, pod_folder: Path
) -> None:
    first, second = two_cpus(libvirt_session)
    placement = placement_of_two_vcpus(libvirt_session)
    domain = minimal_domain("outside-the-cpuset")
    with libvirt_session.confined_to(mask_of([first])):
        answer = Sidecar(libvirt_session, pod_folder).answer(domain, placement)
        with (
            pytest.raises(
                libvirt.libvirtError, match=r"cannot set CPU affinity on process .* Invalid argument"
            ),
            libvirt_session.running(rewrite(domain.encode(), placement)),
        ):
            pass
    assert answer.returncode == 1
    assert answer.stdout == ""
    outside = (
        f"CPU {second} of the placement is outside this pod's cpuset {format_cpu_list(mask_of([first]))}"
    )
    assert outside in answer.stderr


def test_a_vm_that_may_float_starts_unpinned_where_its_cpus_are_out_of_reach(
    libvirt_session: LibvirtSession, pod_folder: Path
) -> None:
    first, _ = two_cpus(libvirt_session)
    placement = placement_of_two_vcpus(libvirt_session)
    domain = minimal_domain("floating")
    with libvirt_session.confined_to(mask_of([first])):
        answer = Sidecar(libvirt_session, pod_folder).answer(domain, placement, OnFailure.FLOAT)
        assert answer.stdout == domain
        with libvirt_session.running(answer.stdout) as running:
            assert {thread.cpus for thread in running.affinities().threads} == {mask_of([first])}
    assert "the VM starts unpinned" in answer.stderr


def test_strict_memory_that_seccomp_forbids_is_refused_by_name_when_the_vm_wants_to_wait(
    libvirt_session_without_memory_policy: LibvirtSession, pod_folder: Path
) -> None:
    session = libvirt_session_without_memory_policy
    answer = Sidecar(session, pod_folder).answer(minimal_domain("waiting"), placement_of_two_vcpus(session))
    assert answer.returncode == 1
    assert (
        "numa-memory strict is not possible: the pod's seccomp profile forbids set_mempolicy" in answer.stderr
    )


@pytest.mark.parametrize(
    ("memory", "on_failure"),
    [(NumaMemory.STRICT, OnFailure.FLOAT), (NumaMemory.PREFERRED, OnFailure.WAIT)],
)
def test_a_weakened_memory_binding_starts_pinned_where_seccomp_forbids_it(
    memory: NumaMemory,
    on_failure: OnFailure,
    libvirt_session_without_memory_policy: LibvirtSession,
    pod_folder: Path,
) -> None:
    session = libvirt_session_without_memory_policy
    placement = replace(placement_of_two_vcpus(session), numa_memory=memory)
    answer = Sidecar(session, pod_folder).answer(minimal_domain("weakened"), placement, on_failure)
    assert answer.returncode == 0, answer.stderr
    assert "memory is not bound: the pod's seccomp profile forbids set_mempolicy" in answer.stderr
    with session.running(answer.stdout) as running:
        found = running.affinities()
    assert found.vcpus() == {vcpu: mask_of([cpu]) for vcpu, cpu in enumerate(placement.vcpus)}
