"""The commands of the pages run as they stand there, on a cluster with KubeVirt and played nodes."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise

import pytest
import yaml

from harness.control_plane.cluster import MERGE_PATCH, ControlPlane, Json, RequestRefused
from harness.control_plane.kubevirt_parts import FEATURE_GATES, KubeVirt
from harness.control_plane.watching import wait_for
from harness.kvplace_cluster.installation import Installation, described_nodes
from harness.kvplace_cluster.machines import node_shape, two_socket_machine
from harness.kvplace_cluster.played_vms import played_vms
from harness.kvplace_cluster.vms import vm_manifest
from harness.waiting import wait_until
from kvplace.core.well_known_names import PINNED
from tests.docs.blocks import block, blocks
from tests.docs.shell import Shell

NAMESPACE = "night-shop"
WORKER, BARE = "worker-1", "worker-2"
VM_NAMES = ("database", "db", "web", "my-vm")
FOUND_SOMETHING = {"kubectl kvplace doctor": {1, 4}}
"""Without agents and pods of kvplace there is something to find."""

INSPECT = blocks("docs/inspect.md")
IN_SERVE = "deployment/kvplace-serve -- "
EXEC = f"kubectl -n kvplace-system exec {IN_SERVE}"
SHOWN = [
    (command.text, output.text)
    for command, output in pairwise(INSPECT)
    if output.language == "text" and "doctor" not in command.text
]
"""A command and its output; the output of `doctor` is compared in tests/doctor."""

LOOKS = sorted(
    {
        *(one.text for one in INSPECT if not one.language and IN_SERVE not in one.text),
        block("README.md", "kubectl kvplace get vms"),
        block("docs/alerts.md", "kubectl -n kvplace-system get pods"),
        block("docs/alerts.md", "kubectl kvplace map worker-1"),
        block("docs/alerts.md", "kubectl -n kvplace-agent get pods"),
        block("docs/alerts.md", "kubectl get nodetopology worker-1"),
        block("docs/alerts.md", "kubectl kvplace get vm database"),
        block("docs/alerts.md", "kubectl kvplace explain vm/database"),
        block("docs/alerts.md", "kubectl kvplace get nodes"),
        block("docs/agent.md", "kubectl wait --for=condition=Ready nodetopology"),
        block("docs/agent.md", "kubectl wait --for=condition=kvplace.io/Pinned"),
        block("docs/install.md", "kubectl wait --for=create --timeout=1m nodetopology/worker-1"),
        block("docs/troubleshoot.md", "kubectl kvplace get vm database"),
        block("docs/troubleshoot.md", "kubectl kvplace get nodes"),
        block("docs/troubleshoot.md", "kubectl kvplace map worker-1"),
        block("docs/troubleshoot.md", "kubectl kvplace get vms"),
        block("docs/troubleshoot.md", "kubectl kvplace version"),
        block("docs/measure.md", "kubectl kvplace get vms"),
    }
)
"""Blocks that change nothing."""


@pytest.fixture(scope="module")
def shell(
    cluster: ControlPlane, virt: KubeVirt, kvplace: Installation, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shell]:
    """The nodes and VMs that the pages name, in the namespace of the shell's context; all VMs run, pinned."""
    cluster.create_namespace(NAMESPACE)
    machine = two_socket_machine(32, memory_gib=256)
    for number, name in enumerate((WORKER, BARE), 1):
        cluster.request("POST", "/api/v1/nodes", node_shape(name, machine).manifest(f"172.16.8.{number}"))
    shell = Shell(tmp_path_factory.mktemp("pages"), cluster, NAMESPACE)
    try:
        with described_nodes(kvplace, {WORKER: machine}), played_vms(cluster, NAMESPACE):
            _play_agent(cluster, WORKER)
            (shell.folder / "database.yaml").write_text(block("docs/annotations.md", "kind: VirtualMachine"))
            first = yaml.safe_dump(_with_the_lines_of_the_first_page())
            (shell.folder / "db.yaml").write_text(first)
            database = (shell.folder / "database.yaml").read_text()
            (shell.folder / "shop.yaml").write_text(f"{first}---\n{database}")
            (shell.folder / "vms.jsonl").write_text('{"id": "new", "vcpus": 2}\n')
            shell.run("kubectl apply -f database.yaml -f db.yaml")
            for name in VM_NAMES[2:]:
                virt.create("virtualmachines", NAMESPACE, vm_manifest(name, annotations={"cpu-set": "any"}))
            for name in VM_NAMES:
                _wait_until_pinned(cluster, virt, name)
            yield shell
            shell.run("kubectl delete vm --all --wait=false")
            cluster.remove_namespace(NAMESPACE)
    finally:
        for name in (WORKER, BARE):
            with suppress(RequestRefused):
                cluster.request("DELETE", f"/api/v1/nodes/{name}")


