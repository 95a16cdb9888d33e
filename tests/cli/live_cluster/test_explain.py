"""`explain` on the real API server: a VM that runs, one that waits, and names that are not there."""

from __future__ import annotations

from kvplace.core.errors import ExitCode
from tests.cli.live_cluster.small_cluster import Call, SmallCluster, claim, release_all
from tests.kube.example_claims import claim as claim_of


def test_a_running_vm_states_where_it_sits_and_that_it_is_measured(
    on_cluster: Call, cluster: SmallCluster
) -> None:
    called = on_cluster("explain", "vm/db", "-n", cluster.namespace)
    assert called.code == ExitCode.DONE, called.err
    assert f"{cluster.first} (pod virt-launcher-db, Pinned)" in called.out
    assert "pinned      yes" in called.out
    called = on_cluster("explain", "vm/web", "-n", cluster.other)
    assert "pinned      no" in called.out
    assert ": ThreadsElsewhere: revision 1: vCPU 0 left its CPU" in called.out


def test_a_waiting_pod_is_asked_of_every_node_and_claims_without_pods_are_named(
    on_cluster: Call, cluster: SmallCluster
) -> None:
    claim(cluster, cluster.second, claim_of("ghost", 1))
    called = on_cluster("explain", "pod/late", "-n", cluster.namespace, "-o", "wide")
    release_all(cluster, cluster.second)
    assert "no scheduler has tried it yet" in called.out
    assert f"cores on {cluster.second} are held for pods that were not found" in called.out


def test_a_name_of_another_namespace_or_with_a_slip_leads_to_the_right_one(
    on_cluster: Call, cluster: SmallCluster
) -> None:
    elsewhere = on_cluster("explain", "pod/virt-launcher-web", "-n", cluster.namespace)
    assert elsewhere.code == ExitCode.FAILED
    assert f"but one of this name in {cluster.other}: choose its namespace with -n" in elsewhere.err
    slip = on_cluster("explain", "vm/dbb", "-n", cluster.namespace)
    assert slip.code == ExitCode.FAILED
    assert "did you mean 'db'?" in slip.err
