"""Every object is accepted by the API server, and the objects agree with each other and with the code."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import pytest

from harness.control_plane.cluster import ControlPlane
from harness.control_plane.watching import watch_one_object
from kvplace import __version__
from kvplace.agent.process import LOCK
from kvplace.certificates.keeper import CLIENT_SECRET, SERVER_SECRET
from kvplace.cli.agent_command import command as agent_command
from kvplace.cli.serve_command import command as serve_command
from kvplace.core.cluster.node_choice import Strategy
from tests.docs.reading import first_cells, page, section
from tests.manifests.conftest import STRICTLY, Render
from tests.manifests.objects import CERT_MANAGER, NAMESPACE, Json, of_kind, settings_of, templates

FOLDERS = ("default", "own-certificates", "cert-manager")


@pytest.fixture(params=FOLDERS)
def objects(request: pytest.FixtureRequest, render: Render) -> list[Json]:
    """Give what each of the folders that an operator applies is made of."""
    return render(request.param)


def test_the_api_server_accepts_every_object_without_a_warning(
    cluster: ControlPlane, objects: list[Json]
) -> None:
    for entry in objects:
        if entry["kind"] == "Namespace":  # a dry run makes none for the objects that follow
            cluster.kubectl("apply", *STRICTLY, "--force-conflicts", "-f", "-", stdin=json.dumps(entry))
    text = "\n---\n".join(json.dumps(entry) for entry in objects if entry["apiVersion"] != CERT_MANAGER)
    answer = cluster.kubectl(
        "apply", *STRICTLY, "--dry-run=server", "--force-conflicts", "-f", "-", stdin=text
    )
    assert answer.count("(server dry run)") == text.count("\n---\n") + 1


def test_every_object_states_that_it_is_part_of_kvplace(objects: list[Json]) -> None:
    unlabelled = [
        f"{entry['kind']} {entry['metadata']['name']}"
        for entry in objects
        if entry["metadata"].get("labels", {}).get("app.kubernetes.io/part-of") != "kvplace"
        and entry["kind"] != "Secret"
    ]
    assert unlabelled == []


@pytest.mark.parametrize("deployment", ["kvplace-serve", "kvplace-scheduler"])
def test_a_restricted_namespace_lets_both_replicas_in(cluster: ControlPlane, deployment: str) -> None:
    path = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments"
    with watch_one_object(cluster, path, deployment, "0") as events:
        statuses = (event["object"].get("status", {}) for event in events)
        # `replicas` counts pods that exist; they stay unscheduled here.
        status = next(
            status
            for status in statuses
            if status.get("replicas") == 2
            or any(condition["type"] == "ReplicaFailure" for condition in status.get("conditions", []))
        )
    assert status.get("replicas") == 2, status


def test_a_single_replica_does_not_block_the_drain_of_its_node(objects: list[Json]) -> None:
    budgets = of_kind(objects, "PodDisruptionBudget")
    assert budgets.keys() == {"kvplace-serve", "kvplace-scheduler"}
    for budget in budgets.values():
        assert budget["spec"]["maxUnavailable"] == 1
        assert "minAvailable" not in budget["spec"]


def test_services_lead_to_ports_that_pods_have(objects: list[Json]) -> None:
    for service in of_kind(objects, "Service").values():
        selected = [
            template
            for template in templates(objects).values()
            if service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
        ]
        assert len(selected) == 1
        ports = {port["name"] for port in selected[0]["spec"]["containers"][0]["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports


def test_network_policies_open_only_ports_that_pods_have(objects: list[Json]) -> None:
    policies = of_kind(objects, "NetworkPolicy")
    assert policies.pop("default-deny")["spec"] == {
        "podSelector": {},
        "policyTypes": ["Ingress", "Egress"],
    }
    known = {
        port["name"]
        for template in templates(objects).values()
        for port in template["spec"]["containers"][0]["ports"]
    }
    opened = {
        port["port"]
        for policy in policies.values()
        for rule in policy["spec"].get("ingress", [])
        for port in rule["ports"]
    }
    assert opened == known


def test_names_are_resolved_wherever_the_dns_of_the_cluster_answers(objects: list[Json]) -> None:
    names, _ = of_kind(objects, "NetworkPolicy")["names-and-api-server"]["spec"]["egress"]
    assert "to" not in names, "NodeLocal DNSCache is no pod, and OpenShift's DNS is not in kube-system"
    ports = {(port["port"], port["protocol"]) for port in names["ports"]}
    assert ports == {(number, protocol) for number in (53, 5353) for protocol in ("UDP", "TCP")}


def test_everything_that_pods_mount_is_made(objects: list[Json]) -> None:
    made = {("configMap", name) for name in of_kind(objects, "ConfigMap")}
    made |= {("secret", name) for name in of_kind(objects, "Secret")}
    made |= {
        ("secret", certificate["spec"]["secretName"])
        for certificate in of_kind(objects, "Certificate").values()
    }
    if "kvplace-certificates" in templates(objects):
        made |= {("secret", name) for name in (SERVER_SECRET, CLIENT_SECRET)}
    for template in templates(objects).values():
        wanted = set()
        for volume in template["spec"].get("volumes", []):
            if "secret" in volume:
                wanted.add(("secret", volume["secret"]["secretName"]))
            elif "configMap" in volume:
                wanted.add(("configMap", volume["configMap"]["name"]))
        for source in template["spec"]["containers"][0].get("envFrom", []):
            wanted.add(("configMap", source["configMapRef"]["name"]))
        assert wanted <= made


def test_cert_manager_writes_the_ca_into_every_webhook(render: Render) -> None:
    objects = render("cert-manager")
    for kind in ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"):
        configurations = of_kind(objects, kind)
        assert configurations
        for configuration in configurations.values():
            injected = configuration["metadata"]["annotations"]["cert-manager.io/inject-ca-from"]
            assert injected == f"{NAMESPACE}/kvplace-serve"
            assert not any("caBundle" in webhook["clientConfig"] for webhook in configuration["webhooks"])


def test_the_api_server_trusts_the_webhooks_by_the_operators_own_ca(
    cluster: ControlPlane, manifests: Path
) -> None:
    authority = (manifests / "own-certificates" / "certificates" / "ca.crt").read_bytes()
    for path in ("mutatingwebhookconfigurations/vms.kvplace.io", "validatingwebhookconfigurations/kvplace"):
        stored = cluster.request("GET", f"/apis/admissionregistration.k8s.io/v1/{path}")
        for webhook in stored["webhooks"]:
            assert base64.b64decode(webhook["clientConfig"]["caBundle"]) == authority


def test_webhooks_go_to_our_service_and_do_not_apply_to_our_own_pods(objects: list[Json]) -> None:
    services = of_kind(objects, "Service")
    webhooks = [
        webhook
        for kind in ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration")
        for configuration in of_kind(objects, kind).values()
        for webhook in configuration["webhooks"]
    ]
    assert {webhook["clientConfig"]["service"]["path"] for webhook in webhooks} == {
        "/admit/vmi",
        "/admit/vm",
        "/admit/pod",
    }
    for webhook in webhooks:
        service = webhook["clientConfig"]["service"]
        assert service["namespace"] == NAMESPACE
        assert service["port"] in {port["port"] for port in services[service["name"]]["spec"]["ports"]}
        (excluded,) = webhook["namespaceSelector"]["matchExpressions"]
        assert (excluded["operator"], set(excluded["values"])) == ("NotIn", {NAMESPACE, "kube-system"})
    # No other namespace is excluded, and a restart of our own pods does not wait for them.
    for template in templates(objects).values():
        marks = {**template["metadata"].get("annotations", {}), **template["metadata"].get("labels", {})}
        assert not [key for key in marks if "kvplace.io/" in key or key == "cpu-set"]


def test_serve_understands_the_arguments_and_listens_where_the_ports_state(objects: list[Json]) -> None:
    settings = settings_of(objects)
    container = templates(objects)["kvplace-serve"]["spec"]["containers"][0]
    name, *arguments = (re.sub(r"\$\((\w+)\)", lambda m: settings[m[1]], word) for word in container["args"])
    assert name == "serve"
    with serve_command.make_context("serve", arguments) as context:
        options = context.params
    assert options["sidecar_image"] == settings["SIDECAR_IMAGE"]
    assert options["scheduler_name"] == settings["SCHEDULER_NAME"]
    assert (options["strategy"], options["mode"]) == (Strategy(settings["STRATEGY"]), settings["MODE"])
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    listens = {name: options[f"{name}_address"].port for name in ("extender", "admission", "health")}
    assert ports == listens


def test_the_agent_understands_its_arguments_and_settings(objects: list[Json]) -> None:
    (settings,) = (
        found["data"] for name, found in of_kind(objects, "ConfigMap").items() if "agent-settings" in name
    )
    container = templates(objects)["kvplace-agent"]["spec"]["containers"][0]
    written = " ".join(container["args"])
    assert set(re.findall(r"\$\((\w+)\)", written)) == set(settings)
    arguments = [re.sub(r"\$\((\w+)\)", lambda m: settings[m[1]], word) for word in container["args"]]
    assert {entry["name"] for entry in container["env"]} == {"NODE_NAME", "POD_NAME"}
    with agent_command.make_context("agent", [*arguments, "--node-name=worker"]) as context:
        options = context.params
    assert options["reserved"] is None
    assert options["enforcement"] is None
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {str(options["nri_socket"].parent), "/sys/fs/cgroup", str(LOCK.parent)} == mounted
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"health": options["health_address"].port}


def test_two_agents_never_run_on_one_node(objects: list[Json]) -> None:
    update = of_kind(objects, "DaemonSet")["kvplace-agent"]["spec"]["updateStrategy"]["rollingUpdate"]
    assert update["maxSurge"] == 0


def test_each_privilege_of_the_agent_is_explained(objects: list[Json]) -> None:
    pod = templates(objects)["kvplace-agent"]["spec"]
    explained = first_cells(section(page("agent.md"), "Privileges"))
    host_paths = {volume["hostPath"]["path"] for volume in pod["volumes"]}
    capabilities = set(pod["containers"][0]["securityContext"]["capabilities"]["add"])
    fields = {field for field in ("hostPID", "hostNetwork", "hostIPC") if pod.get(field)}
    unconfined = {field for field in ("seccompProfile", "appArmorProfile") if field in pod["securityContext"]}
    assert explained == host_paths | capabilities | fields | unconfined | {"seLinuxOptions", "runAsUser"}


def test_every_setting_is_used(objects: list[Json]) -> None:
    arguments = " ".join(templates(objects)["kvplace-serve"]["spec"]["containers"][0]["args"])
    assert set(re.findall(r"\$\((\w+)\)", arguments)) == set(settings_of(objects))


def test_files_in_the_arguments_of_serve_are_mounted(objects: list[Json]) -> None:
    template = templates(objects)["kvplace-serve"]["spec"]
    container = template["containers"][0]
    volumes = {volume["name"]: volume["secret"]["items"] for volume in template["volumes"]}
    mounted = {
        f"{mount['mountPath']}/{item['path']}"
        for mount in container["volumeMounts"]
        for item in volumes[mount["name"]]
    }
    assert {word.partition("=")[2] for word in container["args"] if "=/" in word} == mounted


def test_images_are_those_of_this_release(objects: list[Json]) -> None:
    assert settings_of(objects)["SIDECAR_IMAGE"] == f"kvplace/hook:{__version__}"
    images = {
        name: template["spec"]["containers"][0]["image"] for name, template in templates(objects).items()
    }
    for name, image in (("serve", "serve"), ("agent", "agent"), ("certificates", "serve")):
        if f"kvplace-{name}" in images:
            assert images[f"kvplace-{name}"] == f"kvplace/{image}:{__version__}"
