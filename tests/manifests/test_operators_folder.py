"""The folders that docs/install.md and docs/scheduler.md describe do what they describe."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from harness.control_plane.cluster import ControlPlane
from kvplace import __version__
from tests.docs.blocks import block
from tests.docs.reading import PROJECT
from tests.manifests.objects import NAMESPACE, Json, of_kind, settings_of, templates

WITHOUT_REGISTRY = block("docs/install.md", "images:\n- {name: registry.k8s.io/kube-scheduler")
WITH_REGISTRY = block("docs/install.md", "- {name: kvplace/serve, newName:")
MAIN_SCHEDULER = block("docs/scheduler.md", "- ../manifests/main-scheduler")


def rendered(cluster: ControlPlane, folder: Path, kustomization: str) -> list[Json]:
    folder.mkdir(exist_ok=True)
    (folder / "kustomization.yaml").write_text(kustomization)
    return list(yaml.load_all(cluster.kubectl("kustomize", str(folder)), yaml.CSafeLoader))


@pytest.fixture
def folder(manifests: Path) -> Path:
    """Name a folder beside the manifests."""
    return manifests.parent / "my-cluster"


def test_an_overlay_replaces_images_and_settings(fresh_cluster: ControlPlane, folder: Path) -> None:
    objects = rendered(fresh_cluster, folder, WITH_REGISTRY)
    images = {
        name: template["spec"]["containers"][0]["image"] for name, template in templates(objects).items()
    }
    assert images["kvplace-serve"].startswith("registry.example/kvplace/serve:")
    assert images["kvplace-agent"].startswith("registry.example/kvplace/agent:")
    assert images["kvplace-scheduler"].startswith("registry.k8s.io/kube-scheduler:v1.")
    settings = settings_of(objects)
    assert settings["SIDECAR_IMAGE"].startswith("registry.example/kvplace/hook:")
    assert settings["SCHEDULER_NAME"] == "kvplace-scheduler"
    generated = {name for name in of_kind(objects, "ConfigMap") if "settings" in name}
    used = {
        templates(objects)[name]["spec"]["containers"][0]["envFrom"][0]["configMapRef"]["name"]
        for name in ("kvplace-serve", "kvplace-agent")
    }
    assert used == generated


def test_without_a_registry_the_images_have_the_names_that_the_archives_have(
    fresh_cluster: ControlPlane, folder: Path
) -> None:
    objects = rendered(fresh_cluster, folder, WITHOUT_REGISTRY)
    images = {template["spec"]["containers"][0]["image"] for template in templates(objects).values()}
    ours = {f"kvplace/{name}:{__version__}" for name in ("serve", "agent")}
    assert images == {*ours, "registry.k8s.io/kube-scheduler:v1.36.3"}
    assert settings_of(objects)["SIDECAR_IMAGE"] == f"kvplace/hook:{__version__}"


def test_with_the_clusters_main_scheduler_ours_is_left_out_and_pods_keep_its_name(
    fresh_cluster: ControlPlane, folder: Path
) -> None:
    objects = rendered(fresh_cluster, folder, MAIN_SCHEDULER)
    assert settings_of(objects)["SCHEDULER_NAME"] == "default-scheduler"
    assert set(of_kind(objects, "Deployment")) == {"kvplace-serve", "kvplace-certificates"}
    left = {f"{entry['kind']} {entry['metadata']['name']}" for entry in objects}
    assert [name for name in left if "scheduler" in name] == []
    opened = of_kind(objects, "NetworkPolicy")["kvplace-extender-from-anywhere"]
    assert opened["metadata"]["namespace"] == NAMESPACE


def test_reserved_cpus_are_a_setting_of_the_operators_folder(
    fresh_cluster: ControlPlane, folder: Path
) -> None:
    """The page gives the generator alone: it joins the one that the folder has already."""
    added = block("docs/install.md", "- name: kvplace-agent-settings").partition("\n")[2]
    settings = of_kind(rendered(fresh_cluster, folder, WITH_REGISTRY + added), "ConfigMap")
    (agents,) = (found["data"] for name, found in settings.items() if name.startswith("kvplace-agent"))
    assert agents["RESERVED_CPUS"] == "0-1,32-33"


def test_the_main_scheduler_gets_the_configuration_of_ours() -> None:
    ours = yaml.safe_load((PROJECT / "manifests" / "scheduler" / "configuration.yaml").read_text())
    told = yaml.safe_load(block("docs/scheduler.md", "kind: KubeSchedulerConfiguration"))
    of_the_place = {"schedulerName", "urlPrefix", "tlsConfig"}
    for part in ("profiles", "extenders"):
        (mine,), (yours,) = ours[part], told[part]
        assert {key: value for key, value in mine.items() if key not in of_the_place} == {
            key: value for key, value in yours.items() if key not in of_the_place
        }
