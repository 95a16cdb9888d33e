"""An unmodified kube-scheduler evicts VMs for a VM of high priority that then fits, and none in vain."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.control_plane.cluster import ControlPlane
from harness.control_plane.kubevirt_parts import KubeVirt
from harness.control_plane.watching import wait_for
from harness.kvplace_cluster.installation import Installation
from harness.kvplace_cluster.vms import VMIS, vmi_manifest
from kvplace.core.cpuset import format_cpu_list
from tests.end_to_end.pods_that_ask import (
    LEDGERS,
    MACHINE,
    agent_reports,
    bound,
    create,
    create_priority_classes,
    moving,
    nodes,
    revision_of,
    running,
    told,
)

BUDGETS = "/apis/policy/v1/namespaces/{}/poddisruptionbudgets"


@pytest.fixture(scope="module")
def plane(kubernetes_programs: Path) -> Iterator[ControlPlane]:
    """A cluster with priority classes."""
    with ControlPlane() as running:
        create_priority_classes(running)
        yield running


@pytest.fixture(scope="module")
def installed(plane: ControlPlane) -> Iterator[Installation]:
    """Kvplace with one replica and one kube-scheduler, as shipped; no right may be missing."""
    with Installation(plane, flags=["--make-room=on-request"]) as installation:
        installation.add_scheduler(installation.replicas[0])
        yield installation
        assert installation.replicas[0].denials() == []


@pytest.fixture
def pods(plane: ControlPlane, request: pytest.FixtureRequest) -> Iterator[str]:
    """The path of the pods of a namespace of the test's own."""
    namespace = plane.create_namespace(f"ns-{abs(hash(request.node.name)) % 10**8}")
    yield f"/api/v1/namespaces/{namespace}/pods"
    plane.remove_namespace(namespace)


def evicted(plane: ControlPlane, pods: str) -> set[str]:
    """The pods that kube-scheduler has chosen as victims."""
    return {
        pod["metadata"]["name"]
        for pod in plane.request("GET", pods)["items"]
        if any(one["type"] == "DisruptionTarget" for one in pod["status"].get("conditions", []))
    }


def test_the_vms_of_one_socket_go_and_their_cores_are_the_new_vms_once_their_containers_have_ended(
    plane: ControlPlane, installed: Installation, pods: str
) -> None:
    namespace = pods.split("/")[4]
    with nodes(plane, installed, {"full": MACHINE}) as background:
        where = {}
        for number, priority in enumerate(("low", "middle", "low", "low")):
            where[f"vm-{number}"] = running(plane, pods, f"vm-{number}", 4, priority)
        sockets = {name: placement.packages for name, placement in where.items()}
        (spared,) = sockets["vm-1"]
        doomed = {name for name, packages in sockets.items() if packages != (spared,)}
        assert len(doomed) == 2
        for name in doomed:
            background.do(background.nodes.hold_termination(namespace, name))

        create(plane, pods, "important", 8, "high")
        for name in doomed:
            wait_for(plane, pods, name, lambda pod: "deletionTimestamp" in pod["metadata"])
        first, second = sorted(doomed)
        background.do(background.nodes.allow_termination(namespace, first))
        create(plane, pods, "greedy", 4, "low")  # as the evicted VM that is created again
        told(plane, pods, "greedy", "Insufficient")
        assert not plane.request("GET", f"{pods}/important")["spec"].get("nodeName")
        background.do(background.nodes.allow_termination(namespace, second))

        placement = bound(plane, pods, "important")
        freed = where[first].owned | where[second].owned
        assert format_cpu_list(placement.owned) == format_cpu_list(freed)
        left = {pod["metadata"]["name"] for pod in plane.request("GET", pods)["items"]}
        assert left == (where.keys() - doomed) | {"important", "greedy"}
        assert evicted(plane, pods) == set()


def test_pods_of_a_disruption_budget_are_spared_where_others_can_go(
    plane: ControlPlane, installed: Installation, pods: str
) -> None:
    namespace = pods.split("/")[4]
    with nodes(plane, installed, {"full": MACHINE}):
        sockets = {
            name: running(plane, pods, name, 8, priority).packages
            for name, priority in (("kept", "low"), ("other", "middle"))
        }
        assert sockets["kept"] != sockets["other"]
        budget = {
            "metadata": {"name": "kept"},
            "spec": {"minAvailable": 1, "selector": {"matchLabels": {"name": "kept"}}},
        }
        plane.request("POST", BUDGETS.format(namespace), budget)
        create(plane, pods, "important", 8, "high")
        assert bound(plane, pods, "important").packages == sockets["other"]
        assert not plane.request("GET", f"{pods}/kept")["metadata"].get("deletionTimestamp")


def test_no_pod_is_evicted_where_the_cores_of_all_victims_would_not_do(
    plane: ControlPlane, installed: Installation, pods: str
) -> None:
    """kube-scheduler counts eight CPUs that evictions would free: four on each socket."""
    with nodes(plane, installed, {"full": MACHINE}):
        for number in range(2):
            first = running(plane, pods, f"stays-{number}", 5, "high")
            second = running(plane, pods, f"low-{number}", 3, "low")
            assert first.packages == second.packages
        create(plane, pods, "important", 6, "high")
        told(plane, pods, "important", "no candidate node for preemption")
        assert evicted(plane, pods) == set()


