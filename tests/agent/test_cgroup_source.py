"""Cpusets are set by writing cgroups: real cgroups of this machine, with real processes in them.

The machine needs two CPUs: CPU 1 is the VM's, CPU 0 the shared pool.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from harness.pod_cgroups import PodCgroups, allowed, container_id, pod_uid
from kvplace.agent import back_off, cpuset_keeper
from kvplace.agent.back_off import MOST_REPAIRS
from kvplace.agent.cgroup_source import CgroupSource
from kvplace.agent.conditions import TopologyCondition
from kvplace.agent.cpuset_keeper import CpusetKeeper
from kvplace.agent.node_objects import NodeObjects
from kvplace.agent.node_report import NodeReport
from kvplace.core.cpuset import parse_cpu_list
from kvplace.core.errors import Misconfigured
from kvplace.core.ledger import Ledger, LedgerChange, claim_of
from kvplace.core.node_topology import Enforcement
from kvplace.core.request import Policy
from kvplace.core.scalars import NO_CPUS, ContainerId, CpuMask, NumaId
from kvplace.kube.object_records import LedgerRecord, PodRecord
from kvplace.kube.watches import Apply, Delete, Init, InitApply, InitDone
from kvplace.linux.cgroups import CgroupVersion, CpusetFile, CpusetHierarchy
from kvplace.linux.container_watch import ContainerChanges, ContainerWatch
from kvplace.linux.kernel_files import Gone, KernelError, NotPermitted
from tests.agent.nodes_in_use import NODE, machine_of, placed
from tests.linux.no_inotify import use_up_inotify

VM, PLAIN, LATER = pod_uid(1), pod_uid(2), pod_uid(3)
COMPUTE, SIDECAR, APP, NEW = map(container_id, range(1, 5))
VM_POD = PodRecord(
    "vms",
    "virt-launcher-a",
    VM,
    node=NODE,
    phase="Running",
    placement=placed(VM, "1").to_json(),
    vmi="a",
    compute_container=COMPUTE,
)
PLAIN_POD = PodRecord("default", "app", PLAIN, node=NODE, phase="Running")


class Node:
    """The enforcement of a node with two CPUs."""

    def __init__(self, pods: PodCgroups, *, sweep_s: float = 600.0, starting_s: float = 0.0) -> None:
        self.pods = pods
        self.own = NodeObjects(NODE, machine_of([0, 1]))
        self.report = NodeReport()
        self._version = 0
        self.keep(pods.own, sweep_s=sweep_s, starting_s=starting_s)

    def keep(
        self,
        hierarchy: CpusetHierarchy,
        *,
        sweep_s: float = 600.0,
        starting_s: float = 0.0,
        own_pid: int | None = None,
        observed: Enforcement | None = None,
    ) -> None:
        """Have another keeper."""
        self.keeper = CpusetKeeper(
            self.own,
            self.report,
            hierarchy,
            observed=observed,
            sweep_s=sweep_s,
            starting_s=starting_s,
            own_pid=own_pid,
        )
        self.source = CgroupSource(self.keeper, self.own, hierarchy.root)

    def folder(self, container: ContainerId) -> Path:
        """Return the cgroup of a container that the agent knows."""
        known = self.keeper.container(container)
        assert known is not None
        assert known.folder is not None
        return known.folder

    def read_objects(self, *known: PodRecord, claim: bool = True) -> None:
        """The API server has answered."""
        for store in self.own.stores:
            store.apply(Init())
        for pod in known:
            self.own.pods.apply(InitApply(pod))
        if claim:
            self.claim()
        for store in self.own.stores:
            store.apply(InitDone())

    def claim(self) -> None:
        """The ledger gives CPU 1 to the VM."""
        self._put(Ledger().after(LedgerChange((claim_of(VM, placed(VM, "1").placement),))))

    def release(self) -> None:
        """The ledger is empty again."""
        self._put(Ledger())

    def _put(self, ledger: Ledger) -> None:
        self._version += 1
        record = LedgerRecord(NODE, ledger, str(self._version))
        self.own.ledgers.apply(Apply(record) if self.own.ledgers.has_synced else InitApply(record))

    @contextlib.asynccontextmanager
    async def enforced(self) -> AsyncIterator[None]:
        """Run the component while the block runs."""
        task = asyncio.create_task(self.keeper.run(self.source))
        try:
            yield
            assert not task.done() or task.result() is None
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def problem(self) -> str:
        condition = self.report.conditions.get(TopologyCondition.CPUSETS_ENFORCED)
        return "" if condition is None or condition.status else condition.message


@pytest.fixture
def node(pods: PodCgroups) -> Node:
    return Node(pods)


async def becomes(read: Callable[[], object], wanted: object) -> None:
    """Poll until something has this value; the kernel does not report when a process may use other CPUs."""
    for _ in range(10_000):
        if read() == wanted:
            return
        await asyncio.sleep(0.001)
    assert read() == wanted


async def test_an_exclusive_vm_gets_its_cpu_and_containers_that_ran_there_leave_it(
    pods: PodCgroups, node: Node
) -> None:
    qemu = pods.process(pods.container(VM, COMPUTE))
    sidecar = pods.process(pods.container(VM, SIDECAR))
    app = pods.process(pods.container(PLAIN, APP, "besteffort"))
    node.read_objects(VM_POD, PLAIN_POD)
    async with node.enforced():
        await becomes(lambda: [allowed(each.pid) for each in (qemu, sidecar, app)], ["1", "0", "0"])
        assert node.report.enforcement is Enforcement.CGROUP
        assert node.report.conditions[TopologyCondition.CPUSETS_ENFORCED].status
        assert node.keeper.repairs == 0


async def test_a_new_container_gets_the_shared_pool_when_its_cgroup_appears(
    pods: PodCgroups, node: Node
) -> None:
    pods.container(VM, COMPUTE)
    node.read_objects(VM_POD)
    async with node.enforced():
        await becomes(lambda: node.report.enforcement, Enforcement.CGROUP)
        folder = pods.container(LATER, NEW)
        await becomes(lambda: pods.hierarchy.configured(folder), parse_cpu_list("0"))
        assert allowed(pods.process(folder).pid) == "0"


async def test_nothing_is_written_before_the_objects_of_the_node_are_known(
    pods: PodCgroups, node: Node
) -> None:
    qemu = pods.container(VM, COMPUTE)
    pods.hierarchy.set(qemu, parse_cpu_list("1"))
    async with node.enforced():
        for _ in range(20):
            await asyncio.sleep(0)
        assert pods.hierarchy.configured(qemu) == parse_cpu_list("1")
        assert node.keeper.container(COMPUTE) is None
        node.read_objects(VM_POD)
        await becomes(lambda: node.report.enforcement, Enforcement.CGROUP)
        assert pods.hierarchy.configured(qemu) == parse_cpu_list("1")
        assert node.folder(COMPUTE) == qemu


async def test_the_compute_container_leaves_the_pool_when_the_kubelet_has_named_it(
    pods: PodCgroups, node: Node
) -> None:
    qemu = pods.process(pods.container(VM, COMPUTE))
    node.read_objects(replace(VM_POD, compute_container=ContainerId("")))
    async with node.enforced():
        await becomes(lambda: allowed(qemu.pid), "0")
        node.own.pods.apply(Apply(VM_POD))
        await becomes(lambda: allowed(qemu.pid), "1")


async def test_released_cpus_go_back_to_everybody(pods: PodCgroups, node: Node) -> None:
    app = pods.process(pods.container(PLAIN, APP))
    node.read_objects(VM_POD, PLAIN_POD)
    async with node.enforced():
        await becomes(lambda: allowed(app.pid), "0")
        node.own.pods.apply(Delete(VM_POD))
        node.release()
        await becomes(lambda: allowed(app.pid), "0-1")


async def test_a_vm_whose_pod_was_deleted_by_force_keeps_its_cpu(pods: PodCgroups, node: Node) -> None:
    """Its QEMU goes on until the kubelet has ended it."""
    qemu = pods.process(pods.container(VM, COMPUTE))
    app = pods.process(pods.container(PLAIN, APP))
    node.read_objects(VM_POD, PLAIN_POD)
    async with node.enforced():
        await becomes(lambda: [allowed(each.pid) for each in (qemu, app)], ["1", "0"])
        node.own.pods.apply(Delete(VM_POD))
        node.own.pods.apply(Delete(PLAIN_POD))
        new = pods.container(LATER, NEW)  # when it has been seen, the end of the pods has been, too
        await becomes(lambda: pods.hierarchy.configured(new), parse_cpu_list("0"))
        assert [allowed(each.pid) for each in (qemu, app)] == ["1", "0"]
        names = {each.id: (each.name, each.pod) for each in node.keeper.containers()}
        assert names[COMPUTE] == ("compute", "virt-launcher-a")


async def test_cpus_are_taken_from_others_as_soon_as_they_are_claimed(pods: PodCgroups, node: Node) -> None:
    app = pods.process(pods.container(PLAIN, APP))
    node.read_objects(PLAIN_POD, claim=False)
    async with node.enforced():
        await becomes(lambda: node.report.enforcement, Enforcement.CGROUP)
        assert allowed(app.pid) == "0-1"
        node.claim()
        await becomes(lambda: allowed(app.pid), "0")


async def test_a_cpuset_that_another_client_writes_is_put_back_and_counted(
    pods: PodCgroups, node: Node
) -> None:
    folder = pods.container(PLAIN, APP)
    app = pods.process(folder)
    node.read_objects(VM_POD, PLAIN_POD)
    async with node.enforced():
        await becomes(lambda: allowed(app.pid), "0")
        pods.hierarchy.set(folder, parse_cpu_list("0-1"))
        await becomes(lambda: allowed(app.pid), "0")
        assert node.keeper.repairs == 1
        assert node.problem() == ""


async def test_a_set_that_is_undone_again_and_again_is_given_up_with_a_reason(
    pods: PodCgroups, node: Node
) -> None:
    folder = pods.container(PLAIN, APP)
    node.read_objects(VM_POD, PLAIN_POD)
    async with node.enforced():
        for _ in range(MOST_REPAIRS):
            await becomes(lambda: pods.hierarchy.configured(folder), parse_cpu_list("0"))
            pods.hierarchy.set(folder, parse_cpu_list("0-1"))
        await becomes(lambda: pods.hierarchy.configured(folder), parse_cpu_list("0"))
        pods.hierarchy.set(folder, parse_cpu_list("0-1"))
        await becomes(lambda: bool(node.problem()), True)
        assert node.problem() == (
            f"Another program keeps setting the cpuset of default/app/{APP[:13]}; repaired once in 60 s."
        )
        assert node.report.conditions[TopologyCondition.CPUSETS_ENFORCED].reason == "RepairsUndone"
        assert node.keeper.repairs == MOST_REPAIRS


async def test_a_set_that_the_kernel_refuses_is_not_the_work_of_another_program(
    pods: PodCgroups, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = pods.container(PLAIN, APP)
    node.read_objects(VM_POD, PLAIN_POD)
    async with node.enforced():
        await becomes(lambda: pods.hierarchy.configured(folder), parse_cpu_list("0"))
        real, refused = CpusetHierarchy.set, []

        def refuses(self: CpusetHierarchy, path: Path, wanted: CpuMask, *file: CpusetFile) -> None:
            if wanted == parse_cpu_list("0"):
                refused.append(path)
                raise KernelError("Device or resource busy")
            real(self, path, wanted, *file)

        monkeypatch.setattr(CpusetHierarchy, "set", refuses)
        monkeypatch.setattr(cpuset_keeper, "SET_AGAIN_S", 0.01)
        cpus = folder / CpusetFile.CPUS.value
        await becomes(lambda: cpus.write_text("0-1") and len(refused) > 2 * MOST_REPAIRS, True)
        await becomes(node.problem, "1 container: Device or resource busy.")
        assert node.keeper.repairs == 0
        monkeypatch.setattr(CpusetHierarchy, "set", real)
        cpus.write_text("0-1")
        await becomes(lambda: (node.problem(), node.keeper.repairs), ("", 1))


async def test_writes_while_a_container_starts_are_undone_and_are_not_drift(pods: PodCgroups) -> None:
    """Runtimes write the cpuset of a new container several times."""
    node = Node(pods, starting_s=600.0)
    folder = pods.container(PLAIN, APP)
    node.read_objects(VM_POD, PLAIN_POD)
    async with node.enforced():
        for _ in range(2 * MOST_REPAIRS):
            await becomes(lambda: pods.hierarchy.configured(folder), parse_cpu_list("0"))
            pods.hierarchy.set(folder, parse_cpu_list("0-1"))
        await becomes(lambda: pods.hierarchy.configured(folder), parse_cpu_list("0"))
        assert (node.keeper.repairs, node.problem()) == (0, "")


async def test_a_repair_that_was_given_up_is_tried_again_later(
    pods: PodCgroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(pods, sweep_s=0.02)
    folder = pods.container(PLAIN, APP)
    node.read_objects(VM_POD, PLAIN_POD)
    async with node.enforced():
        for _ in range(MOST_REPAIRS + 1):
            await becomes(lambda: pods.hierarchy.configured(folder), parse_cpu_list("0"))
            pods.hierarchy.set(folder, parse_cpu_list("0-1"))
        await becomes(lambda: bool(node.problem()), True)
        monkeypatch.setattr(back_off, "PERIOD_S", 0.0)
        await becomes(lambda: pods.hierarchy.configured(folder), parse_cpu_list("0"))
        await becomes(node.problem, "")


async def test_a_sweep_finds_a_change_without_an_event(
    pods: PodCgroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(pods, sweep_s=0.01)
    folder = pods.container(PLAIN, APP)
    node.read_objects(VM_POD, PLAIN_POD)
    async with node.enforced():
        await becomes(lambda: pods.hierarchy.configured(folder), parse_cpu_list("0"))
        monkeypatch.setattr(ContainerWatch, "read", lambda _: ContainerChanges())
        pods.hierarchy.set(folder, parse_cpu_list("0-1"))
        await becomes(lambda: pods.hierarchy.configured(folder), parse_cpu_list("0"))


async def test_without_inotify_containers_are_found_by_checking_and_the_setting_is_named(
    pods: PodCgroups, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_up_inotify(monkeypatch)
    monkeypatch.setattr(cpuset_keeper, "SWEEP_WITHOUT_EVENTS_S", 0.01)
    node.read_objects(VM_POD)
    async with node.enforced():
        await becomes(lambda: "max_user_instances; cgroups are read every" in node.problem(), True)
        folder = pods.container(LATER, NEW)
        await becomes(lambda: pods.hierarchy.configured(folder), parse_cpu_list("0"))


async def test_containers_that_end_at_any_moment_are_not_an_error(pods: PodCgroups, node: Node) -> None:
    node.read_objects(VM_POD)
    async with node.enforced():
        await becomes(lambda: node.report.enforcement, Enforcement.CGROUP)
        for number in range(50):
            pods.container(pod_uid(number + 10), container_id(number + 10))
            if number % 2:
                await asyncio.sleep(0)
            pods.remove(pods.pod(pod_uid(number + 10)))
        last = pods.container(LATER, NEW)
        await becomes(lambda: pods.hierarchy.configured(last), parse_cpu_list("0"))
        assert [each.id for each in node.keeper.containers()] == [NEW]
        assert node.problem() == ""


async def test_a_node_with_the_kubelets_static_policy_is_only_observed(pods: PodCgroups, node: Node) -> None:
    app = pods.process(pods.container(PLAIN, APP))
    node.read_objects(VM_POD, PLAIN_POD)
    async with node.enforced():
        await becomes(lambda: allowed(app.pid), "0")
        node.own.machine_changed(machine_of([0, 1]), NO_CPUS, observes_only=True)
        await becomes(lambda: node.report.enforcement, Enforcement.NONE)
        pods.hierarchy.set(node.folder(APP), parse_cpu_list("0-1"))
        node.release()
        await asyncio.sleep(0.05)
        assert allowed(app.pid) == "0-1"


async def test_memory_nodes_are_set_where_memory_is_strict(pods: PodCgroups, node: Node) -> None:
    folder = pods.container(VM, COMPUTE)
    strict = placed(VM, "1", policy=Policy.EXCLUSIVE, strict=(NumaId(0),))
    node.read_objects(replace(VM_POD, placement=strict.to_json()))
    written: list[tuple[Path, CpuMask, CpusetFile]] = []
    real = CpusetHierarchy.set

    def recorded(
        self: CpusetHierarchy, path: Path, wanted: CpuMask, file: CpusetFile = CpusetFile.CPUS
    ) -> None:
        written.append((path, wanted, file))
        real(self, path, wanted, file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpusetHierarchy, "set", recorded)
        patch.setattr(CpusetHierarchy, "is_set", lambda *_: False)
        async with node.enforced():
            await becomes(lambda: (folder, 1, CpusetFile.MEMORY_NODES) in written, True)


async def test_memory_nodes_that_another_client_keeps_setting_are_given_up_with_a_reason(
    pods: PodCgroups, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = pods.container(VM, COMPUTE)
    node.read_objects(replace(VM_POD, placement=placed(VM, "1", strict=(NumaId(0),)).to_json()))
    async with node.enforced():
        await becomes(lambda: pods.hierarchy.configured(folder), parse_cpu_list("1"))
        monkeypatch.setattr(CpusetHierarchy, "is_set", lambda *_: False)  # as if it were another node
        mems = folder / CpusetFile.MEMORY_NODES.value
        await becomes(lambda: mems.write_text("0") and bool(node.problem()), True)
        assert node.problem() == (
            "Another program keeps setting the cpuset of vms/virt-launcher-a/compute; repaired once in 60 s."
        )
        assert node.keeper.repairs == MOST_REPAIRS


@pytest.mark.parametrize("error", [Misconfigured("no right"), Gone("it has ended")], ids=["denied", "gone"])
async def test_a_cpuset_that_cannot_be_set_is_reported_and_the_others_are_set(
    pods: PodCgroups, node: Node, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = pods.container(PLAIN, APP), pods.container(LATER, NEW)
    real = CpusetHierarchy.set

    def fails(self: CpusetHierarchy, path: Path, wanted: CpuMask, file: CpusetFile = CpusetFile.CPUS) -> None:
        if path == bad:
            raise error
        real(self, path, wanted, file)

    monkeypatch.setattr(CpusetHierarchy, "set", fails)
    monkeypatch.setattr(cpuset_keeper, "SET_AGAIN_S", 0.01)
    node.read_objects(VM_POD, PLAIN_POD)
    async with node.enforced():
        await becomes(lambda: pods.hierarchy.configured(good), parse_cpu_list("0"))
        await becomes(node.problem, "" if isinstance(error, Gone) else "1 container: no right.")


async def test_an_operator_can_have_it_observe_only(pods: PodCgroups) -> None:
    node = Node(pods)
    node.keep(pods.own, observed=Enforcement.NONE)
    app = pods.process(pods.container(PLAIN, APP))
    node.read_objects(VM_POD, PLAIN_POD)
    async with node.enforced():
        await becomes(lambda: [each.id for each in node.keeper.containers()], [APP])
        assert allowed(app.pid) == "0-1"
        assert node.report.enforcement is Enforcement.NONE


async def test_a_container_that_may_not_use_its_cpus_is_reported(
    pods: PodCgroups, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With version 2 a cgroup keeps a set that those above it do not have; with version 1 it cannot."""
    folder = pods.container(VM, COMPUTE)
    version_2 = CpusetHierarchy(pods.base, CgroupVersion.V2)
    node.keep(version_2, starting_s=10.0)
    monkeypatch.setattr(CpusetHierarchy, "effective", lambda *_: parse_cpu_list("0"))
    node.read_objects(VM_POD)
    async with node.enforced():
        reason = f"{folder} is set to CPU 1 and may use CPU 0: a cgroup above it has other CPUs."
        await becomes(node.problem, f"1 container: {reason}")
        monkeypatch.setattr(CpusetHierarchy, "effective", CpusetHierarchy.configured)
        node.own.machine_changed(machine_of([0]), NO_CPUS, observes_only=False)
        await becomes(node.problem, "")


