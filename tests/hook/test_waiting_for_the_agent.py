"""The probe as the kubelet runs it, in a cpuset that the kernel enforces: it waits for the agent.

The CPUs of these tests are real, and so is the cpuset that what stands for the agent changes.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace

import pytest

from harness.libvirt_session.cpuset_group import NAME, CpusetGroup, NoCpusetGroup
from harness.waiting import PATIENCE_S
from kvplace.core.cpuset import cpus_of, format_cpu_list, mask_of
from kvplace.core.request import OnFailure, Policy
from kvplace.core.scalars import NO_CPUS, CpuMask
from tests.hook.conftest import HookProcess
from tests.hook.machine import ON_THIS_MACHINE


class Sidecar:
    """The hook's processes in a cpuset of their own."""

    def __init__(self, hook: HookProcess, group: CpusetGroup) -> None:
        self.hook = hook
        self.group = group
        all_cpus = list(cpus_of(CpuMask(group.effective())))
        self.owned, self.shared = mask_of(all_cpus[:1]), mask_of(all_cpus[1:])
        assert self.shared, "one CPU cannot be taken from a sidecar that needs one"
        self.placement = replace(
            ON_THIS_MACHINE,
            policy=Policy.EXCLUSIVE,
            vcpus=tuple(all_cpus[:1]),
            cpus=self.owned,
            owned=self.owned,
            emulator_cpus=self.shared,
        )
        hook.start()

    def probe(self, *words: str) -> subprocess.Popen[str]:
        enter = f'echo $$ > {self.group.path}/cgroup.procs && exec "$@"'
        command = ["sh", "-c", enter, "sh", *self.hook.program, "ready", *words]
        return subprocess.Popen(
            command, env=self.hook.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def says(self, *words: str) -> tuple[int, str]:
        process = self.probe(*words)
        _, said = process.communicate(timeout=PATIENCE_S)
        return process.returncode, said


@pytest.fixture
def sidecar(hook: HookProcess) -> Iterator[Sidecar]:
    if os.geteuid() != 0:
        pytest.skip("making a cpuset needs root")
    try:
        group = CpusetGroup.make(f"{NAME}-probe-{os.getpid()}")
    except NoCpusetGroup as reason:
        pytest.skip(f"no cpuset: {reason}")
    try:
        yield Sidecar(hook, group)
    finally:
        group.remove()


def test_a_vm_is_not_ready_while_the_kernel_lets_its_own_sidecar_use_the_cpus_that_it_owns(
    sidecar: Sidecar,
) -> None:
    sidecar.hook.pod.bind(sidecar.placement, enforced=True)
    code, said = sidecar.says("--once")
    assert code == 1
    assert f"other containers may still use CPU {format_cpu_list(sidecar.owned)}" in said
    assert "check the pod of kvplace-agent on worker-1" in said
    assert len(said.splitlines()) == 1

    sidecar.group.confine(sidecar.shared)
    assert sidecar.says("--once") == (0, "")


def test_a_probe_that_waits_passes_when_the_agent_has_taken_the_cpus_away(sidecar: Sidecar) -> None:
    sidecar.hook.pod.bind(sidecar.placement, enforced=True)
    probe = sidecar.probe()
    while str(probe.pid) not in map(str, sidecar.group.processes()):
        assert probe.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        probe.wait(timeout=1)
    sidecar.group.confine(sidecar.shared)
    _, said = probe.communicate(timeout=PATIENCE_S)
    assert (probe.returncode, said) == (0, "")


@pytest.mark.parametrize("enforced", [True, False])
def test_a_vm_that_may_float_or_has_no_agent_does_not_wait(sidecar: Sidecar, enforced: bool) -> None:
    on_failure = OnFailure.FLOAT if enforced else OnFailure.WAIT
    sidecar.hook.pod.bind(sidecar.placement, enforced=enforced, on_failure=on_failure)
    assert sidecar.says("--once") == (0, "")


def test_a_vm_that_owns_no_cpu_does_not_wait(sidecar: Sidecar) -> None:
    shares = replace(sidecar.placement, policy=Policy.SHARE, owned=NO_CPUS)
    sidecar.hook.pod.bind(shares, enforced=True)
    assert sidecar.says("--once") == (0, "")
