"""The Helm chart holds the objects that kustomize renders, and its values do what the components do."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.control_plane.cluster import ControlPlane
from release.chart import SETTINGS

# The first test waits for the release to be made.
pytestmark = pytest.mark.timeout(1200)

Json = dict[str, Any]
Key = tuple[str, str, str]

NEEDS_OTHERS = ("monitoring.coreos.com/", "cert-manager.io/")
HASH = re.compile(r"(kvplace-(?:settings|agent-settings|scheduler-configuration))-[0-9a-z]{10}\b")


@pytest.fixture(scope="module")
def plane(kubernetes_programs: Path) -> Iterator[ControlPlane]:
    """Start an API server of this module's own: the chart brings kinds and namespaces with it."""
    assert kubernetes_programs.is_dir()
    with ControlPlane() as running:
        yield running


def templated(helm: Path, chart: Path, *values: str) -> str:
    done = subprocess.run(
        [helm, "template", "kvplace", chart, *(word for value in values for word in ("--set-json", value))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def objects(text: str) -> dict[Key, Json]:
    """Read objects as they are apart from how the two tools make pods notice changed settings."""
    found: dict[Key, Json] = {}
    for entry in yaml.safe_load_all(HASH.sub(r"\1", text)):
        if not entry:
            continue
        metadata = entry["metadata"]
        if not metadata.get("annotations", True):
            del metadata["annotations"]
        of_pods = entry.get("spec", {}).get("template", {}).get("metadata", {})
        if of_pods.get("annotations", {}).keys() == {SETTINGS}:
            del of_pods["annotations"]
        found[entry["kind"], metadata.get("namespace", ""), metadata["name"]] = entry
    return found


def rendered(plane: ControlPlane, manifests: Path, resources: str, *components: str) -> dict[Key, Json]:
    folder = manifests / "of-the-test"
    folder.mkdir(exist_ok=True)
    content = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [f"../{resources}"],
        "components": [f"../{name}" for name in components],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(content))
    return objects(plane.kubectl("kustomize", str(folder)))


@pytest.mark.parametrize(
    ("resources", "components", "values"),
    [
        pytest.param("default", (), (), id="default"),
        pytest.param("cert-manager", (), ('certificates="cert-manager"',), id="cert-manager"),
        pytest.param("default", ("main-scheduler",), ("scheduler.enabled=false",), id="main scheduler"),
        pytest.param("default", ("without-agent",), ("agent.enabled=false",), id="without agent"),
        pytest.param("default", ("monitoring",), ("monitoring.enabled=true",), id="monitoring"),
        pytest.param("default", ("dra-driver-cpu",), ("draDriverCpu.enabled=true",), id="dra-driver-cpu"),
    ],
)
def test_helm_makes_the_objects_that_kustomize_makes(
    helm: Path,
    plane: ControlPlane,
    unpacked: Path,
    resources: str,
    components: tuple[str, ...],
    values: tuple[str, ...],
) -> None:
    ours = objects(templated(helm, unpacked / "kvplace", *values))
    theirs = rendered(plane, unpacked / "manifests", resources, *components)
    assert ours.keys() == theirs.keys()
    assert {key: ours[key] for key in ours if ours[key] != theirs[key]} == {}


def test_the_chart_passes_helms_own_checks(helm: Path, unpacked: Path) -> None:
    lint = [str(helm), "lint", "--strict", str(unpacked / "kvplace")]
    assert subprocess.run(lint, capture_output=True, check=False).returncode == 0


def test_the_api_server_accepts_the_objects_of_helm(helm: Path, plane: ControlPlane, unpacked: Path) -> None:
    text = templated(helm, unpacked / "kvplace", "serve.replicas=3", "apiServerPorts=[443,8443]")
    definitions = [
        entry
        for entry in yaml.safe_load_all(text)
        if entry and entry["kind"] in ("CustomResourceDefinition", "Namespace")
    ]
    plane.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump_all(definitions))
    said = plane.kubectl(
        "apply", "--server-side", "--validate=strict", "--dry-run=server", "-f", "-", stdin=text
    )
    assert said.count("(server dry run)") == len(objects(text))


