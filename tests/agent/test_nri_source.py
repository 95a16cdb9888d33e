"""Enforcement through NRI: which CPUs containers run on, from their first instruction to their end."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.waiting import PATIENCE_S
from kvplace.agent import back_off, cpuset_keeper
from kvplace.agent.back_off import MOST_REPAIRS
from kvplace.agent.conditions import PinnedReason, TopologyCondition
from kvplace.core.cpuset import format_cpu_list, parse_cpu_list
from kvplace.core.errors import Unavailable
from kvplace.core.ledger import Ledger
from kvplace.core.node_topology import Enforcement
from kvplace.core.scalars import CpuMask, NumaId
from kvplace.linux.cgroups import CpusetFile
from kvplace.linux.kernel_files import KernelError, NotPermitted
from kvplace.nri.values import Cpuset, NriEvent
from kvplace.service.process import in_background
from tests.agent.nodes_in_use import OTHER_VM, PLAIN, VM, machine_of, node_with, placed
from tests.agent.nri_node import EMPTY, ONE_VM, Node
from tests.agent.played_runtime import PlayedContainer, now
from tests.linux.no_inotify import use_up_inotify


def _spec(container: PlayedContainer) -> str:
    return format_cpu_list(container.spec.cpus)


def _cpuset(cpus: str) -> Cpuset:
    return Cpuset(parse_cpu_list(cpus))


class TestCreation:
    def test_the_container_of_a_vm_has_its_cpus_from_its_first_instruction(self) -> None:
        compute = Node(ONE_VM).started(VM, "compute")
        assert format_cpu_list(compute.first_cpus) == "2-3"
        assert _spec(compute) == "2-3"

    def test_the_others_are_off_these_cpus_before_the_answer_goes_out(self) -> None:
        node = Node(EMPTY)
        other = node.started(PLAIN, "app")
        node.objects.state = ONE_VM
        compute = node.runtime.create(node.runtime.run_pod(VM), "compute")
        assert node.runtime.cgroups.writes == [(other.id, parse_cpu_list("0-1,4-7"))]
        assert (node.cgroup(other), _spec(other)) == ("0-1,4-7", "0-1,4-7")
        assert _spec(compute) == "2-3"

    def test_sidecars_of_the_vm_and_later_containers_get_the_shared_pool(self) -> None:
        node = Node(ONE_VM)
        sidecar, compute, later = (
            node.started(VM, "hook-sidecar-0"),
            node.started(VM, "compute"),
            node.started(PLAIN, "app"),
        )
        assert [node.cgroup(found) for found in (sidecar, compute, later)] == ["0-1,4-7", "2-3", "0-1,4-7"]
        assert format_cpu_list(later.first_cpus) == "0-1,4-7"

    def test_a_claim_counts_before_the_watch_has_its_pod(self) -> None:
        node = Node(EMPTY)
        other = node.started(PLAIN, "app")
        pod = node.runtime.run_pod(VM, placement=placed(VM, "2-3"))
        compute = node.runtime.create(pod, "compute")
        assert (_spec(compute), node.cgroup(other)) == ("2-3", "0-1,4-7")

    def test_a_placement_on_a_pod_without_kvplaces_label_is_nobodys_claim(self) -> None:
        node = Node(EMPTY)
        other = node.started(PLAIN, "app")
        labelled = node.runtime.run_pod(VM, placement=placed(VM, "2-3"))
        forged = replace(labelled, labels={"kubevirt.io": "virt-launcher"})
        compute = node.runtime.create(forged, "compute")
        assert (_spec(compute), node.cgroup(other)) == ("", "0-7")

    def test_strict_memory_nodes_are_set_with_the_cpus(self) -> None:
        bound = placed(VM, "2-3", strict=(NumaId(1),))
        state = node_with(bound, topology=machine_of(range(8)))
        compute = Node(state).started(VM, "compute")
        assert compute.spec == Cpuset(parse_cpu_list("2-3"), parse_cpu_list("1"))

    def test_a_claim_that_overlaps_a_running_one_gets_the_shared_pool(self) -> None:
        node = Node(node_with(placed(VM, "2-3"), placed(OTHER_VM, "3-4"), ledger=Ledger()))
        first, second = node.started(VM, "compute"), node.started(OTHER_VM, "compute")
        assert (node.cgroup(first), node.cgroup(second)) == ("2-3", "0-1,5-7")
        assert node.keeper.plan.refused[OTHER_VM].reason is PinnedReason.CPUS_IN_USE

    def test_a_node_without_claims_is_not_touched(self) -> None:
        node = Node(EMPTY)
        container = node.started(PLAIN, "app")
        node.restart_agent()
        node.change(replace(EMPTY))
        assert container.spec == Cpuset()
        assert node.runtime.cgroups.writes == []
        assert sum(node.runtime.answers) == 0

    def test_of_many_others_50_are_set_in_the_answer_and_the_rest_by_courier(self) -> None:
        node = Node(EMPTY)
        others = [node.started(PLAIN, f"app{number}") for number in range(120)]
        node.objects.state = ONE_VM
        node.runtime.answers.clear()
        node.started(VM, "compute")
        assert node.runtime.answers == [50]
        assert {node.cgroup(other) for other in others} == {"0-1,4-7"}
        node.carry_out()
        assert node.runtime.answers == [50, 50, 20]
        assert {_spec(other) for other in others} == {"0-1,4-7"}

    def test_when_no_decision_can_be_made_a_container_gets_the_pool_of_before(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        node = Node(ONE_VM)
        node.started(VM, "compute")

        def fail(*_arguments: object) -> None:
            raise KeyError("a bug")

        monkeypatch.setattr(cpuset_keeper, "plan_node", fail)
        container = node.runtime.create(node.runtime.run_pod(PLAIN, vm=False), "app")
        assert _spec(container) == "0-1,4-7"
        assert "no decision about container app" in caplog.text

    def test_a_cgroup_that_the_kernel_does_not_change_delays_nothing_and_is_tried_again(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        node = Node(EMPTY)
        stuck, other = node.started(PLAIN, "stuck"), node.started(PLAIN, "app")
        node.runtime.cgroups.refused.add(node.runtime.cgroups.root / stuck.id)
        node.objects.state = ONE_VM
        compute = node.started(VM, "compute")
        assert (node.cgroup(compute), node.cgroup(other)) == ("2-3", "0-1,4-7")
        assert f"container {stuck.id} does not get its CPUs" in caplog.text
        node.runtime.cgroups.refused.clear()
        node.runtime.cgroups.writes.clear()
        node.started(PLAIN, "later")
        assert (stuck.id, parse_cpu_list("0-1,4-7")) in node.runtime.cgroups.writes


class TestUpdates:
    def test_an_update_by_the_kubelet_does_not_undo_the_cpus(self) -> None:
        node = Node(ONE_VM)
        compute, other = node.started(VM, "compute"), node.started(PLAIN, "app")
        for container, own in (compute, "2-3"), (other, "0-1,4-7"):
            node.runtime.update(container, _cpuset("0-7"))
            assert (node.cgroup(container), _spec(container)) == (own, own)
            node.runtime.update(container, Cpuset())
            assert (node.cgroup(container), _spec(container)) == (own, own)

    def test_an_update_on_a_node_without_claims_gives_all_cpus(self) -> None:
        node = Node(EMPTY)
        container = node.started(PLAIN, "app")
        node.runtime.update(container, Cpuset())
        assert container.spec == Cpuset()
        node.runtime.update(container, _cpuset("1"))
        assert node.cgroup(container) == "0-7"

    def test_an_update_that_met_a_starting_container_is_repaired_before_its_program_begins(self) -> None:
        node = Node(EMPTY)
        other = node.runtime.create(node.runtime.run_pod(PLAIN, vm=False), "app")
        node.runtime.read_spec(other)
        node.objects.state = ONE_VM
        node.runtime.create(node.runtime.run_pod(VM), "compute")
        node.runtime.make_task(other)
        assert node.cgroup(other) == "0-7"
        node.runtime.start(other)
        assert format_cpu_list(other.first_cpus) == "0-1,4-7"
        assert node.keeper.repairs == 0

    def test_a_container_that_was_created_before_and_starts_later_has_the_new_pool(self) -> None:
        node = Node(EMPTY)
        other = node.runtime.create(node.runtime.run_pod(PLAIN, vm=False), "app")
        node.objects.state = ONE_VM
        node.started(VM, "compute")
        node.runtime.start(other)
        assert format_cpu_list(other.first_cpus) == "0-1,4-7"
        assert node.keeper.repairs == 0

    def test_a_cgroup_that_a_user_writes_is_set_again(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("INFO")
        node = Node(ONE_VM)
        compute = node.started(VM, "compute")
        node.runtime.write_cgroup(compute, parse_cpu_list("0-7"))
        node.check(compute)
        assert node.cgroup(compute) == "2-3"
        assert node.keeper.repairs == 1
        assert (
            "vms/pod-of-uid-vm/compute: /cgroups/compute-1 was set to CPU 0-7 and is set back" in caplog.text
        )

    def test_the_cgroup_of_a_vm_that_may_use_every_cpu_is_set_again_too(self) -> None:
        node = Node(node_with(placed(VM, "2-3", emulator="0-1,4-7")))
        compute = node.started(VM, "compute")
        node.runtime.write_cgroup(compute, parse_cpu_list("0-1"))
        node.check(compute)
        assert node.cgroup(compute) == "0-7"

    def test_memory_nodes_that_a_user_writes_are_set_again(self) -> None:
        bound = placed(VM, "2-3", strict=(NumaId(1),))
        node = Node(node_with(bound, topology=machine_of(range(8))))
        compute = node.started(VM, "compute")
        assert node.keeper.repairs == 0
        (folder,) = node.runtime.cgroups.memory_nodes
        node.runtime.cgroups.memory_nodes[folder] = parse_cpu_list("0-1")
        node.check(compute)
        assert node.runtime.cgroups.memory_nodes == {folder: parse_cpu_list("1")}
        assert node.keeper.repairs == 1

    async def test_repairs_that_are_undone_again_and_again_are_given_up_and_reported(self) -> None:
        node = Node(ONE_VM)
        compute = node.started(VM, "compute")
        for _ in range(9):
            node.runtime.write_cgroup(compute, parse_cpu_list("0-7"))
            node.check(compute)
        assert node.keeper.repairs == MOST_REPAIRS == 5
        condition = node.report.conditions[TopologyCondition.CPUSETS_ENFORCED]
        assert (condition.status, condition.reason) == (False, "RepairsUndone")
        assert "vms/pod-of-uid-vm/compute" in condition.message

    async def test_a_repair_that_was_given_up_is_tried_again_although_nothing_writes(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        node = Node(ONE_VM, sweep_s=0.01)
        compute = node.started(VM, "compute")
        for _ in range(MOST_REPAIRS + 1):
            node.runtime.write_cgroup(compute, parse_cpu_list("0-7"))
            node.check(compute)
        assert node.cgroup(compute) == "0-7"
        written, write = asyncio.Event(), node.runtime.cgroups.set

        def write_and_say_so(*arguments: Any) -> None:
            write(*arguments)
            written.set()

        monkeypatch.setattr(node.runtime.cgroups, "set", write_and_say_so)
        async with asyncio.timeout(PATIENCE_S), in_background(node.keeper.run(node.source)):
            await asyncio.sleep(0.1)
            assert not written.is_set()
            monkeypatch.setattr(back_off, "PERIOD_S", 0.0)
            await written.wait()
        assert node.cgroup(compute) == "2-3"


class TestChangesOfTheNode:
    def test_cpus_come_back_to_the_pool_when_the_ledger_has_released_them(self) -> None:
        node = Node(ONE_VM)
        compute, other = node.started(VM, "compute"), node.started(PLAIN, "app")
        node.runtime.stop(compute)
        assert node.cgroup(other) == "0-1,4-7"
        node.change(EMPTY)
        assert (node.cgroup(other), _spec(other)) == ("0-7", "0-7")

    def test_cpus_of_a_new_claim_leave_the_pool_before_its_pod_is_there(self) -> None:
        node = Node(EMPTY)
        other = node.started(PLAIN, "app")
        node.change(replace(ONE_VM, pods={}))
        assert (node.cgroup(other), _spec(other)) == ("0-1,4-7", "0-1,4-7")

    def test_cpus_are_taken_from_some_before_others_get_them(self) -> None:
        node = Node(node_with(placed(VM, "2-3"), placed(OTHER_VM, "4")))
        first, second = node.started(VM, "compute"), node.started(OTHER_VM, "compute")
        node.runtime.cgroups.writes.clear()
        node.change(node_with(placed(VM, "2", revision=2), placed(OTHER_VM, "3-4", revision=2)))
        assert node.runtime.cgroups.writes == [
            (first.id, parse_cpu_list("2")),
            (second.id, parse_cpu_list("3-4")),
        ]

    def test_updates_that_did_not_arrive_are_carried_again(self) -> None:
        node = Node(EMPTY)
        other = node.started(PLAIN, "app")
        node.runtime.couriers_fail = True
        with pytest.raises(KernelError):
            node.change(ONE_VM)
        assert (node.cgroup(other), _spec(other)) == ("0-1,4-7", "")
        node.runtime.couriers_fail = False
        node.carry_out()
        assert _spec(other) == "0-1,4-7"

    def test_a_cgroup_that_only_the_runtime_may_write_is_not_tried_again_when_it_is_right(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The cgroup of the agent itself, where it has a cgroup namespace of its own."""
        node = Node(EMPTY)
        own, tried = node.started(PLAIN, "agent"), []

        def refused(folder: Path, wanted: CpuMask, file: CpusetFile = CpusetFile.CPUS, /) -> None:
            tried.append(folder.name)
            raise NotPermitted(f"{folder} may not be set: Operation not permitted")

        monkeypatch.setattr(node.runtime.cgroups, "set", refused)
        node.change(ONE_VM)
        assert (node.cgroup(own), tried) == ("0-1,4-7", [own.id])
        node.check(own)
        node.change(ONE_VM)
        assert tried == [own.id]

    def test_a_container_that_is_removed_without_having_stopped_is_forgotten(self) -> None:
        node = Node(ONE_VM)
        compute, other = node.started(VM, "compute"), node.started(VM, "other")
        now(node.source.observe(NriEvent.REMOVE, compute.pod, compute.value()))
        assert [found.id for found in node.keeper.containers()] == [other.id]

    def test_a_container_that_had_ended_before_its_start_was_reported_stays_forgotten(self) -> None:
        """No client reports a second time that it has stopped, and the CPUs of its pod would stay in use."""
        node = Node(ONE_VM)
        compute = node.started(VM, "compute")
        ended = replace(compute.value(), has_stopped=True)
        now(node.source.stop(compute.pod, ended))
        now(node.source.observe(NriEvent.POST_START, compute.pod, ended))
        assert list(node.keeper.containers()) == []

    def test_containers_of_a_removed_pod_are_forgotten(self) -> None:
        node = Node(ONE_VM)
        node.started(VM, "compute")
        node.runtime.remove_pod(next(iter(node.runtime.pods.values())))
        assert list(node.keeper.containers()) == []

    def test_on_a_node_that_is_only_observed_nothing_is_set(self) -> None:
        node = Node(replace(ONE_VM, observes_only=True))
        compute = node.runtime.create(node.runtime.run_pod(VM), "compute", _cpuset("5"))
        node.runtime.start(compute)
        node.runtime.update(compute, _cpuset("6"))
        assert (node.cgroup(compute), node.runtime.cgroups.writes) == ("6", [])
        assert node.report.enforcement is Enforcement.NONE


