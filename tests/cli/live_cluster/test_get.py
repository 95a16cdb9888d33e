"""`kvplace get` on the real API server."""

from __future__ import annotations

import json
import os
import signal
import subprocess

import yaml

from kvplace.core.cpuset import parse_cpu_list
from kvplace.core.request import Request
from tests.cli.calls import COMMAND
from tests.cli.live_cluster.small_cluster import MERGE_PATCH, Call, SmallCluster, create_pod, rows


def test_the_vms_of_a_namespace_with_their_cores_and_states(on_cluster: Call, cluster: SmallCluster) -> None:
    called = on_cluster("get", "vms", "-n", cluster.namespace)
    assert (called.code, called.err) == (0, "")
    head, *lines = rows(called.out)
    assert head == ["NAME", "STATE", "PHASE", "NODE", "POLICY", "CPUS", "NUMA", "AGE"]
    assert [line[:4] for line in lines] == [
        ["cache", "Running", "-", cluster.first],
        ["db", "Pinned", "-", cluster.first],
        ["late", "Waiting", "-", "-"],
    ]
    by_name = {line[0]: line for line in lines}
    assert parse_cpu_list(by_name["db"][5]).bit_count() == 4
    assert len(by_name["db"][6]) == 1


def test_all_namespaces_have_a_column_and_labels_select(on_cluster: Call, cluster: SmallCluster) -> None:
    called = on_cluster("get", "vms", "-A", "-l", "app in (web,db)", "-o", "wide")
    head, *lines = rows(called.out)
    assert (head[0], head[-1]) == ("NAMESPACE", "PINNED")
    ours = [line for line in lines if line[0] in (cluster.namespace, cluster.other)]
    assert [(line[0], line[1], line[2], line[-1]) for line in ours] == [
        (cluster.namespace, "db", "Pinned", "revision 1: every thread is in its place"),
        (cluster.other, "web", "NotPinned", "ThreadsElsewhere: revision 1: vCPU 0 left its CPU"),
    ]


def test_only_vms_in_the_chosen_states_are_listed(on_cluster: Call, cluster: SmallCluster) -> None:
    called = on_cluster("get", "vmis", "-A", "--state", "notpinned", "--state", "Waiting", "-o", "name")
    assert called.out.split() == ["pod/late", "virtualmachineinstance.kubevirt.io/web"]
    called = on_cluster("get", "vms", "-n", cluster.namespace, "--state", "Ended")
    assert (called.code, called.out) == (0, "")
    assert f"no VM that requests cores in namespace {cluster.namespace} in state Ended" in called.err


def test_vms_are_listed_in_the_chosen_order(on_cluster: Call, cluster: SmallCluster) -> None:
    listed = on_cluster("get", "vms", "-n", cluster.namespace, "--sort-by", "cpus", "--no-headers").out
    sizes = [0 if row[5] == "-" else parse_cpu_list(row[5]).bit_count() for row in rows(listed)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1]


def test_states_and_orders_are_not_for_nodes(on_cluster: Call) -> None:
    called = on_cluster("get", "nodes", "--state", "Pinned")
    assert called.code == 2
    assert "--state and --sort-by are for VMs" in called.err


def test_a_misspelt_state_is_answered_with_the_one_that_was_probably_meant(on_cluster: Call) -> None:
    called = on_cluster("get", "vms", "--state", "Pined")
    assert called.code == 2
    assert "did you mean 'Pinned'?" in called.err


def test_one_vm_is_one_document_and_several_are_a_list(on_cluster: Call, cluster: SmallCluster) -> None:
    one = json.loads(on_cluster("get", "vm", "db", "-n", cluster.namespace, "-o", "json").out)
    assert (one["kind"], one["state"], one["node"]) == ("VmView", "Pinned", cluster.first)
    assert one["request"]["vcpus"] == 4
    assert one["placement"]["podUid"] == one["uid"]
    several = yaml.safe_load(on_cluster("get", "vms", "-n", cluster.namespace, "-o", "yaml").out)
    assert several["kind"] == "VmViewList"
    assert [item["name"] for item in several["items"]] == ["cache", "db", "late"]


def test_names_are_those_that_kubectl_takes(on_cluster: Call, cluster: SmallCluster) -> None:
    called = on_cluster("get", "vms", "-n", cluster.namespace, "-o", "name")
    assert called.out.split() == ["pod/cache", "virtualmachineinstance.kubevirt.io/db", "pod/late"]
    assert on_cluster("get", "nodes", cluster.first, "-o", "name").out.split() == [f"node/{cluster.first}"]


def test_a_name_that_is_not_there_is_named_with_the_one_that_was_meant(
    on_cluster: Call, cluster: SmallCluster
) -> None:
    called = on_cluster("get", "vms", "dbb", "late", "-n", cluster.namespace)
    assert called.code == 1
    limits = f"that requests cores in namespace {cluster.namespace}"
    assert f"there is no VM called 'dbb' {limits}; did you mean 'db'?" in called.err
    assert "late" in called.out
    empty = on_cluster("get", "vms", "-n", "nowhere")
    assert (empty.code, empty.out) == (0, "")
    assert "there is no VM that requests cores in namespace nowhere" in empty.err