def test_where_only_cores_are_missing_on_every_node_kube_scheduler_finds_no_pod_to_evict(
    plane: ControlPlane, installed: Installation, pods: str
) -> None:
    """CPUs are enough in number without any eviction, so it does not ask."""
    with nodes(plane, installed, {"scattered": MACHINE}):
        for number in range(2):
            running(plane, pods, f"low-{number}", 5, "low")
        create(plane, pods, "important", 6, "high")
        message = told(plane, pods, "important", "no socket with 6 free CPUs, best 3 on scattered socket 0")
        assert "Preemption is not helpful for scheduling" in message
        assert evicted(plane, pods) == set()


def test_where_only_cores_are_missing_a_vm_moves_for_the_waiting_one_and_no_pod_is_evicted(
    plane: ControlPlane, installed: Installation, pods: str
) -> None:
    # No other test has this node: serve waits for the reports of an agent that was there a moment ago.
    with nodes(plane, installed, {"reported": MACHINE}):
        where = {}
        for number in range(4):
            name = f"low-{number}"
            create(plane, pods, name, 4, "low", annotations={"kvplace.io/movable": "true"})
            where[name] = bound(plane, pods, name)
        uids = {name: plane.request("GET", f"{pods}/{name}")["metadata"]["uid"] for name in where}
        stays = {placement.packages: name for name, placement in where.items()}
        assert len(stays) == 2
        for name in where.keys() - set(stays.values()):
            plane.request("DELETE", f"{pods}/{name}")
        revisions = {uids[name]: 1 for name in stays.values()}
        # Before an agent reports: serve would wait for its report about the deleted pods.
        wait_for(plane, LEDGERS, "reported", lambda ledger: set(ledger["spec"]["claims"]) == set(revisions))
        agent_reports(plane, "reported", revisions)

        create(plane, pods, "waits", 8, "high", annotations={"kvplace.io/make-room": "true"})
        ledger = wait_for(plane, LEDGERS, "reported", lambda ledger: moving(ledger) != [])
        (mover,) = moving(ledger)
        name = next(name for name, uid in uids.items() if uid == mover)
        wait_for(plane, pods, name, lambda pod: revision_of(pod) == 2)
        assert not plane.request("GET", f"{pods}/waits")["spec"].get("nodeName")
        agent_reports(plane, "reported", {**revisions, mover: 2})

        placement = bound(plane, pods, "waits")
        assert placement.packages == where[name].packages
        assert placement.owned & where[name].owned == where[name].owned
        assert evicted(plane, pods) == set()
        assert "kvplace_extender_room_moves_total 1.0" in installed.replicas[0].metrics()
        left = {pod["metadata"]["name"] for pod in plane.request("GET", pods)["items"]}
        assert left == {*stays.values(), "waits"}


def test_where_only_cores_are_missing_others_are_evicted_if_kube_scheduler_asks_about_another_node(
    plane: ControlPlane, installed: Installation, pods: str
) -> None:
    # Not a node of another test: cores of pods that are deleted by force stay owned until its agent is known.
    machines = {"uneven": MACHINE, "full": MACHINE}
    with nodes(plane, installed, machines):
        for name, cpus, priority in (
            ("full-0", 8, "middle"),
            ("full-1", 8, "middle"),
            ("uneven-0", 5, "low"),
            ("uneven-1", 5, "low"),
        ):
            selector = {"kubernetes.io/hostname": name.partition("-")[0]}
            create(plane, pods, name, cpus, priority, nodeSelector=selector)
            bound(plane, pods, name)
        create(plane, pods, "important", 6, "high")
        bound(plane, pods, "important")
        left = {pod["metadata"]["name"] for pod in plane.request("GET", pods)["items"]}
        assert left >= {"important", "full-0", "full-1"}
        assert len(left) == 4


def test_a_kubevirt_vm_gets_the_cores_of_another_one_though_two_kube_schedulers_preempt_for_it(
    cluster: ControlPlane, virt: KubeVirt, kvplace: Installation, vm_namespace: str
) -> None:
    create_priority_classes(cluster)
    pods = f"/api/v1/namespaces/{vm_namespace}/pods"
    with nodes(cluster, kvplace, {"full": MACHINE}):
        where = {}
        for name, priority in (("low", "low"), ("middle", "middle")):
            virt.create(VMIS, vm_namespace, vmi_manifest(name, cores=8, priorityClassName=priority))
            where[name] = bound(cluster, pods, virt.launcher_pod(vm_namespace, name)["metadata"]["name"])
        virt.create(VMIS, vm_namespace, vmi_manifest("high", cores=8, priorityClassName="high"))
        placement = bound(cluster, pods, virt.launcher_pod(vm_namespace, "high")["metadata"]["name"])

        assert placement.owned == where["low"].owned
        virt.vmi_in_phase(vm_namespace, "high", "Scheduled")
        survivor = virt.launcher_pod(vm_namespace, "middle")
        assert "deletionTimestamp" not in survivor["metadata"]
        cluster.request("DELETE", f"/apis/kubevirt.io/v1/namespaces/{vm_namespace}/{VMIS}")
        ledgers = "/apis/kvplace.io/v1alpha1/nodeledgers"
        wait_for(cluster, ledgers, "full", lambda ledger: not ledger["spec"]["claims"])
