"""A cluster of its own on which kvplace has been installed as docs/install.md states.

Not the shared one: the webhooks and policies of an installation concern every pod of the cluster they are in.
"""

from __future__ import annotations

import secrets
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.control_plane.cluster import ControlPlane, Json
from tests.manifests.agents import NAMESPACE, TOPOLOGIES, Agent, condition, cpu_map, pod_on, token_of
from tests.manifests.policies import refused

MANIFESTS = Path(__file__).resolve().parents[2] / "manifests"
STRICTLY = ("--server-side", "--validate=strict", "--warnings-as-errors")
Render = Callable[[str], list[dict[str, Any]]]


def overlay(manifests: Path, *components: str) -> Path:
    """Write an operator's folder that uses components."""
    folder = manifests.parent / f"with-{'-'.join(components)}"
    folder.mkdir(exist_ok=True)
    content = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["../manifests/default"],
        "components": [f"../manifests/{component}" for component in components],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(content))
    return folder


@pytest.fixture(scope="package")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the manifests and make certificates beside them, as an operator does."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("operator") / "manifests"
    shutil.copytree(MANIFESTS, folder, ignore=shutil.ignore_patterns("certificates"))
    subprocess.run([folder / "own-certificates" / "make-certificates"], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="package")
def fresh_cluster(kubernetes_programs: Path) -> Iterator[ControlPlane]:
    """Start a control plane on which nothing has been installed yet.

    Its controllers make pods of Deployments and aggregate roles, as everywhere.
    """
    assert kubernetes_programs.is_dir()
    with ControlPlane(controller_manager=True, service_account_admission=True) as plane:
        yield plane


@pytest.fixture(scope="package")
def render(fresh_cluster: ControlPlane, manifests: Path) -> Render:
    """Give what `kubectl kustomize` makes of a folder of the manifests."""

    def rendered(folder: str) -> list[dict[str, Any]]:
        text = fresh_cluster.kubectl("kustomize", str(manifests / folder))
        return [document for document in yaml.load_all(text, yaml.CSafeLoader) if document]

    return rendered


@pytest.fixture(scope="package")
def cluster(fresh_cluster: ControlPlane, manifests: Path) -> ControlPlane:
    """Install kvplace with certificates of one's own."""
    fresh_cluster.kubectl("apply", *STRICTLY, "-k", str(manifests / "own-certificates"))
    return fresh_cluster


@pytest.fixture(scope="module")
def agent(cluster: ControlPlane) -> Iterator[Agent]:
    """Give an agent once the policies that limit it are in effect."""
    manifests = cluster.kubectl("get", "daemonset", "-n", NAMESPACE, "-o", "name")
    assert manifests.strip() == "daemonset.apps/kvplace-agent"
    node, other = (f"{name}-{secrets.token_hex(4)}" for name in ("mine", "other"))
    for name in (node, other):
        body: Json = {"metadata": {"name": name, "labels": {"rack": "a"}}}
        cluster.request("POST", "/api/v1/nodes", body)
    found = Agent(cluster, node, other, token_of(cluster, node))
    refused(lambda: found.create_topology(other, f"{TOPOLOGIES}?dryRun=All"))
    refused(lambda: found.request("PATCH", f"/api/v1/nodes/{other}?dryRun=All", cpu_map("{}")))
    refused(lambda: found.request("PATCH", f"{pod_on(cluster, other)}/status?dryRun=All", condition()))
    yield found
    for name in (node, other):
        cluster.request("DELETE", f"/api/v1/nodes/{name}")


@pytest.fixture(scope="module")
def resource_topologies(cluster: ControlPlane, manifests: Path) -> None:
    """Install the kind NodeResourceTopology, as docs/agent.md states."""
    cluster.kubectl("apply", "--server-side", "-k", f"{manifests}/node-resource-topology")
    cluster.wait_for_crds("noderesourcetopologies.topology.node.k8s.io")