def test_a_value_reaches_the_object_that_it_is_for(helm: Path, unpacked: Path) -> None:
    made = objects(
        templated(
            helm,
            unpacked / "kvplace",
            'agent.reservedCpus="0-1,32-33"',
            'agent.nodeSelector={"rack": "a"}',
            "serve.nominateFromNodes=1000000",
            'serve.makeRoom="automatic"',
            'serve.resources={"requests": {"cpu": "1"}}',
            'priorityClassNames.agent="own"',
            "apiServerPorts=[8443]",
        )
    )
    assert (
        made["ConfigMap", "kvplace-agent", "kvplace-agent-settings"]["data"]["RESERVED_CPUS"] == "0-1,32-33"
    )
    pod = made["DaemonSet", "kvplace-agent", "kvplace-agent"]["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"kubernetes.io/os": "linux", "rack": "a"}
    assert pod["priorityClassName"] == "own"
    given = made["ConfigMap", "kvplace-system", "kvplace-settings"]["data"]
    assert (given["NOMINATE_FROM_NODES"], given["MAKE_ROOM"]) == ("1000000", "automatic")
    serve = made["Deployment", "kvplace-system", "kvplace-serve"]["spec"]["template"]["spec"]
    assert serve["containers"][0]["resources"]["requests"] == {"cpu": "1", "memory": "256Mi"}
    egress = made["NetworkPolicy", "kvplace-system", "names-and-api-server"]["spec"]["egress"]
    assert egress[-1] == {"ports": [{"port": 8443}]}


def test_both_agents_run_on_the_nodes_that_the_operator_names(helm: Path, unpacked: Path) -> None:
    values = ("draDriverCpu.enabled=true", 'agent.nodeSelector={"rack": "a"}')
    made = objects(templated(helm, unpacked / "kvplace", *values))
    usual, of_driver = (
        made["DaemonSet", "kvplace-agent", name]["spec"]["template"]["spec"]["nodeSelector"]
        for name in ("kvplace-agent", "kvplace-agent-dra-driver-cpu")
    )
    assert usual == {"kubernetes.io/os": "linux", "rack": "a"}
    assert of_driver == {**usual, "kvplace.io/dra-driver-cpu": "true"}


def test_without_its_agents_the_chart_has_none_for_dra_driver_cpu(helm: Path, unpacked: Path) -> None:
    made = templated(helm, unpacked / "kvplace", "draDriverCpu.enabled=true", "agent.enabled=false")
    assert [kind for kind, _, _ in objects(made) if kind == "DaemonSet"] == []


def test_alerts_link_to_the_page_that_the_operator_names(helm: Path, unpacked: Path) -> None:
    page = "https://wiki.example/kvplace/alerts.html"
    values = ("monitoring.enabled=true", f"monitoring.runbookUrl={json.dumps(page)}")
    made = objects(templated(helm, unpacked / "kvplace", *values))
    (group,) = made["PrometheusRule", "kvplace-system", "kvplace"]["spec"]["groups"]
    assert [rule["annotations"]["runbook_url"] for rule in group["rules"]] == [
        f"{page}#{rule['alert'].lower()}" for rule in group["rules"]
    ]


def test_off_is_a_word_though_yaml_takes_it_for_false(helm: Path, unpacked: Path) -> None:
    made = objects(templated(helm, unpacked / "kvplace", "serve.makeRoom=false"))
    assert made["ConfigMap", "kvplace-system", "kvplace-settings"]["data"]["MAKE_ROOM"] == "off"


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ('serve.strategi="pack"', "strategi"),
        ('serve.strategy="packed"', "/serve/strategy"),
        ('agent.reservedCpus="two"', "/agent/reservedCpus"),
        ("apiServerPorts=[70000]", "/apiServerPorts"),
        ('images.hook="no tag"', "/images/hook"),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_its_name(
    helm: Path, unpacked: Path, value: str, named: str
) -> None:
    command = [str(helm), "template", "kvplace", str(unpacked / "kvplace"), "--set-json", value]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert named in done.stderr


def test_pods_are_replaced_when_their_settings_change(helm: Path, unpacked: Path) -> None:
    def seal(*values: str) -> str:
        made = yaml.safe_load_all(templated(helm, unpacked / "kvplace", *values))
        (found,) = (
            entry["spec"]["template"]["metadata"]["annotations"][SETTINGS]
            for entry in made
            if entry and (entry["kind"], entry["metadata"]["name"]) == ("Deployment", "kvplace-serve")
        )
        return str(found)

    assert seal() == seal('agent.reservedCpus="0"')
    changed = ('serve.strategy="spread"', "scheduler.enabled=false")
    assert len({seal(), *map(seal, changed)}) == 3


def test_every_value_has_a_sentence(unpacked: Path) -> None:
    def described(schema: Json) -> bool:
        below = schema.get("properties")
        return all(map(described, below.values())) if below else bool(schema.get("description"))

    assert described(json.loads((unpacked / "kvplace" / "values.schema.json").read_text()))