def _with_the_lines_of_the_first_page() -> Json:
    """The VM that the reader of README.md has, with the lines that the page adds."""
    manifest: Json = {"apiVersion": "kubevirt.io/v1", **vm_manifest("db", annotations={})}
    added = yaml.safe_load(block("README.md", "        cpu-set: one-numa"))
    manifest["spec"]["template"]["metadata"] = added["spec"]["template"]["metadata"]
    return manifest


def _play_agent(cluster: ControlPlane, node: str) -> None:
    condition = {
        "type": "Ready",
        "status": "True",
        "reason": "Played",
        "message": "played",
        "lastTransitionTime": "2026-01-02T03:04:05Z",
    }
    cluster.request(
        "PATCH",
        f"/apis/kvplace.io/v1alpha1/nodetopologies/{node}/status",
        {"status": {"conditions": [condition], "enforcement": "nri"}},
        content_type=MERGE_PATCH,
    )


def _wait_until_pinned(cluster: ControlPlane, virt: KubeVirt, name: str) -> str:
    pod = virt.launcher_pod(NAMESPACE, name)["metadata"]["name"]
    wait_for(
        cluster,
        f"/api/v1/namespaces/{NAMESPACE}/pods",
        pod,
        lambda pod: any(one["type"] == PINNED for one in pod["status"].get("conditions", ())),
    )
    return str(pod)


@pytest.mark.parametrize("commands", LOOKS, ids=lambda text: f"{LOOKS.index(text)} {text.splitlines()[0]}")
def test_commands_that_check_answer(shell: Shell, commands: str) -> None:
    assert any(shell.run(commands, codes=FOUND_SOMETHING))


@pytest.mark.parametrize(("command", "output"), SHOWN, ids=[command.strip() for command, _ in SHOWN])
def test_a_command_prints_the_output_on_the_page(shell: Shell, command: str, output: str) -> None:
    """Apart from numbers, times and random names: which VM is bound first is not decided.

    Events of other tests may be added.
    """
    (printed,) = shell.run(command)
    assert not masked(output) - masked(printed)


def masked(text: str) -> Counter[str]:
    """Count the lines, without what differs between two clusters."""
    text = re.sub(r"virt-launcher-(\w+)-\w+", r"virt-launcher-\1", text)
    text = re.sub(r"(?<=\d)[smh]\b|[\dTZ:,-]*\d[\dTZ:,-]*|\b[A-D]\b|[A-D]~", "#", text)
    return Counter(" ".join(line.split()) for line in text.splitlines() if "│" not in line)


def test_without_the_plugin_the_program_in_the_image_of_serve_answers(
    shell: Shell, cluster: ControlPlane
) -> None:
    rights = cluster.service_account_kubeconfig("kvplace-system", "kvplace-serve")
    with_rights_of_serve, with_own_rights = (one.text for one in INSPECT if IN_SERVE in one.text)
    listed, usage, drawn = shell.run(with_rights_of_serve, instead={EXEC: f"KUBECONFIG={rights} "})
    assert "database" in listed
    assert all("worker-1" in one for one in (usage, drawn))
    (explained,) = shell.run(with_own_rights, instead={EXEC.replace("exec", "exec -i"): ""})
    assert "worker-1" in explained


