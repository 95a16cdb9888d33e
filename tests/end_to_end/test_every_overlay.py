"""A VM gets its cores with exactly the rights, rules and settings of each folder that docs/install.md offers.

So it does with what Helm makes of the chart. One control plane: what a folder or a chart has installed is
removed before the next one is.
"""

from __future__ import annotations

import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from harness.control_plane.cluster import ControlPlane, Json, Scheduler
from harness.control_plane.hollow_node import nodes_in_background
from harness.control_plane.kubevirt_parts import KubeVirt
from harness.control_plane.watching import wait_for
from harness.kvplace_cluster.installation import MANIFESTS, Installation, described_nodes
from harness.kvplace_cluster.machines import node_shape, two_socket_machine
from harness.kvplace_cluster.vms import VMIS, vmi_manifest
from kvplace import __version__
from kvplace.core.cpuset import cpus_of
from kvplace.core.placement import PodPlacement
from kvplace.core.well_known_names import PLACEMENT
from release.chart import write_chart
from release.images import IMAGES, ReleasedImage
from release.manifests import copy_manifests
from tests.docs.blocks import block

NODE = "worker"
FOLDERS = {
    "default": ("default", ()),
    "cert-manager": ("cert-manager", ()),
    "own-certificates": ("own-certificates", ()),
    "without-agent": ("default", ("without-agent",)),
    "all other components": (
        "default",
        (
            "monitoring",
            "quota-for-critical-pods",
            "own-priority-classes",
            "api-server-anywhere",
            "namespace-limits",
            "moves-between-nodes",
        ),
    ),
}
CHARTS = {
    "default values": (),
    "other values": (
        'serve.makeRoom="nodes"',
        'serve.strategy="spread"',
        "serve.nominateFromNodes=0",
        'agent.reservedCpus="0-1"',
        'certificates="cert-manager"',
        'priorityClassNames={"controlPlane": "own", "agent": "own"}',
        "monitoring.enabled=true",
    ),
    "the main scheduler": ("scheduler.enabled=false", "agent.enabled=false"),
}


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the manifests, with certificates of one's own."""
    folder = tmp_path_factory.mktemp("operator") / "manifests"
    shutil.copytree(MANIFESTS, folder, ignore=shutil.ignore_patterns("certificates"))
    subprocess.run([folder / "own-certificates" / "make-certificates"], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def plane(kubernetes_programs: Path) -> Iterator[ControlPlane]:
    """Start a control plane of its own: nothing of another installation may help."""
    assert kubernetes_programs.is_dir()
    with ControlPlane() as running:
        yield running


@pytest.fixture(scope="module")
def kubevirt(plane: ControlPlane, kubevirt_programs: Path) -> Iterator[KubeVirt]:
    """Run KubeVirt in it."""
    with KubeVirt(plane, kubevirt_programs) as running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def node(plane: ControlPlane) -> Iterator[None]:
    """Run one hollow node."""
    with nodes_in_background(plane, [node_shape(NODE, two_socket_machine())]):
        yield


@pytest.fixture
def namespace(plane: ControlPlane) -> Iterator[str]:
    name = plane.create_namespace(f"vms-{secrets.token_hex(4)}")
    yield name
    plane.remove_namespace(name)


@pytest.fixture(scope="module")
def chart(plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the chart of a release; nothing runs in containers here, so its images need not be built."""
    folder = tmp_path_factory.mktemp("chart")

    def image(name: str) -> ReleasedImage:
        digest = f"sha256:{secrets.token_hex(32)}"
        return ReleasedImage(name, f"registry.example/{name}", __version__, digest, folder, folder)

    def render(part: Path) -> list[Json]:
        made = yaml.load_all(plane.kubectl("kustomize", str(part)), yaml.CSafeLoader)
        return [document for document in made if document]

    images = [image(name) for name in IMAGES]
    copy_manifests(folder / "manifests", images)
    write_chart(folder / "kvplace", __version__, images, render, folder / "manifests")
    return folder / "kvplace"


@contextmanager
def running(
    plane: ControlPlane, installation: Installation, scheduler: Scheduler | None = None
) -> Iterator[Installation]:
    """Run an installation with its scheduler, or another, and remove it; no right may have been missing."""
    scheduler = scheduler or installation.add_scheduler(installation.replicas[0])
    try:
        with described_nodes(installation, {NODE: two_socket_machine()}):
            yield installation
        assert installation.replicas[0].denials() == []
        assert "forbidden" not in scheduler.process.log.read_text()
    finally:
        scheduler.stop()
        installation.remove()


def a_vm_gets_its_cores_and_gives_them_back(
    plane: ControlPlane,
    kubevirt: KubeVirt,
    namespace: str,
    installation: Installation,
    *,
    name: str = "kvplace-scheduler",
    scheduler: Scheduler | None = None,
) -> None:
    with running(plane, installation, scheduler) as kvplace:
        kubevirt.create(VMIS, namespace, vmi_manifest("vm"))
        made = kubevirt.launcher_pod(namespace, "vm")
        pods = f"/api/v1/namespaces/{namespace}/pods"
        pod = wait_for(plane, pods, made["metadata"]["name"], lambda pod: bool(pod["spec"].get("nodeName")))

        uid = pod["metadata"]["uid"]
        bound = PodPlacement.from_json(pod["metadata"]["annotations"][PLACEMENT])
        assert (bound.pod_uid, len(bound.placement.vcpus)) == (uid, 4)
        assert kvplace.ledger(NODE)["owners"] == {str(cpu): uid for cpu in cpus_of(bound.placement.cpus)}
        assert pod["spec"]["schedulerName"] == name

        plane.request("DELETE", f"/apis/kubevirt.io/v1/namespaces/{namespace}/{VMIS}/vm")
        ledgers = "/apis/kvplace.io/v1alpha1/nodeledgers"
        wait_for(plane, ledgers, NODE, lambda ledger: not ledger["spec"]["owners"])


@pytest.mark.parametrize("name", FOLDERS)
def test_a_vm_gets_its_cores_and_gives_them_back_with_the_objects_of_a_folder(
    plane: ControlPlane, kubevirt: KubeVirt, manifests: Path, namespace: str, name: str
) -> None:
    folder, components = FOLDERS[name]
    installation = Installation(plane, manifests=manifests, resources=[folder], components=components)
    a_vm_gets_its_cores_and_gives_them_back(plane, kubevirt, namespace, installation)


def test_a_vm_gets_its_cores_from_the_main_scheduler_with_the_configuration_of_the_page(
    plane: ControlPlane, kubevirt: KubeVirt, manifests: Path, namespace: str
) -> None:
    folder = yaml.safe_load(block("docs/scheduler.md", "- ../manifests/main-scheduler"))
    installation = Installation(
        plane,
        manifests=manifests,
        resources=[Path(part).name for part in folder["resources"]],
        components=[Path(part).name for part in folder["components"]],
    )
    configuration = yaml.safe_load(block("docs/scheduler.md", "kind: KubeSchedulerConfiguration"))
    del configuration["clientConnection"], configuration["leaderElection"]
    (extender,) = configuration["extenders"]
    address = installation.replicas[0].extender_url
    extender["urlPrefix"] = extender["urlPrefix"].replace("https://10.96.0.42:8443", address)
    certificate, key = plane.issue_certificate("kvplace-scheduler")
    files = {"caFile": str(plane.ca_file), "certFile": str(certificate), "keyFile": str(key)}
    extender["tlsConfig"] |= files
    scheduler = plane.add_scheduler(configuration)
    a_vm_gets_its_cores_and_gives_them_back(
        plane, kubevirt, namespace, installation, name="default-scheduler", scheduler=scheduler
    )


@pytest.mark.parametrize("name", CHARTS)
def test_a_vm_gets_its_cores_and_gives_them_back_with_the_objects_of_the_chart(
    plane: ControlPlane, kubevirt: KubeVirt, helm: Path, chart: Path, namespace: str, name: str
) -> None:
    values = CHARTS[name]
    options = [word for value in values for word in ("--set-json", value)]
    command = [str(helm), "template", "kvplace", str(chart), *options]
    made = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    objects = [document for document in yaml.load_all(made, yaml.CSafeLoader) if document]
    scheduler = "default-scheduler" if "scheduler.enabled=false" in values else "kvplace-scheduler"
    installation = Installation(plane, objects=objects)
    a_vm_gets_its_cores_and_gives_them_back(plane, kubevirt, namespace, installation, name=scheduler)
