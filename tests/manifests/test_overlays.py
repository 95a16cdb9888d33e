"""Every folder and component that docs/install.md offers is applied to an API server, one after the other."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import yaml

from harness.control_plane.cluster import ControlPlane, KubectlFailed
from harness.control_plane.kubevirt_parts import installation
from kvplace.certificates.keeper import CA_SECRET, CLIENT_SECRET, SERVER_SECRET, Keeper
from kvplace.core.errors import Forbidden
from kvplace.kube.credentials import CredentialOptions
from kvplace.kube.secrets import ApiSecrets
from kvplace.kube.session import open_session
from kvplace.service.process import Readiness
from tests.docs.blocks import block
from tests.docs.reading import page
from tests.docs.shell import Shell
from tests.manifests.conftest import STRICTLY, Render, overlay
from tests.manifests.objects import NAMESPACE, Json

OWN = "kvplace-certificates"
"""The namespace of the CA and of what keeps it."""
PROMETHEUS_KINDS = ("podmonitors", "prometheusrules")
PLUGINS = "plugins.plugin.kubevirt.io"
WEBHOOKS = (
    "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/vms.kvplace.io",
    "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations/kvplace",
)
COMPONENTS = {
    "main-scheduler": {"Deployment kvplace-scheduler", "NetworkPolicy kvplace-extender-from-anywhere"},
    "without-agent": {"DaemonSet kvplace-agent", "Namespace kvplace-agent"},
    "quota-for-critical-pods": {"ResourceQuota kvplace-critical-pods"},
    "own-priority-classes": {"PriorityClass kvplace-control-plane", "PriorityClass kvplace-agent"},
    "monitoring": {
        "PodMonitor kvplace",
        "PodMonitor kvplace-agent",
        "PodMonitor kvplace-certificates",
        "PrometheusRule kvplace",
        "ConfigMap kvplace-dashboard",
    },
    "api-server-anywhere": set(),
    "plugin": {"Plugin kvplace"},
    "moves-between-nodes": {
        "ClusterRole kvplace-serve-migrations",
        "ValidatingAdmissionPolicy migrations.kvplace.io",
    },
    "dra-driver-cpu": {"ValidatingAdmissionPolicy resource-claims.kvplace.io"},
    "namespace-limits": {"ValidatingAdmissionPolicy namespace-limits.kvplace.io"},
}
"""The most important differences between the objects of an installation."""


def in_the_order_of_the_page() -> tuple[str, ...]:
    found = re.findall(r"^\|.*\| `\.\./manifests/([a-z-]+)` \|$", page("install.md"), re.MULTILINE)
    assert sorted(found) == sorted(COMPONENTS)
    assert found[-1] == "without-agent"
    return tuple(found)


def named(objects: list[Json]) -> dict[str, Json]:
    return {
        f"{entry['kind']} {entry['metadata'].get('namespace', '')}/{entry['metadata']['name']}": entry
        for entry in objects
    }


@pytest.fixture(scope="module")
def installed(
    kubernetes_programs: Path, kubevirt_programs: Path, manifests: Path, prometheus_operator_crds: Path
) -> Iterator[ControlPlane]:
    """Apply the default folder to a control plane of this module's own.

    It serves Prometheus' kinds and KubeVirt's Plugins.
    """
    assert kubernetes_programs.is_dir()
    with ControlPlane(service_account_admission=True) as plane:
        for kind in PROMETHEUS_KINDS:
            file = prometheus_operator_crds / f"monitoring.coreos.com_{kind}.yaml"
            plane.kubectl("apply", "--server-side", "-f", str(file))
        (plugins,) = [
            crd for crd in installation(kubevirt_programs)["crds"] if crd["metadata"]["name"] == PLUGINS
        ]
        plane.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump(plugins))
        plane.wait_for_crds(PLUGINS)
        plane.wait_for_crds(*(f"{kind}.monitoring.coreos.com" for kind in PROMETHEUS_KINDS))
        plane.kubectl("apply", *STRICTLY, "-k", str(manifests / "default"))
        yield plane


@contextlib.asynccontextmanager
async def keeper_with_the_rights_of_its_pod(plane: ControlPlane) -> AsyncIterator[Keeper]:
    kubeconfig = plane.service_account_kubeconfig(OWN, "kvplace-certificates")
    async with await open_session(CredentialOptions(kubeconfig=str(kubeconfig))) as session:
        yield Keeper(ApiSecrets(session), NAMESPACE, OWN, "kvplace-scheduler", Readiness(""))


def look(plane: ControlPlane) -> None:
    async def run() -> None:
        async with keeper_with_the_rights_of_its_pod(plane) as keeper:
            await keeper.check()

    asyncio.run(run())


def trusted(plane: ControlPlane) -> set[str]:
    return {
        webhook["clientConfig"].get("caBundle", "")
        for path in WEBHOOKS
        for webhook in plane.request("GET", path)["webhooks"]
    }


def test_the_certificates_are_made_with_the_rights_of_the_manifests_and_survive_another_apply(
    installed: ControlPlane, manifests: Path
) -> None:
    look(installed)
    secrets = {
        (namespace, name): installed.request("GET", f"/api/v1/namespaces/{namespace}/secrets/{name}")
        for namespace, name in ((OWN, CA_SECRET), (NAMESPACE, SERVER_SECRET), (NAMESPACE, CLIENT_SECRET))
    }
    assert {secret["type"] for secret in secrets.values()} == {"kubernetes.io/tls"}
    authority = secrets[OWN, CA_SECRET]["data"]["tls.crt"]
    assert base64.b64decode(authority).startswith(b"-----BEGIN CERTIFICATE")
    assert {secret["data"]["ca.crt"] for secret in secrets.values()} == trusted(installed) == {authority}

    installed.kubectl("apply", *STRICTLY, "-k", str(manifests / "default"))
    look(installed)
    assert trusted(installed) == {authority}
    for (namespace, name), before in secrets.items():
        after = installed.request("GET", f"/api/v1/namespaces/{namespace}/secrets/{name}")
        assert after["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]


def test_the_commands_of_the_page_write_the_certificates_for_the_main_scheduler(
    installed: ControlPlane, tmp_path: Path
) -> None:
    look(installed)
    shell = Shell(tmp_path, installed)
    shell.run(block("docs/scheduler.md", "kubectl -n kvplace-system get secret kvplace-scheduler-client"))
    stored = installed.request("GET", f"/api/v1/namespaces/{NAMESPACE}/secrets/{CLIENT_SECRET}")["data"]
    for name, content in stored.items():
        assert (shell.folder / name).read_bytes() == base64.b64decode(content), name


def test_a_damaged_secret_is_fixed_in_the_cluster(installed: ControlPlane) -> None:
    look(installed)
    path = f"/api/v1/namespaces/{NAMESPACE}/secrets/{SERVER_SECRET}"
    patch = {"data": {"tls.crt": base64.b64encode(b"no certificate").decode()}}
    installed.request("PATCH", path, patch, content_type="application/merge-patch+json")
    look(installed)
    assert base64.b64decode(installed.request("GET", path)["data"]["tls.crt"]).startswith(b"-----BEGIN")


def test_other_secrets_and_webhooks_are_closed_to_the_keeper(installed: ControlPlane) -> None:
    async def refused() -> None:
        async with await open_session(
            CredentialOptions(
                kubeconfig=str(installed.service_account_kubeconfig(OWN, "kvplace-certificates"))
            )
        ) as session:
            store = ApiSecrets(session)
            for namespace, name in ((NAMESPACE, "another"), (NAMESPACE, CA_SECRET), (OWN, SERVER_SECRET)):
                with pytest.raises(Forbidden):
                    await store.read_secret(namespace, name)

    asyncio.run(refused())


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_component_changes_the_objects_of_its_description_and_the_api_server_accepts_them(
    installed: ControlPlane, manifests: Path, render: Render, component: str
) -> None:
    folder = overlay(manifests, component)
    plain, changed = named(render("default")), named(render(f"../{folder.name}"))
    differing = {key.split(" ")[0] + " " + key.rpartition("/")[2] for key in plain.keys() ^ changed.keys()}
    assert COMPONENTS[component] <= differing
    assert bool(differing) == bool(COMPONENTS[component])
    edited = {key for key in plain.keys() & changed.keys() if plain[key] != changed[key]}
    assert edited or differing

    said = installed.kubectl("apply", *STRICTLY, "-f", "-", stdin=yaml.safe_dump_all(changed.values()))
    assert said.count("serverside-applied") == len(changed)


def test_the_folder_of_the_page_is_applied_by_its_command(installed: ControlPlane, tmp_path: Path) -> None:
    shell = Shell(tmp_path, installed)
    (shell.folder / "my-cluster").mkdir()
    folder = block("docs/install.md", "- {name: kvplace/serve, newName:")
    (shell.folder / "my-cluster" / "kustomization.yaml").write_text(folder)
    (said,) = shell.run("kubectl apply --server-side -k my-cluster")
    assert "deployment.apps/kvplace-serve serverside-applied" in said
    deployment = installed.request("GET", f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/kvplace-serve")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["image"].startswith("registry.example/")


@pytest.mark.parametrize("others", [(), in_the_order_of_the_page()[:-1]], ids=["alone", "behind all others"])
def test_without_the_agent_nothing_of_it_is_left(
    render: Render, manifests: Path, others: tuple[str, ...]
) -> None:
    objects = render(f"../{overlay(manifests, *others, 'without-agent').name}")
    left = {
        key for key, entry in named(objects).items() if entry["metadata"].get("namespace") == "kvplace-agent"
    }
    assert left == set()
    assert not [key for key in named(objects) if "agent" in key.lower()]


def test_with_own_priority_classes_no_pod_uses_those_of_the_system(render: Render, manifests: Path) -> None:
    objects = render(f"../{overlay(manifests, 'own-priority-classes').name}")
    used = {
        entry["spec"]["template"]["spec"]["priorityClassName"]
        for entry in objects
        if entry["kind"] in ("Deployment", "DaemonSet")
    }
    assert used == {entry["metadata"]["name"] for entry in objects if entry["kind"] == "PriorityClass"}


def test_two_installations_cannot_share_a_cluster_unnoticed(installed: ControlPlane, manifests: Path) -> None:
    """Whoever applies the manifests as another manager is informed what another one has written."""
    folder = str(overlay(manifests, "own-priority-classes"))
    as_somebody_else = ("--server-side", "--field-manager=somebody-else", "--dry-run=server")
    with pytest.raises(KubectlFailed, match="conflict"):
        installed.kubectl("apply", *as_somebody_else, "-k", folder)
