"""The CPUs of each container, and the claims that are not given their CPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from kvplace.agent.conditions import PinnedReason
from kvplace.agent.node_plan import NodeContainer, NodePlan, PodRevisions, ThisNode
from kvplace.agent.planner import placements_in, plan_node
from kvplace.core.claim_changes import claim_while_relocating
from kvplace.core.cpuset import format_cpu_list, mask_of, parse_cpu_list
from kvplace.core.ledger import Ledger, LedgerChange, Relocation, claim_of
from kvplace.core.placement import PodPlacement
from kvplace.core.request import Policy
from kvplace.core.scalars import NO_CPUS, CpuId, CpuMask, NodeName, NumaId, PodUid
from tests.agent.nodes_in_use import (
    OTHER_VM,
    PLAIN,
    VM,
    confirmed,
    container,
    machine_of,
    node_with,
    nodes_in_use,
    numa_placed,
    placed,
)
from tests.nodes.machines import TWO

NOBODY = PodUid("uid-nobody")
SIDECAR = "hook-sidecar-0"


def lists(answer: NodePlan) -> dict[str, str]:
    """The answer as CPU lists by container id."""
    return {name: format_cpu_list(setting.cpus) for name, setting in answer.containers.items()}


def test_an_exclusive_vm_gets_its_cpus_and_everybody_else_the_rest() -> None:
    state = node_with(placed(VM, "2-3", emulator="4"))
    answer = plan_node(
        state, [container(VM), container(VM, SIDECAR), container(PLAIN, "app", in_vm_pod=False)]
    )
    assert lists(answer) == {
        "uid-vm/compute": "2-4",
        f"uid-vm/{SIDECAR}": "0-1,4-7",
        "uid-plain/app": "0-1,4-7",
    }
    assert not answer.refused


def test_a_plan_is_complete_once_the_objects_of_the_node_are_known() -> None:
    state = node_with(placed(VM, "2-3"))
    assert plan_node(state, [container(VM)]).is_complete
    assert not plan_node(replace(state, is_known=False), [container(VM)]).is_complete


def test_every_container_of_a_plain_pod_with_a_claim_gets_its_cpus() -> None:
    answer = plan_node(
        node_with(placed(PLAIN, "6-7")),
        [container(PLAIN, "app", in_vm_pod=False), container(PLAIN, "log", in_vm_pod=False)],
    )
    assert lists(answer) == {"uid-plain/app": "6-7", "uid-plain/log": "6-7"}


def test_a_sharing_vm_gets_the_cpus_that_it_names_and_others_may_use_them() -> None:
    answer = plan_node(
        node_with(placed(VM, "2-3", policy=Policy.SHARE)),
        [container(VM), container(PLAIN, "app", in_vm_pod=False)],
    )
    assert lists(answer) == {"uid-vm/compute": "2-3", "uid-plain/app": "0-7"}


def test_a_numa_vm_gets_the_shared_pool_of_its_nodes() -> None:
    state = node_with(numa_placed(VM, TWO, NumaId(1)), placed(OTHER_VM, "4-5"), topology=TWO)
    assert lists(plan_node(state, [container(VM)])) == {"uid-vm/compute": "6-7,12-15"}


def test_a_numa_node_that_gives_a_numa_vm_memory_alone_adds_no_cpus_to_its_pool() -> None:
    bound = numa_placed(VM, TWO, NumaId(1))
    bound = replace(bound, placement=replace(bound.placement, numa_nodes=(NumaId(0), NumaId(1))))
    state = node_with(bound, topology=TWO)
    assert lists(plan_node(state, [container(VM)])) == {"uid-vm/compute": "4-7,12-15"}


def test_a_numa_vm_whose_nodes_are_given_out_entirely_gets_the_whole_shared_pool() -> None:
    state = node_with(numa_placed(VM, TWO, NumaId(1)), placed(OTHER_VM, "4-7,12-15"), topology=TWO)
    assert lists(plan_node(state, [container(VM)])) == {"uid-vm/compute": "0-3,8-11"}


def test_emulator_threads_leave_a_cpu_of_the_pool_that_became_another_vms() -> None:
    state = node_with(placed(VM, "2-3", emulator="0-1,4-7"), placed(OTHER_VM, "4-6"))
    assert lists(plan_node(state, [container(VM)])) == {"uid-vm/compute": "0-3,7"}


def test_a_vm_that_floats_gets_the_shared_pool() -> None:
    state = node_with(placed(OTHER_VM, "7"))
    floating = replace(state, pods={VM: PodRevisions(PodPlacement.floating(pod_uid=VM, node=state.node))})
    assert lists(plan_node(floating, [container(VM)])) == {"uid-vm/compute": "0-6"}


def test_cpus_leave_the_pool_as_soon_as_the_ledger_gives_them_to_a_pod_that_is_still_to_come() -> None:
    ledger = node_with(placed(VM, "2-3")).ledger
    answer = plan_node(node_with(ledger=ledger), [container(PLAIN, "app", in_vm_pod=False)])
    assert lists(answer) == {"uid-plain/app": "0-1,4-7"}


def test_a_new_pod_counts_from_the_annotation_of_its_sandbox_before_the_watches_show_it() -> None:
    new = replace(container(VM), placement=placed(VM, "2-3").to_json())
    answer = plan_node(node_with(), [new, container(PLAIN, "app", in_vm_pod=False)])
    assert lists(answer) == {"uid-vm/compute": "2-3", "uid-plain/app": "0-1,4-7"}


def test_the_placement_with_the_highest_revision_counts() -> None:
    state = node_with(placed(VM, "4-5", revision=2))
    older, newer = placed(VM, "2-3"), placed(VM, "6", revision=3)
    for annotated, counts in (older, placed(VM, "4-5", revision=2)), (newer, newer):
        compute = replace(container(VM), placement=annotated.to_json())
        assert plan_node(state, [compute]).pods[VM].bound == counts


@pytest.mark.parametrize(
    "text",
    ["{", placed(OTHER_VM, "2-3").to_json(), replace(placed(VM, "2"), node=NodeName("other")).to_json()],
    ids=["not JSON", "of another pod", "of another node"],
)
def test_an_annotation_that_is_not_the_pods_own_placement_does_not_count(text: str) -> None:
    answer = plan_node(node_with(), [replace(container(VM), placement=text)])
    assert lists(answer) == {"uid-vm/compute": "0-7"}


def test_memory_nodes_are_set_for_strict_memory_and_left_alone_otherwise() -> None:
    state = node_with(placed(VM, "2", strict=(NumaId(0),)), placed(OTHER_VM, "4"), topology=TWO)
    answer = plan_node(state, [container(VM), container(VM, SIDECAR), container(OTHER_VM)])
    assert {name: setting.memory_nodes for name, setting in answer.containers.items()} == {
        "uid-vm/compute": mask_of([0]),
        f"uid-vm/{SIDECAR}": NO_CPUS,
        "uid-vm-2/compute": NO_CPUS,
    }


def test_memory_may_come_from_everywhere_again_when_a_relocation_ends_strict_memory() -> None:
    state = node_with(placed(VM, "2", revision=2), topology=TWO)
    assert plan_node(state, [container(VM)]).containers[container(VM).id].memory_nodes == mask_of([0, 1])


def test_a_relocating_vm_has_old_and_new_cpus_until_its_threads_have_followed() -> None:
    old, new = placed(VM, "2-3", strict=(NumaId(0),)), placed(VM, "4-5", strict=(NumaId(1),), revision=2)
    before = node_with(old, topology=TWO)
    both = replace(
        before,
        ledger=Ledger({CpuId(cpu): VM for cpu in (2, 3, 4, 5)}, before.ledger.claims),
        pods={VM: PodRevisions(old, confirmed=1)},
    )
    mine, other = container(VM, cpus="2-3"), container(PLAIN, "app", in_vm_pod=False)

    claimed = plan_node(both, [mine, other])
    assert lists(claimed) == {"uid-vm/compute": "2-3", "uid-plain/app": "0-1,6-15"}

    moving = replace(both, pods={VM: PodRevisions(new, confirmed=1)})
    asked = plan_node(moving, [mine, other])
    assert lists(asked) == {"uid-vm/compute": "2-5", "uid-plain/app": "0-1,6-15"}
    assert asked.containers[mine.id].memory_nodes == mask_of([0, 1])

    followed = plan_node(confirmed(moving, VM, 2), [mine, other])
    assert lists(followed) == {"uid-vm/compute": "4-5", "uid-plain/app": "0-1,6-15"}
    assert followed.containers[mine.id].memory_nodes == mask_of([1])

    released = node_with(new, topology=TWO)
    assert lists(plan_node(released, [mine, other])) == {
        "uid-vm/compute": "4-5",
        "uid-plain/app": "0-3,6-15",
    }


def test_a_relocating_vm_keeps_the_cpu_of_its_emulator_until_its_threads_have_followed() -> None:
    old, new = placed(VM, "2", emulator="3"), placed(VM, "4", emulator="5", revision=2)
    owned = replace(old, placement=replace(old.placement, owned=parse_cpu_list("2-3")))
    state = replace(node_with(owned), pods={VM: PodRevisions(new)})
    state = replace(state, ledger=Ledger({CpuId(cpu): VM for cpu in (2, 3, 4)}, state.ledger.claims))
    assert lists(plan_node(state, [container(VM, cpus="2-3")]))["uid-vm/compute"] == "2-5"


def test_a_migration_target_may_use_the_pool_too_until_its_threads_are_on_its_own_cpus() -> None:
    state = node_with(placed(VM, "2-3"), placed(OTHER_VM, "4-5"))
    arriving = replace(container(VM), incoming=True)
    assert lists(plan_node(state, [arriving])) == {"uid-vm/compute": "0-3,6-7"}
    seen = confirmed(state, VM, 1)
    assert lists(plan_node(seen, [arriving])) == {"uid-vm/compute": "2-3"}


def test_nothing_is_set_on_a_node_that_is_only_observed() -> None:
    answer = plan_node(replace(node_with(placed(VM, "2")), observes_only=True), [container(VM)])
    assert answer.containers == {}


class TestTheLastJudge:
    """A claim that contradicts what really runs is not given its CPUs."""

    @staticmethod
    def judged(state: ThisNode, *containers: NodeContainer) -> dict[PodUid, tuple[PinnedReason, str]]:
        refused = plan_node(state, containers).refused
        return {uid: (refusal.reason, refusal.message) for uid, refusal in refused.items()}

    def test_cpus_of_a_vm_that_runs_on_them_are_not_given_away_whatever_the_ledger_states(self) -> None:
        ledger = node_with(placed(VM, "2-3")).ledger
        state = node_with(placed(VM, "2-3"), placed(OTHER_VM, "3"), ledger=ledger)
        runs, new = container(OTHER_VM, cpus="3"), container(VM)
        assert self.judged(state, runs, new) == {
            VM: (PinnedReason.CPUS_IN_USE, "CPU 3 is in use by another pod, which owns it.")
        }
        assert plan_node(state, [runs, new]).refused[VM].owner == "pod vms/pod-of-uid-vm-2 (uid-vm-2)"
        assert lists(plan_node(state, [runs, new])) == {
            "uid-vm-2/compute": "3",
            "uid-vm/compute": "0-1,4-7",
        }

    def test_the_hook_sidecar_of_a_refused_claim_sees_owned_cpus_and_waits(self) -> None:
        state = node_with(placed(VM, "2-3"), placed(OTHER_VM, "3"), ledger=Ledger())
        answer = plan_node(state, [container(OTHER_VM, cpus="3"), container(VM), container(VM, SIDECAR)])
        assert answer.containers[container(VM, SIDECAR).id].cpus & parse_cpu_list("2-3") == parse_cpu_list(
            "2"
        )
        assert not answer.containers[container(VM).id].cpus & parse_cpu_list("2-3")

    def test_a_refused_claim_on_the_shared_pool_does_not_count_as_running_on_its_cpus(self) -> None:
        runs, new = placed(OTHER_VM, "3", policy=Policy.SHARE), placed(VM, "1-2", policy=Policy.SHARE)
        both = [
            replace(bound, placement=replace(bound.placement, owned=parse_cpu_list("3")))
            for bound in (runs, new)
        ]
        state = node_with(*both, topology=machine_of([1, 2, 3]), ledger=Ledger())
        containers = [container(OTHER_VM, cpus="3"), container(VM, cpus="1-2")]
        for _ in range(3):
            answer = plan_node(state, containers)
            assert lists(answer) == {"uid-vm-2/compute": "3", "uid-vm/compute": "1-2"}
            containers = [replace(each, cpus=answer.containers[each.id].cpus) for each in containers]

    def test_a_vm_that_relocates_keeps_its_cpus_when_the_new_ones_cannot_be_had(self) -> None:
        old, new = placed(VM, "1-2"), placed(VM, "3-4", revision=2)
        before = node_with(old, topology=machine_of([0, 1, 2]))
        claim = claim_while_relocating(before.ledger.claims[VM], Relocation(new, old))
        state = replace(
            before,
            pods={VM: PodRevisions(new, confirmed=1)},
            ledger=before.ledger.after(LedgerChange((claim,))),
        )
        assert lists(plan_node(state, [container(VM, cpus="1-2")])) == {"uid-vm/compute": "1-2"}

    def test_offline_cpus_are_not_given_out(self) -> None:
        state = node_with(placed(VM, "2-3"), topology=machine_of([0, 1, 2, 9]))
        assert self.judged(state, container(VM)) == {
            VM: (PinnedReason.CPUS_OFFLINE, "CPU 3 is offline or does not exist.")
        }

    def test_a_running_vm_keeps_its_other_cpus_when_one_goes_offline(self) -> None:
        state = node_with(placed(VM, "2-3"), topology=machine_of([0, 1, 2]))
        assert lists(plan_node(state, [container(VM, cpus="2-3")])) == {"uid-vm/compute": "2"}
        assert lists(plan_node(state, [container(VM, cpus="2")])) == {"uid-vm/compute": "2"}

    def test_a_running_vm_whose_cpus_are_all_offline_is_on_the_pool_till_they_return(self) -> None:
        state = node_with(placed(VM, "2-3"), topology=machine_of([0, 1]))
        assert lists(plan_node(state, [container(VM, cpus="2-3")])) == {"uid-vm/compute": "0-1"}
        back = replace(state, topology=machine_of([0, 1, 2, 3]))
        assert lists(plan_node(back, [container(VM, cpus="0-1")])) == {"uid-vm/compute": "2-3"}

    @pytest.mark.parametrize("observes_only", [False, True])
    def test_cpus_of_the_kubelets_static_policy_are_not_given_out(self, observes_only: bool) -> None:
        state = node_with(placed(VM, "2-3"))
        state = replace(state, kubelet_cpus=mask_of([3, 4]), observes_only=observes_only)
        assert self.judged(state, container(VM)) == {
            VM: (
                PinnedReason.KUBELET_OWNS_CPUS,
                "CPU 3 is allocated by the kubelet's static CPU policy.",
            )
        }

    def test_cpus_that_the_ledger_gives_to_another_pod_are_not_given_out(self) -> None:
        ledger = Ledger().after(LedgerChange((claim_of(NOBODY, placed(NOBODY, "3").placement),)))
        state = node_with(placed(VM, "2-3"), ledger=ledger)
        assert self.judged(state, container(VM)) == {
            VM: (PinnedReason.OWNED_BY_ANOTHER_POD, "CPU 3 belongs to another pod in the ledger.")
        }
        assert plan_node(state, [container(VM)]).refused[VM].owner == "pod uid-nobody"

    def test_the_last_cpus_of_the_shared_pool_are_not_given_out(self) -> None:
        state = node_with(placed(VM, "2-3"), placed(OTHER_VM, "0-1"), topology=machine_of([0, 1, 2, 3]))
        assert self.judged(state, container(OTHER_VM, cpus="0-1"), container(VM)) == {
            VM: (
                PinnedReason.NO_SHARED_POOL,
                "CPU 2-3 is the last of the shared pool; reserve a CPU for others.",
            )
        }


def _claims_in(state: ThisNode, containers: list[NodeContainer], answer: NodePlan) -> dict[PodUid, CpuMask]:
    """The CPUs that the accepted claims of an answer own."""
    owned = {}
    for pod, revisions in placements_in(state, containers).items():
        bound = revisions.in_effect(state.ledger)
        if pod not in answer.refused and not bound.placement.floats:
            owned[pod] = bound.placement.owned
    return owned


@given(nodes_in_use())
def test_no_set_is_ever_empty_or_names_a_cpu_that_is_not_online(
    case: tuple[ThisNode, list[NodeContainer]],
) -> None:
    state, containers = case
    answer = plan_node(state, containers)
    assert set(answer.containers) == {each.id for each in containers}
    for cpus in (answer.pool, *(setting.cpus for setting in answer.containers.values())):
        assert cpus
        assert not cpus & ~state.topology.cpus


@given(nodes_in_use())
def test_a_cpu_that_an_accepted_claim_owns_is_only_in_the_sets_of_the_containers_that_run_it(
    case: tuple[ThisNode, list[NodeContainer]],
) -> None:
    state, containers = case
    answer = plan_node(state, containers)
    owned = _claims_in(state, containers, answer)
    taken = NO_CPUS
    for pod, cpus in owned.items():
        assert not taken & cpus, "two accepted claims own one CPU"
        taken |= cpus
        for each in containers:
            if each.pod_uid != pod or not each.runs_claim:
                assert not answer.containers[each.id].cpus & cpus
    assert not answer.pool & taken


@given(nodes_in_use())
def test_equal_states_give_equal_answers_in_whatever_order_containers_are_listed(
    case: tuple[ThisNode, list[NodeContainer]],
) -> None:
    state, containers = case
    assert plan_node(state, containers) == plan_node(state, reversed(containers))


@given(nodes_in_use())
def test_answers_that_are_carried_out_soon_stay_the_same(case: tuple[ThisNode, list[NodeContainer]]) -> None:
    state, containers = case
    answers = [plan_node(state, containers)]
    for _ in range(4):
        containers = [replace(each, cpus=answers[-1].containers[each.id].cpus) for each in containers]
        answers.append(plan_node(state, containers))
    assert answers[-1] == answers[-2]