def test_the_symptoms_begin_with_the_commands_that_explain_them(
    shell: Shell, cluster: ControlPlane, virt: KubeVirt
) -> None:
    pod = _wait_until_pinned(cluster, virt, "database")
    explained, of_vmi, of_pod = shell.run(
        block("docs/troubleshoot.md", "kubectl events --for vmi/database"),
        instead={"virt-launcher-database-xxxxx": pod},
    )
    assert "VirtualMachine night-shop/database" in explained
    assert "worker-1" in explained
    assert "SuccessfulCreate" in of_vmi
    assert "Scheduled" in of_pod


def test_gates_are_added_to_a_list_or_make_one(shell: Shell) -> None:
    (gates,) = shell.run(block("docs/install.md", "kubectl -n kubevirt get kubevirt kubevirt"))
    assert json.loads(gates) == list(FEATURE_GATES)
    patches = block("docs/install.md", "kubectl -n kubevirt patch kubevirt")
    look = "--dry-run=server -o jsonpath='{.spec.configuration.developerConfiguration.featureGates}' #"
    added, made = shell.run(patches.replace("#", look))
    assert json.loads(added) == [*FEATURE_GATES, "Sidecar"]
    assert json.loads(made) == ["Sidecar"]


def test_the_first_vm_of_the_page_gets_its_cores(shell: Shell, virt: KubeVirt) -> None:
    *_, cpu_map = shell.run(block("docs/install.md", "kubectl apply -f vm-templates/web-server.yaml"))
    (ledgers,) = shell.run("kubectl get nodeledgers -o yaml")
    (cpus,) = json.loads(cpu_map).values()
    assert len(cpus) == 4
    (ledger,) = [one for one in yaml.safe_load(ledgers)["items"] if one["metadata"]["name"] == WORKER]
    assert set(cpus) <= ledger["spec"]["owners"].keys()
    shell.run("kubectl delete vm web-server --wait=false")
    virt.gone("virtualmachines", NAMESPACE, "web-server")


def test_a_running_vm_may_be_asked_for_something_else(shell: Shell) -> None:
    shared, owned = shell.run(block("docs/annotations.md", "kubectl annotate vmi web"))
    assert "annotated" in shared
    assert "annotated" in owned


def test_the_three_vms_of_the_measurement_are_pinned_unpinned_and_dedicated(
    shell: Shell, virt: KubeVirt
) -> None:
    files = {
        "busy": block("docs/measure.md", "kind: Deployment"),
        "pinned": block("docs/measure.md", "metadata: {name: pinned}"),
        "unpinned": block("docs/measure.md", "metadata: {name: unpinned}"),
        "dedicated": block("docs/measure.md", "metadata: {name: dedicated}"),
    }
    for name, text in files.items():
        (shell.folder / f"{name}.yaml").write_text(text)
    shell.run(block("docs/measure.md", "kubectl apply -f busy.yaml"))
    shell.run(block("docs/measure.md", "kubectl patch --local -f vm-templates/latency-test.yaml"))
    specs = {name: virt.launcher_pod(NAMESPACE, name)["spec"] for name in ("pinned", "unpinned", "dedicated")}
    chosen = {name: spec["nodeSelector"]["kubernetes.io/hostname"] for name, spec in specs.items()}
    assert chosen == {"pinned": WORKER, "unpinned": WORKER, "dedicated": BARE}
    assert specs["pinned"]["schedulerName"] == "kvplace-scheduler" != specs["unpinned"]["schedulerName"]
    assert specs["dedicated"]["nodeSelector"]["kubevirt.io/cpumanager"] == "true"
    shell.run(block("docs/measure.md", "kubectl delete vm pinned"))


