"""Install, upgrade and uninstall with Helm, by the commands of the page."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.control_plane.cluster import ControlPlane
from tests.docs.blocks import block, command_lines
from tests.manifests.uninstalled import LEDGER, everything

# The test waits for the release to be made.
pytestmark = pytest.mark.timeout(1200)

SYSTEM = "/apis/apps/v1/namespaces/kvplace-system"
LEDGER_PATH = "/apis/kvplace.io/v1alpha1/nodeledgers/worker"
CHART = "kvplace-chart"
OLD_IMAGE = f"registry.example/kvplace/serve@sha256:{'0' * 64}"


@pytest.fixture
def plane(kubernetes_programs: Path) -> Iterator[ControlPlane]:
    """Start a control plane for this test alone; its controllers empty namespaces."""
    assert kubernetes_programs.is_dir()
    with ControlPlane(controller_manager=True) as running:
        yield running


@pytest.fixture
def earlier(unpacked: Path, tmp_path: Path) -> Path:
    """Write the chart of an earlier release: another version, and another image of `serve`."""
    folder = tmp_path / "earlier"
    shutil.copytree(unpacked / "kvplace", folder)
    for name, change in (
        ("Chart.yaml", {"version": "0.0.9", "appVersion": "0.0.9"}),
        ("values.yaml", {"images": {"serve": OLD_IMAGE}}),
    ):
        content: dict[str, Any] = yaml.safe_load((folder / name).read_text())
        for key, value in change.items():
            content[key] = {**content[key], **value} if isinstance(value, dict) else value
        (folder / name).write_text(yaml.safe_dump(content))
    return folder


def run_helm(helm: Path, plane: ControlPlane, command: str, folder: Path) -> str:
    program, *arguments = shlex.split(command)
    assert program == "helm"
    done = subprocess.run(
        [str(helm), *arguments],
        cwd=folder,
        env=plane.kubectl_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def installed(plane: ControlPlane) -> tuple[str, str]:
    """Read the image and the strategy of `serve`."""
    deployment = plane.request("GET", f"{SYSTEM}/deployments/kvplace-serve")
    settings = plane.request("GET", "/api/v1/namespaces/kvplace-system/configmaps/kvplace-settings")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return container["image"], settings["data"]["STRATEGY"]


def test_an_upgrade_keeps_values_and_ledgers_and_takes_new_images_and_an_uninstall_leaves_nothing(
    helm: Path, plane: ControlPlane, released: Path, unpacked: Path, earlier: Path
) -> None:
    made_by_the_api_server = ("namespace/default", "namespace/kube-node-lease", "namespace/kube-public")
    plane.kubectl("wait", "--for=create", *made_by_the_api_server)
    before = everything(plane)

    (install,) = command_lines(block("docs/install.md", "helm install kvplace"))
    words = [str(earlier) if word.startswith(CHART) else word for word in shlex.split(install)]
    said = run_helm(helm, plane, shlex.join([*words, "--set=serve.strategy=spread"]), released)
    assert "STATUS: deployed" in said
    assert installed(plane) == (OLD_IMAGE, "spread")
    plane.wait_for_crds()
    plane.kubectl("apply", "-f", "-", stdin=LEDGER)
    ledger = plane.request("GET", LEDGER_PATH)["spec"]

    (upgrade,) = command_lines(block("docs/install.md", "helm upgrade kvplace"))
    run_helm(helm, plane, upgrade, released)
    values = yaml.safe_load((unpacked / "kvplace" / "values.yaml").read_text())
    assert installed(plane) == (values["images"]["serve"], "spread")
    assert plane.request("GET", LEDGER_PATH)["spec"] == ledger

    (uninstall,) = command_lines(block("docs/install.md", "helm uninstall kvplace"))
    run_helm(helm, plane, uninstall, released)
    assert everything(plane) == before


def test_the_command_of_the_page_installs_the_chart_of_a_release(
    helm: Path, plane: ControlPlane, released: Path
) -> None:
    (install,) = command_lines(block("docs/install.md", "helm install kvplace"))
    assert "STATUS: deployed" in run_helm(helm, plane, install, released)
    assert installed(plane)[1] == "pack"
