"""A VM on a node with an agent: its hook sidecar is in the shared pool, its QEMU has the CPUs of the VM."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.libvirt_session.cpuset_group import NAME, CpusetGroup
from harness.libvirt_session.daemon import LibvirtSession
from harness.libvirt_session.documents import minimal_domain
from kvplace.core.cpuset import cpus_of, mask_of
from kvplace.core.placement import Placement
from kvplace.core.request import NumaMemory, OnFailure, Policy
from kvplace.core.scalars import Bytes, CpuMask, NumaId
from tests.libvirt_session.hook_sidecar import Sidecar

pytestmark = pytest.mark.libvirt_session


class ProtectedVm:
    """Two containers of a pod, each in a cpuset of its own; the VM owns the first CPU."""

    def __init__(self, session: LibvirtSession, folder: Path, group: CpusetGroup) -> None:
        owned, pool = list(cpus_of(CpuMask(session.group.effective())))[:2]
        self.pool = mask_of([pool])
        self.group = group
        self.sidecar = Sidecar(session, folder, group)
        self.placement = Placement(
            policy=Policy.EXCLUSIVE,
            vcpus=(owned,),
            cpus=mask_of([owned]),
            owned=mask_of([owned]),
            emulator_cpus=self.pool,
            numa_nodes=(NumaId(0),),
            numa_memory=NumaMemory.STRICT,
            memory={NumaId(0): Bytes(64 << 20)},
        )


@pytest.fixture
def vm(libvirt_session: LibvirtSession, request: pytest.FixtureRequest) -> Iterator[ProtectedVm]:
    folder = libvirt_session.folder / f"pod-{abs(hash(request.node.nodeid))}"
    folder.mkdir()
    group = CpusetGroup.make(f"{NAME}-sidecar-{os.getpid()}")
    try:
        yield ProtectedVm(libvirt_session, folder, group)
    finally:
        group.remove()


def test_a_sidecar_in_the_shared_pool_pins_a_vm_to_cpus_and_memory_that_it_may_not_use_itself(
    libvirt_session: LibvirtSession, vm: ProtectedVm
) -> None:
    vm.group.confine(vm.pool)
    answer = vm.sidecar.answer(minimal_domain("protected", vcpus=1), vm.placement, enforced=True)
    assert answer.returncode == 0, answer.stderr
    assert "memory strict on NUMA nodes 0" in answer.stderr
    with libvirt_session.running(answer.stdout) as running:
        found = running.affinities()
    assert found.vcpus() == {0: vm.placement.owned}
    assert set(found.emulator().values()) == {vm.pool}


def test_a_vm_is_not_defined_while_its_sidecar_could_still_run_on_its_cpus(vm: ProtectedVm) -> None:
    answer = vm.sidecar.answer(minimal_domain("waits", vcpus=1), vm.placement, enforced=True)
    assert (answer.returncode, answer.stdout) == (1, "")
    assert "other containers may still use CPU" in answer.stderr


def test_a_vm_that_may_float_is_pinned_at_once(libvirt_session: LibvirtSession, vm: ProtectedVm) -> None:
    domain = minimal_domain("hurries", vcpus=1)
    answer = vm.sidecar.answer(domain, vm.placement, OnFailure.FLOAT, enforced=True)
    assert answer.returncode == 0, answer.stderr
    assert "the VM starts because its on-failure is float" in answer.stderr
    with libvirt_session.running(answer.stdout) as running:
        assert running.affinities().vcpus() == {0: vm.placement.owned}