class TestRestarts:
    def test_containers_that_were_made_meanwhile_get_their_cpus_at_the_next_start(self) -> None:
        node = Node(ONE_VM)
        node.runtime.disconnect()
        compute, other = node.started(VM, "compute"), node.started(PLAIN, "app")
        unstarted = node.runtime.create(node.runtime.run_pod(OTHER_VM), "compute")
        assert node.cgroup(compute) == "0-7"
        node.restart_agent()
        assert (node.cgroup(compute), node.cgroup(other)) == ("2-3", "0-1,4-7")
        assert [_spec(found) for found in (compute, other, unstarted)] == ["2-3", "0-1,4-7", "0-1,4-7"]

    def test_containers_that_ended_while_the_runtime_was_down_are_forgotten(self) -> None:
        node = Node(ONE_VM)
        node.started(VM, "compute")
        node.runtime.disconnect()
        node.runtime.remove_pod(next(iter(node.runtime.pods.values())))
        node.runtime.connect(node.source)
        assert list(node.keeper.containers()) == []

    def test_running_containers_are_not_updated_when_nothing_has_changed(self) -> None:
        node = Node(ONE_VM)
        node.started(VM, "compute")
        node.started(PLAIN, "app")
        node.runtime.cgroups.writes.clear()
        node.runtime.answers.clear()
        node.restart_agent()
        assert node.runtime.cgroups.writes == []
        assert node.runtime.answers == [0]

    def test_a_cgroup_that_differs_from_its_spec_is_set_at_the_next_start(self) -> None:
        node = Node(ONE_VM)
        compute = node.started(VM, "compute")
        node.runtime.disconnect()
        node.runtime.write_cgroup(compute, parse_cpu_list("0-7"))
        node.restart_agent()
        assert node.cgroup(compute) == "2-3"

    def test_before_the_objects_are_known_running_containers_keep_the_cpus_of_their_specs(self) -> None:
        node = Node(ONE_VM)
        pod = node.runtime.run_pod(VM, placement=placed(VM, "6-7"))  # it has moved since
        compute, other = node.runtime.create(pod, "compute"), node.started(PLAIN, "app")
        node.runtime.start(compute)
        node.objects.state, node.objects.is_known = EMPTY, False
        node.restart_agent()
        later, second = (
            node.started(PLAIN, "later"),
            node.runtime.run_pod(OTHER_VM, placement=placed(OTHER_VM, "4")),
        )
        second_compute = node.runtime.create(second, "compute")
        for container, own in (compute, "2-3"), (other, "0-1,4-7"), (later, "0-1,4-5"):
            assert (node.cgroup(container), _spec(container)) == (own, own)
            node.runtime.update(container, _cpuset("0-7"))
            assert (node.cgroup(container), _spec(container)) == (own, own)
        assert _spec(second_compute) == "4"
        assert node.keeper.plan.pods == {}
        node.change(node_with(placed(VM, "2-3", revision=2), placed(OTHER_VM, "4")))
        found = [_spec(container) for container in (compute, other, later, second_compute)]
        assert found == ["2-3", "0-1,5-7", "0-1,5-7", "4"]

    def test_an_agent_that_ended_before_it_had_informed_the_runtime_leaves_cpus_taken_away(self) -> None:
        node = Node(ONE_VM)
        other = node.started(PLAIN, "app")
        node.change(EMPTY)
        node.runtime.couriers_fail = True
        with pytest.raises(KernelError):
            node.change(ONE_VM)
        compute = node.started(VM, "compute")
        other.spec = _cpuset("0-7")  # the answer to the creation did not arrive either
        node.objects.state, node.objects.is_known = EMPTY, False
        node.restart_agent()
        assert (node.cgroup(other), node.cgroup(compute)) == ("0-1,4-7", "2-3")
        node.runtime.couriers_fail = False
        node.change(ONE_VM)
        assert _spec(other) == "0-1,4-7"

    def test_before_the_objects_are_known_the_kubelets_static_policy_is_not_hindered_either(self) -> None:
        """The kubelet believes that an update took effect, and does not repeat it."""
        node = Node(replace(ONE_VM, observes_only=True))
        other = node.runtime.create(node.runtime.run_pod(PLAIN, vm=False), "app", _cpuset("0-7"))
        node.runtime.start(other)
        node.objects.state, node.objects.is_known = replace(EMPTY, observes_only=True), False
        node.restart_agent()
        node.runtime.update(other, _cpuset("0-3"))
        node.runtime.write_cgroup(other, parse_cpu_list("0-2"))
        node.check(other)
        assert (node.cgroup(other), _spec(other)) == ("0-2", "0-3")
        assert node.runtime.cgroups.writes == []

    def test_a_runtime_that_is_down_is_reported_and_enforcement_stays(self) -> None:
        node = Node(ONE_VM)
        node.started(VM, "compute")
        node.started(PLAIN, "app")
        assert node.report.enforcement is Enforcement.NRI
        assert node.report.conditions[TopologyCondition.CPUSETS_ENFORCED].status is True
        node.source.disconnected(Unavailable("the NRI runtime closed the connection"))
        condition = node.report.conditions[TopologyCondition.CPUSETS_ENFORCED]
        assert (condition.status, condition.reason) == (False, "RuntimeUnavailable")
        assert condition.message == "the NRI runtime closed the connection."
        assert node.report.enforcement is Enforcement.NRI
        node.runtime.cgroups.writes.clear()
        node.change(EMPTY)
        assert node.runtime.cgroups.writes == []


