"""Which pods the guard checks, and what it wants of each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kvplace.agent.conditions import PinnedReason
from kvplace.agent.node_plan import ClaimContainer, NodeContainer, PodRevisions
from kvplace.agent.pinning_sweep import PinningSweep
from kvplace.agent.planner import plan_node
from kvplace.core.cpuset import parse_cpu_list
from kvplace.core.ledger import Ledger
from kvplace.core.scalars import ContainerId, PodUid
from kvplace.kube.object_records import PodRecord
from kvplace.kube.watches import Apply, Delete
from tests.agent.nodes_in_use import NODE, OTHER_VM, PLAIN, VM, confirmed, node_with, placed, read_node
from tests.agent.nodes_in_use import container as any_container
from tests.nodes.machines import EIGHT

CGROUPS = Path("/cgroups")
CPUS = parse_cpu_list("2-3")


def container(name: str, uid: PodUid = VM, *, cpus: str = "") -> NodeContainer:
    """A container with a cgroup."""
    made = any_container(uid, name, cpus=cpus, in_vm_pod=uid != PLAIN)
    return replace(made, folder=CGROUPS / f"{uid}-{name}")


COMPUTE, SIDECAR = container("compute"), container("hook-sidecar-0")
APP, LOG = container("app", PLAIN), container("log", PLAIN)


def test_containers_that_run_a_claim_are_listed_by_pod_and_others_are_not() -> None:
    state = node_with(placed(VM, "2-3"), placed(PLAIN, "6"))
    plan = plan_node(state, (COMPUTE, SIDECAR, LOG, APP, container("app", PodUid("alien"))))
    assert set(plan.pods) == {VM, PLAIN}
    vm, plain = plan.pods[VM], plan.pods[PLAIN]
    assert vm.containers == (ClaimContainer("compute", CGROUPS / f"{VM}-compute"),)
    assert [one.name for one in plain.containers] == ["app", "log"]
    assert (vm.vm, plain.vm) == (True, False)
    assert (vm.cpuset, vm.online) == (CPUS, EIGHT.cpus)
    assert (vm.sets_threads, vm.refusal, vm.namespace, vm.pod) == (True, None, "vms", f"pod-of-{VM}")


def test_a_pod_is_settled_when_its_cpuset_is_that_of_its_newest_revision() -> None:
    state = node_with(placed(VM, "2-3"))
    assert not plan_node(state, [COMPUTE]).pods[VM].settled
    followed = confirmed(state, VM, 1)
    assert plan_node(followed, [COMPUTE]).pods[VM].settled
    newer = replace(followed, pods={VM: PodRevisions(placed(VM, "4-5", revision=2), confirmed=1)})
    assert (plan_node(newer, [COMPUTE]).pods[VM].revision, plan_node(newer, [COMPUTE]).pods[VM].settled) == (
        2,
        False,
    )


def test_a_pod_counts_although_the_cgroup_of_its_container_is_not_known() -> None:
    """A pod that is missing from the report has ended."""
    plan = plan_node(node_with(placed(VM, "2-3")), [replace(COMPUTE, folder=None)])
    assert plan.pods[VM].containers == ()


def test_a_pod_without_its_claims_container_is_left_out() -> None:
    """Its QEMU has ended, although a sidecar goes on."""
    assert plan_node(node_with(placed(VM, "2-3")), [SIDECAR]).pods == {}


def test_a_pod_that_the_watch_does_not_have_yet_is_known_by_the_annotations_of_its_sandbox() -> None:
    compute = replace(COMPUTE, placement=placed(VM, "2-3").to_json())
    assert plan_node(node_with(), [compute]).pods[VM].bound == placed(VM, "2-3")


def test_a_vm_that_has_moved_does_not_go_back_when_its_pod_is_deleted_by_force() -> None:
    """Its sandbox has the placement that it was made with for ever."""
    compute = replace(COMPUTE, placement=placed(VM, "2-3").to_json())
    own = read_node(EIGHT)
    moved = placed(VM, "4-5", revision=2)
    record = PodRecord("vms", "pod", VM, node=NODE, phase="Running", placement=moved.to_json())
    own.pods.apply(Apply(record))
    assert plan_node(own.state, [compute]).pods[VM].revision == 2
    own.pods.apply(Delete(record))
    assert plan_node(own.state, [compute]).pods[VM].revision == 2


def test_a_refused_claim_is_reported_and_an_observed_one_is_not_set() -> None:
    state = node_with(placed(VM, "2-3"), placed(OTHER_VM, "3"), ledger=Ledger())
    other = container("compute", OTHER_VM, cpus="3")
    refusal = plan_node(state, [COMPUTE, other]).pods[VM].refusal
    assert refusal is not None
    assert refusal.reason is PinnedReason.CPUS_IN_USE
    observed = plan_node(replace(state, observes_only=True), [COMPUTE, other]).pods[VM]
    assert (observed.sets_threads, observed.cpuset) == (False, 0)


def test_a_revision_that_was_given_up_leaves_the_one_before_in_effect_with_the_cpus_of_both() -> None:
    old, new = placed(VM, "2-3"), placed(VM, "4-5", revision=2)
    state = node_with(old)
    given_up = PodRevisions(new, confirmed=1, followed=old, failure="CPU 4 cannot be had")
    both = Ledger({cpu: VM for bound in (old, new) for cpu in bound.placement.vcpus}, state.ledger.claims)
    plan = plan_node(
        replace(state, ledger=both, pods={VM: given_up}), [container("compute", cpus="2-5"), APP]
    )
    pod = plan.pods[VM]
    assert (pod.bound, pod.failed_revision, pod.failure) == (old, 2, "CPU 4 cannot be had")
    assert (pod.cpuset, pod.settled) == (parse_cpu_list("2-5"), True)
    assert plan.containers[APP.id].cpus == parse_cpu_list("0-1,6-7")


def test_every_container_of_a_plain_pod_is_checked_although_only_their_cgroups_are_known(
    tmp_path: Path,
) -> None:
    """Cgroups have no names of containers; the pause container must not hide the others."""
    ids = ["a" * 64, "b" * 64]
    pause, app = (
        NodeContainer(ContainerId(id_), "", PLAIN, "vms", "pod", in_vm_pod=False, folder=tmp_path / id_)
        for id_ in ids
    )
    for one, cpus in (pause, "2-3"), (app, "0-7"):
        (tmp_path / one.id).mkdir()
        (tmp_path / one.id / "cpuset.cpus.effective").write_text(f"{cpus}\n")
    plan = plan_node(node_with(placed(PLAIN, "2-3")), (pause, app))
    sweep = PinningSweep(tmp_path)
    finding = sweep.look([plan.pods[PLAIN]])[PLAIN]
    sweep.close()
    (found,) = finding.differences
    assert str(found) == f"the cpuset of container {app.id[:13]} is CPU 0-7, wider than 2-3"