def test_nodes_with_their_cpus_by_use(on_cluster: Call, cluster: SmallCluster) -> None:
    called = on_cluster("get", "nodes", cluster.first, cluster.second, cluster.bare)
    assert called.code == 0
    head, *lines = rows(called.out)
    assert head == [
        "NAME", "STATUS", "CPUS", "RESERVED", "OWNED", "SHARED", "FREE", "LARGEST-NUMA", "VMS", "PROBLEM"
    ]  # fmt: skip
    by_name = {line[0]: line[1:] for line in lines}
    assert by_name[cluster.second] == ["Ready", "16", "0", "0", "0", "16", "8", "0", "-"]
    assert by_name[cluster.first][:6] == ["Ready", "16", "0", "6", "2", "8"]
    assert by_name[cluster.bare][:2] == ["Ready", "-"]
    assert "neither a NodeTopology object nor a cpu-map" in by_name[cluster.bare][-1]


def test_the_document_of_a_node_names_its_vms_and_free_cpus(on_cluster: Call, cluster: SmallCluster) -> None:
    node = json.loads(on_cluster("get", "node", cluster.first, "-o", "json").out)
    cpus = {use: parse_cpu_list(text) for use, text in node["cpus"].items()}
    assert cpus["owned"] | cpus["shared"] | cpus["free"] == cpus["all"]
    assert {vm["name"] for vm in node["vms"]} == {"db", "web", "cache"}
    assert node["largestFree"]["numa"]["cpus"] <= cpus["free"].bit_count()
    assert sum(entry["total"] - entry["free"] for entry in node["memory"]) == 2 << 30


def test_one_node_is_read_alone_and_a_name_that_is_not_there_is_answered_with_the_one_that_was_meant(
    on_cluster: Call, cluster: SmallCluster
) -> None:
    node = json.loads(on_cluster("get", "node", cluster.second, "-o", "json").out)
    assert (node["name"], node["status"]) == (cluster.second, "Ready")
    called = on_cluster("get", "node", cluster.second + "x")
    assert (called.code, called.out) == (1, "")
    assert f"there is no node called '{cluster.second}x'; did you mean '{cluster.second}'?" in called.err


def test_watching_nodes_prints_when_one_is_cordoned(cluster: SmallCluster) -> None:
    node, path = cluster.second, f"/api/v1/nodes/{cluster.second}"
    options = ["-w", "--no-headers", "--kubeconfig", str(cluster.plane.kubeconfig)]
    with subprocess.Popen(
        [*COMMAND, "get", "nodes", node, *options],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as watching:
        assert watching.stdout is not None
        assert watching.stdout.readline().split()[:2] == [node, "Ready"]
        cluster.plane.request("PATCH", path, {"spec": {"unschedulable": True}}, content_type=MERGE_PATCH)
        try:
            assert watching.stdout.readline().split()[:2] == [node, "Ready,SchedulingDisabled"]
        finally:
            cluster.plane.request(
                "PATCH", path, {"spec": {"unschedulable": None, "taints": None}}, content_type=MERGE_PATCH
            )
            watching.send_signal(signal.SIGINT)
        assert watching.wait() == 130


def test_watching_prints_changes_until_it_is_interrupted(cluster: SmallCluster) -> None:
    options = ["-n", cluster.other, "-w", "--no-headers", "--kubeconfig", str(cluster.plane.kubeconfig)]
    with subprocess.Popen(
        [*COMMAND, "get", "vms", *options],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as watching:
        assert watching.stdout is not None
        assert watching.stdout.readline().split()[:2] == ["web", "NotPinned"]
        create_pod(cluster, cluster.other, "fresh", Request(2), vmi=False)
        assert watching.stdout.readline().split()[:2] == ["fresh", "Waiting"]
        watching.send_signal(signal.SIGINT)
        assert watching.wait() == 130
    cluster.plane.request("DELETE", f"/api/v1/namespaces/{cluster.other}/pods/fresh?gracePeriodSeconds=0")


def test_the_right_to_list_pods_of_a_namespace_is_all_that_a_tenant_needs(
    on_cluster: Call, cluster: SmallCluster
) -> None:
    plane = cluster.plane
    user = f"tenant-{cluster.namespace}"
    called = on_cluster("get", "vms", "-n", cluster.namespace, "--as", user)
    assert called.code == 2
    assert f'you may not list pods (pods is forbidden: User "{user}"' in called.err
    assert "ClusterRole kvplace-viewer grants this right" in called.err
    path = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{cluster.namespace}"
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]
    plane.request("POST", f"{path}/roles", {"metadata": {"name": "lists-pods"}, "rules": rules})
    plane.request(
        "POST",
        f"{path}/rolebindings",
        {
            "metadata": {"name": "lists-pods"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "lists-pods"},
            "subjects": [{"kind": "User", "name": user, "apiGroup": "rbac.authorization.k8s.io"}],
        },
    )
    while (called := on_cluster("get", "vms", "-n", cluster.namespace, "--as", user)).code == 2:
        assert "you may not list pods" in called.err  # until the API server has seen the binding
    assert (called.code, "late" in called.out) == (0, True)