class Delegated(CpusetHierarchy):
    """Version 2 as systemd mounts it, seen from the cgroup namespace of the container APP."""

    def set(self, folder: Path, wanted: CpuMask, file: CpusetFile = CpusetFile.CPUS) -> None:
        if APP in folder.name:
            raise NotPermitted(f"{folder} may not be set: Operation not permitted")
        super().set(folder, wanted, file)


async def test_an_agent_that_may_not_write_its_own_cgroup_sets_its_own_threads(pods: PodCgroups) -> None:
    node = Node(pods)
    agent = pods.process(pods.container(PLAIN, APP))
    node.keep(Delegated(pods.own.root, pods.own.version), sweep_s=0.05, own_pid=agent.pid)
    node.read_objects(VM_POD, PLAIN_POD)
    async with node.enforced():
        await becomes(lambda: allowed(agent.pid), "0")
        os.sched_setaffinity(agent.pid, {0, 1})
        await becomes(lambda: allowed(agent.pid), "0")
        assert (node.problem(), node.keeper.repairs) == ("", 1)
        node.release()
        node.own.pods.apply(Delete(VM_POD))
        await becomes(lambda: allowed(agent.pid), "0-1")


async def test_another_container_that_may_not_be_set_is_a_problem(
    pods: PodCgroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpuset_keeper, "SET_AGAIN_S", 0.01)
    node = Node(pods)
    pods.process(pods.container(PLAIN, APP))
    node.keep(Delegated(pods.own.root, pods.own.version))
    node.read_objects(VM_POD, PLAIN_POD)
    async with node.enforced():
        await becomes(lambda: "Operation not permitted" in node.problem(), True)