def test_a_node_is_given_cpus_by_hand_and_emptied_for_another_policy(shell: Shell) -> None:
    """On a node on which no client is."""
    other = {WORKER: BARE}
    shell.run(block("docs/install.md", "kubectl annotate node worker-1 cpu-map="), instead=other)
    (drained,) = shell.run(block("docs/migrate.md", "kubectl drain worker-1"), instead=other)
    assert "drained" in drained
    back = block("docs/migrate.md", "kubectl uncordon worker-1").replace("node worker-1", f"node {BARE}")
    _, enforcement = shell.run(back.replace("uncordon worker-1", f"uncordon {BARE}"))
    assert enforcement == "nri"


def test_a_node_without_its_agent_is_released(shell: Shell, cluster: ControlPlane) -> None:
    shell.run(block("docs/troubleshoot.md", "kubectl patch nodetopology worker-1"))
    (told,) = shell.run("kubectl get nodetopology worker-1 -o jsonpath='{.status.enforcement}'")
    assert told == "none"
    _play_agent(cluster, WORKER)


@contextmanager
def _kvplace_down(kvplace: Installation) -> Iterator[None]:
    for replica in kvplace.replicas:
        replica.process.kill()
    try:
        yield
    finally:
        for replica in kvplace.replicas:
            replica.start()
        for replica in kvplace.replicas:
            replica.wait_until_ready()
        kvplace.register_webhooks(kvplace.replicas[0].admission_url)


def _starts_unpinned(virt: KubeVirt, name: str, *, other_than: str = "") -> None:
    """Wait until a VM has a pod that needs none of kvplace's programs to start."""
    spec = virt.launcher_pod(NAMESPACE, name, other_than)["spec"]
    assert spec["schedulerName"] == "default-scheduler"
    assert not any("hook-sidecar" in one["name"] for one in (*spec["initContainers"], *spec["containers"]))


def test_a_vm_that_loses_its_annotation_starts_while_kvplace_is_down(
    shell: Shell, cluster: ControlPlane, virt: KubeVirt, kvplace: Installation
) -> None:
    virt.create("virtualmachines", NAMESPACE, vm_manifest("urgent", annotations={"cpu-set": "any"}))
    _wait_until_pinned(cluster, virt, "urgent")
    before = virt.launcher_pod(NAMESPACE, "urgent")["metadata"]["uid"]
    with _kvplace_down(kvplace):
        with pytest.raises(RequestRefused, match="failed calling webhook"):
            virt.create("virtualmachines", NAMESPACE, vm_manifest("late", annotations={"cpu-set": "any"}))
        commands = block("docs/troubleshoot.md", "kubectl patch vm database").replace("database", "urgent")
        shell.run(commands)
        _starts_unpinned(virt, "urgent", other_than=before)
    shell.run("kubectl delete vm urgent --wait=false")
    virt.gone("virtualmachines", NAMESPACE, "urgent")


def _create_once_the_webhooks_are_gone(virt: KubeVirt, manifest: Json) -> None:
    """The API server calls deleted webhooks until it has noticed."""

    def is_created() -> bool:
        try:
            virt.create("virtualmachines", NAMESPACE, manifest)
        except RequestRefused as refused:
            if "failed calling webhook" not in str(refused):
                raise
            return False
        return True

    wait_until(is_created, lambda: "the API server still calls the deleted webhooks")


def test_vms_with_annotations_start_unpinned_without_the_webhooks(
    shell: Shell, virt: KubeVirt, kvplace: Installation
) -> None:
    with _kvplace_down(kvplace):
        shell.run(block("docs/troubleshoot.md", "kubectl delete mutatingwebhookconfiguration"))
        _create_once_the_webhooks_are_gone(virt, vm_manifest("urgent", annotations={"cpu-set": "any"}))
        _starts_unpinned(virt, "urgent")
    shell.run("kubectl delete vm urgent --wait=false")
    virt.gone("virtualmachines", NAMESPACE, "urgent")