def test_a_container_is_known_before_its_cgroup_exists() -> None:
    node = Node(ONE_VM)
    node.runtime.create(node.runtime.run_pod(VM), "compute")
    (known,) = node.keeper.containers()
    assert known.folder is not None
    assert (known.name, known.folder.exists()) == ("compute", False)


async def test_changes_are_carried_out_until_the_agent_ends() -> None:
    node = Node(EMPTY)
    other = node.started(PLAIN, "app")
    running = asyncio.create_task(node.keeper.run(node.source))
    node.objects.become(ONE_VM)
    async with asyncio.timeout(PATIENCE_S):
        await node.runtime.delivered.wait()
    assert (node.cgroup(other), _spec(other)) == ("0-1,4-7", "0-1,4-7")
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled()


async def test_changes_are_carried_out_although_writes_of_others_cannot_be_noticed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use_up_inotify(monkeypatch)
    node = Node(EMPTY)
    async with asyncio.timeout(PATIENCE_S), in_background(node.keeper.run(node.source)):
        for _ in range(3):
            await asyncio.sleep(0)  # the source runs
        other = node.started(PLAIN, "app")
        node.objects.become(ONE_VM)
        await node.runtime.delivered.wait()
    assert (node.cgroup(other), _spec(other)) == ("0-1,4-7", "0-1,4-7")
    assert "max_user_instances" in caplog.text
    condition = node.report.conditions[TopologyCondition.CPUSETS_ENFORCED]
    assert (condition.status, condition.reason) == (False, "ChangesNotReported")


async def test_the_kernel_watches_no_container_that_has_ended(tmp_path: Path) -> None:
    """It goes on to watch a cgroup that was removed, for ever, and the number of watches has a limit."""

    def watches() -> int:
        descriptors = Path("/proc/self/fdinfo").iterdir()
        return sum(found.read_text().count("inotify wd:") for found in descriptors if found.exists())

    node = Node(EMPTY)
    node.runtime.cgroups.root = tmp_path
    node.restart_agent()
    async with in_background(node.keeper.run(node.source)):
        for _ in range(5):
            await asyncio.sleep(0)
        before = watches()
        ends = node.runtime.create(node.runtime.run_pod(PLAIN, vm=False), "ends")
        away = node.runtime.create(ends.pod, "away")
        for container in (ends, away):
            (tmp_path / container.id).mkdir()
            node.runtime.start(container)
        assert watches() == before + 2
        node.runtime.stop(ends)
        assert watches() == before + 1
        node.runtime.disconnect()
        node.runtime.stop(away)
        node.runtime.connect(node.source)
        assert watches() == before
