"""Uninstalling as docs/install.md states leaves nothing behind, whatever the ledgers hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.control_plane.cluster import ControlPlane
from tests.docs.blocks import block
from tests.docs.shell import Shell
from tests.manifests.conftest import STRICTLY
from tests.manifests.policies import refused
from tests.manifests.uninstalled import LEDGER, everything


@pytest.fixture
def cluster(kubernetes_programs: Path) -> Iterator[ControlPlane]:
    """Start a control plane for this test alone; its controllers empty namespaces."""
    assert kubernetes_programs.is_dir()
    with ControlPlane(controller_manager=True) as plane:
        yield plane


def test_nothing_is_left_although_a_ledger_still_has_owners(
    cluster: ControlPlane, manifests: Path, tmp_path: Path
) -> None:
    made_by_the_api_server = ("namespace/default", "namespace/kube-node-lease", "namespace/kube-public")
    cluster.kubectl("wait", "--for=create", *made_by_the_api_server)
    before = everything(cluster)
    folder = str(manifests / "own-certificates")
    cluster.kubectl("apply", *STRICTLY, "-k", folder)
    cluster.wait_for_crds()
    cluster.kubectl("apply", "-f", "-", stdin=LEDGER)
    refused(lambda: cluster.request("DELETE", "/apis/kvplace.io/v1alpha1/nodeledgers/worker?dryRun=All"))
    assert everything(cluster) - before

    cluster.kubectl("delete", "--timeout=120s", "-k", folder)

    shell = Shell(tmp_path, cluster)
    shell.run("kubectl apply --server-side -k manifests/node-resource-topology")
    cluster.wait_for_crds("noderesourcetopologies.topology.node.k8s.io")
    cluster.request(
        "POST", "/api/v1/nodes", {"metadata": {"name": "worker", "annotations": {"cpu-map": "{}"}}}
    )
    shell.run(block("docs/install.md", "kubectl annotate nodes --all cpu-map-"))
    assert "cpu-map" not in cluster.kubectl("get", "node", "worker", "-o", "yaml")
    shell.run(block("docs/install.md", "kubectl delete noderesourcetopologies"))
    shell.run("kubectl delete -k manifests/node-resource-topology")

    assert everything(cluster) == before
