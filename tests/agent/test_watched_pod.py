"""Reading one pod, however the host shows its cgroups."""

from __future__ import annotations

from pathlib import Path

from harness.played_qemu import played_qemus
from kvplace.agent.node_plan import ClaimContainer
from kvplace.agent.pinning_sweep import WatchedPod
from kvplace.core.scalars import NO_CPUS
from tests.agent.nodes_in_use import VM, placed, planned


def test_memory_is_read_although_the_agent_has_a_cgroup_namespace_of_its_own(tmp_path: Path) -> None:
    """With version 2 runtimes give it one. Then /proc shows cgroups as seen from that of the agent."""
    cgroup = tmp_path / "cgroup/kubepods/pod2/compute"
    cgroup.mkdir(parents=True)
    with played_qemus(1, vcpus=1) as made:
        (pid,) = made.pids
        process = tmp_path / f"proc/{pid}"
        process.mkdir(parents=True)
        for name in ("task", "comm"):
            (process / name).symlink_to(f"/proc/{pid}/{name}")
        (process / "cgroup").write_text("0::/../../pod2/compute\n")
        (cgroup / "cgroup.procs").write_text(f"{pid}\n")
        (cgroup / "cgroup.controllers").write_text("cpuset memory\n")
        (cgroup / "cpuset.cpus.effective").write_text("0-1\n")
        (cgroup / "memory.numa_stat").write_text("anon N0=8192 N1=4096\n")
        compute = ClaimContainer("compute", cgroup)
        plan = planned(placed(VM, "0").placement, compute, cpuset=NO_CPUS, online=NO_CPUS)
        watched = WatchedPod(plan, tmp_path / "cgroup", tmp_path / "proc")
        measured = watched.measure(1000, memory=True)
        watched.close()
    assert measured.memory == {0: 8192, 1: 4096}
