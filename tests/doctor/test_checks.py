"""Each check over objects as they are read: what is right passes, what is wrong is named."""

from __future__ import annotations

import base64
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.certificates import Authority
from kvplace.core.well_known_names import PLUGIN_SOCKET
from kvplace.doctor.admission_checks import (
    LEFT_ALONE,
    POLICIES,
    WEBHOOKS,
    check_admission_answers,
    check_certificates,
    check_policies,
    check_secrets,
    check_webhooks,
)
from kvplace.doctor.cluster_checks import (
    KINDS,
    PLUGINS_CRD,
    check_kinds,
    check_kubevirt,
    check_parts,
    check_plugins,
    check_version,
)
from kvplace.doctor.examination import CHECKS, VIEW, examine
from kvplace.doctor.installation import Severity
from kvplace.doctor.program_checks import (
    check_images,
    check_scheduler,
    check_serve,
    check_versions,
    release_of,
)
from tests.doctor.examples import installation, named, problems

MANIFESTS = Path(__file__).resolve().parents[2] / "manifests"
OF_CHOICE = ("namespace-limits", "moves-between-nodes", "dra-driver-cpu")
"""Components that an installation may lack."""


def test_the_policies_and_webhooks_that_are_searched_for_are_those_of_the_manifests() -> None:
    documents = [
        document
        for file in MANIFESTS.glob("*/*.yaml")
        if file.parent.name not in OF_CHOICE
        for document in yaml.load_all(file.read_text(), yaml.CSafeLoader)
        if document
    ]
    policies = {one["metadata"]["name"] for one in documents if one["kind"] == "ValidatingAdmissionPolicy"}
    assert policies == set(POLICIES)
    for resource, names in WEBHOOKS.items():
        found = [one for one in documents if f"{one['kind'].lower()}s" == resource]
        assert {webhook["name"] for one in found for webhook in one["webhooks"]} == set(names)
        for webhook in (webhook for one in found for webhook in one["webhooks"]):
            (left_out,) = webhook["namespaceSelector"]["matchExpressions"]
            assert (left_out["operator"], set(left_out["values"])) == ("NotIn", set(LEFT_ALONE))
    crds = {one["metadata"]["name"] for one in documents if one["kind"] == "CustomResourceDefinition"}
    assert crds >= set(KINDS)


@pytest.mark.parametrize(
    ("version", "count"), [("v1.36.3", 0), ("v1.31.0-gke.1", 0), ("v1.30.9", 1), ("?", 1)]
)
def test_a_cluster_that_is_too_old_is_named(version: str, count: int) -> None:
    assert len(problems(check_version, server_version=version)) == count


def test_on_a_cluster_that_is_too_old_no_fix_applies_kinds_that_it_does_not_know() -> None:
    there = {"deployments": (deployment("serve"),)}
    found = examine(installation(server_version="v1.28.2", objects=there))
    assert [one.check.name for one in found.results] == ["API server", "parts", "KubeVirt", "kubelets"]
    (old,) = found.results[0].findings
    assert old.fix == "upgrade the cluster to 1.31 or newer"


def crd(name: str, version: str = "v1alpha1", established: str = "True", schema: str = "") -> dict[str, Any]:
    return {
        "metadata": {"name": name},
        "spec": {"versions": [{"name": version, "served": True, "schema": schema}]},
        "status": {"conditions": [{"type": "Established", "status": established, "message": "names clash"}]},
    }


def shipped_schema() -> str:
    (version,) = yaml.safe_load((MANIFESTS / "crd" / "nodeledgers.yaml").read_text())["spec"]["versions"]
    return str(version["schema"])


def test_kinds_must_be_there_in_our_version_with_the_rule() -> None:
    assert [text.rpartition(": ")[2] for text in problems(check_kinds)] == ["it is not installed"] * 2
    fine = (crd(KINDS[0], schema=shipped_schema()), crd(KINDS[1]))
    assert problems(check_kinds, objects={"customresourcedefinitions": fine}) == []
    odd = (crd(KINDS[0]), crd(KINDS[1], "v1beta1", established="False"))
    found = problems(check_kinds, objects={"customresourcedefinitions": odd})
    assert "lacks the rule" in found[0]
    assert "it serves v1beta1, and kvplace 0.1.0 reads v1alpha1" in found[1]
    assert "names clash" in found[2]


def webhooks(bundle: str, *, policy: str = "Fail") -> dict[str, Any]:
    service = {"namespace": "kvplace-system", "name": "kvplace"}
    return {
        resource: (
            {
                "metadata": {"name": resource},
                "webhooks": [
                    {
                        "name": name,
                        "failurePolicy": policy,
                        "clientConfig": {"service": service, "caBundle": bundle},
                    }
                    for name in names
                ],
            },
        )
        for resource, names in WEBHOOKS.items()
    }


def authority(folder: Path) -> str:
    return base64.b64encode(Authority(folder, "ca").file.read_bytes()).decode()


def test_a_webhook_needs_its_service_a_valid_ca_and_failure_policy_fail(tmp_path: Path) -> None:
    bundle, service = authority(tmp_path), (named("kvplace"),)
    now, count = datetime.now(UTC), sum(map(len, WEBHOOKS.values()))
    soon = problems(check_webhooks, objects={**webhooks(bundle), "services": service}, now=now)
    assert len(soon) == count
    assert all("warning" in text and "ends on" in text for text in soon)
    later = now + timedelta(days=9)
    ended = problems(check_webhooks, objects={**webhooks(bundle), "services": service}, now=later)
    assert all("wrong" in text and "ended on" in text for text in ended)
    other = problems(check_webhooks, objects=webhooks("Cg==", policy="Ignore"))
    assert {text.rpartition(": ")[2] for text in other} >= {"there is no Service kvplace-system/kvplace"}
    assert sum("has no certificate" in text for text in other) == count
    assert sum("failurePolicy is not Fail" in text for text in other) == count


def test_a_bundle_may_hold_an_old_ca_beside_the_present_one(tmp_path: Path) -> None:
    ca = Authority(tmp_path, "ca")
    lives = (timedelta(seconds=-1), timedelta(days=60))
    both = b"".join(ca.issue("either", lasts=lasts)[0].read_bytes() for lasts in lives)
    objects = {**webhooks(base64.b64encode(both).decode()), "services": (named("kvplace"),)}
    assert problems(check_webhooks, objects=objects, now=datetime.now(UTC)) == []


def test_a_refusal_by_the_webhook_is_a_success() -> None:
    refused = 'admission webhook "pod.kvplace.io" denied the request: annotation kvplace.io/doctor'
    assert problems(check_admission_answers, admission_answer=refused) == []
    away = 'failed calling webhook "pod.kvplace.io": connection refused'
    assert "connection refused" in problems(check_admission_answers, admission_answer=away)[0]


def test_certificates_of_cert_manager_are_checked() -> None:
    certificates = (
        named("fine", status={"notAfter": "2026-06-02T00:00:00Z"}),
        named("over", status={"notAfter": "2026-05-31T00:00:00Z"}),
        named("stuck", status={"conditions": [{"type": "Ready", "status": "False", "message": "no issuer"}]}),
    )
    over, stuck = problems(check_certificates, objects={"certificates": certificates})
    assert "it ended on 2026-05-31" in over
    assert "no issuer" in stuck


def deployment(component: str, image: str = "kvplace/serve:0.1.0", **status: Any) -> dict[str, Any]:
    container = {"name": "main", "image": image, "envFrom": [{"configMapRef": {"name": "settings"}}]}
    spec = {"replicas": 2, "template": {"spec": {"containers": [container]}}}
    return named(f"kvplace-{component}", component=component, spec=spec, status=status)


def scheduling(name: str = "kvplace-scheduler", **extender: Any) -> dict[str, Any]:
    full = {
        "filterVerb": "filter",
        "bindVerb": "bind",
        "preemptVerb": "preempt",
        "managedResources": [{"name": "kvplace.io/vm"}],
        **extender,
    }
    profiles = [{"schedulerName": name, "percentageOfNodesToScore": 100}]
    text = yaml.safe_dump({"kind": "KubeSchedulerConfiguration", "profiles": profiles, "extenders": [full]})
    return named("configuration", component="scheduler", data={"configuration.yaml": text})


def lease(renewed: str) -> dict[str, Any]:
    return named("kvplace-scheduler", spec={"renewTime": renewed})


def scheduler(*configurations: dict[str, Any], renewed: str = "2026-06-01T00:00:00.000000Z") -> list[str]:
    program = deployment("scheduler", readyReplicas=2)
    program["spec"]["template"]["spec"]["volumes"] = [
        {"name": "client", "secret": {"secretName": "client"}},
        {"name": "configuration", "configMap": {"name": "configuration"}},
    ]
    objects = {
        "deployments": (program,),
        "configmaps": configurations,
        "leases": (lease(renewed),),
    }
    return problems(check_scheduler, objects=objects)


def test_the_scheduler_asks_our_extender_rightly_and_is_at_work() -> None:
    assert scheduler(scheduling()) == []
    assert "ignorable is true" in scheduler(scheduling(ignorable=True))[0]
    assert "has no bindVerb" in scheduler(scheduling(bindVerb=""))[0]
    assert "evictions may not help the preemptor" in scheduler(scheduling(preemptVerb=""))[0]
    assert "does not call kvplace" in scheduler(scheduling(managedResources=[]))[0]
    assert "no profile has the schedulerName kvplace-scheduler" in scheduler(scheduling("other"))[0]
    assert "seconds ago" in scheduler(scheduling(), renewed="2026-05-31T23:00:00.000000Z")[0]
    broken = named("configuration", component="scheduler", data={"a": "{"})
    assert "no scheduler configuration" in scheduler(broken)[0]


def configured(**change: Any) -> dict[str, Any]:
    """Change the top of the scheduler's configuration."""
    text = yaml.safe_dump({**yaml.safe_load(scheduling()["data"]["configuration.yaml"]), **change})
    return {**scheduling(), "data": {"configuration.yaml": text}}


def test_settings_of_the_scheduler_count_where_kube_scheduler_reads_them() -> None:
    profiles = [{"schedulerName": "kvplace-scheduler"}]
    assert "not 100" in scheduler(configured(profiles=profiles))[0]
    assert scheduler(configured(profiles=profiles, percentageOfNodesToScore=100)) == []
    profiles[0]["percentageOfNodesToScore"] = 50  # type: ignore[assignment]
    assert "not 100" in scheduler(configured(profiles=profiles, percentageOfNodesToScore=100))[0]


@pytest.mark.parametrize(
    ("election", "findings"),
    [
        ({"leaderElect": True, "resourceName": "kvplace-scheduler"}, 1),
        ({"leaderElect": False}, 0),
        ({"resourceName": "other"}, 0),
        (None, 1),
    ],
)
def test_the_lease_counts_only_where_the_scheduler_takes_it(
    election: dict[str, Any] | None, findings: int
) -> None:
    found = scheduler(configured(leaderElection=election), renewed="2026-05-31T23:00:00.000000Z")
    assert len(found) == findings


def test_a_configuration_of_the_scheduler_that_it_no_longer_uses_is_not_checked() -> None:
    before = {**scheduling("other", ignorable=True), "metadata": {"name": "configuration-before"}}
    before["metadata"]["labels"] = {"app.kubernetes.io/component": "scheduler"}
    assert scheduler(scheduling(), before) == []
    assert "no scheduler configuration" in scheduler(before)[0]


def test_without_a_scheduler_of_its_own_pods_must_go_to_the_main_one() -> None:
    assert "it is missing" in problems(check_scheduler)[0]
    settings = named("settings", data={"SCHEDULER_NAME": "default-scheduler"})
    objects = {"deployments": (deployment("serve"),), "configmaps": (settings,)}
    assert problems(check_scheduler, objects=objects) == []


def test_replicas_that_are_not_ready_are_counted_with_the_reason() -> None:
    assert "it is missing" in problems(check_serve)[0]
    failing: dict[str, Any] = {
        "conditions": [{"type": "ReplicaFailure", "status": "True", "message": "quota"}]
    }
    assert (
        "none of its 2 replicas is ready (quota)"
        in problems(check_serve, objects={"deployments": (deployment("serve", **failing),)})[0]
    )
    (some,) = problems(check_serve, objects={"deployments": (deployment("serve", readyReplicas=1),)})
    assert some.startswith("warning")
    assert problems(check_serve, objects={"deployments": (deployment("serve", readyReplicas=2),)}) == []


def test_a_crashing_sidecar_is_named_with_its_log() -> None:
    waiting = {"name": "hook-sidecar-0", "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "x"}}}
    pod = named("virt-launcher-db", namespace="team", status={"containerStatuses": [waiting]})
    (found,) = problems(check_images, objects={"waiting pods": (pod,)})
    assert "Pod team/virt-launcher-db, container hook-sidecar-0: it does not run" in found


@pytest.mark.parametrize(
    ("image", "release"),
    [
        ("kvplace/serve:0.1.0", "0.1.0"),
        ("registry.example:5000/kvplace/serve:0.2.0@sha256:00", "0.2.0"),
        ("registry.example:5000/kvplace/serve", ""),
        ("kvplace/serve@sha256:00", ""),
    ],
)
def test_the_release_of_an_image_is_its_tag(image: str, release: str) -> None:
    assert release_of(image) == release


def test_programs_of_different_releases_are_named() -> None:
    settings = named("settings", data={"SIDECAR_IMAGE": "kvplace/hook:0.2.0"})
    objects = {"deployments": (deployment("serve"),), "configmaps": (settings,)}
    (found,) = problems(check_versions, objects=objects)
    assert "serve 0.1.0, hook 0.2.0" in found
    alone = {"deployments": (deployment("serve"),)}
    assert problems(check_versions, objects=alone) == []
    (skewed,) = problems(check_versions, objects=alone, client_version="0.3.0")
    assert "this command is of release 0.3.0, the installation of 0.1.0" in skewed


def kubevirt(*gates: str, version: str = "v1.9.0", **status: Any) -> dict[str, Any]:
    developer = {"developerConfiguration": {"featureGates": list(gates)}}
    status = {"observedKubeVirtVersion": version, **status}
    return named("kubevirt", namespace="kubevirt", spec={"configuration": developer}, status=status)


def test_kubevirt_must_allow_sidecars() -> None:
    assert problems(check_kubevirt, objects={"kubevirts": (kubevirt("Sidecar"),)}) == []
    assert "feature gate Sidecar is off" in problems(check_kubevirt, objects={"kubevirts": (kubevirt(),)})[0]
    old = kubevirt("Sidecar", version="v1.5.2")
    assert "older than v1.6" in problems(check_kubevirt, objects={"kubevirts": (old,)})[0]
    assert "only plain pods" in problems(check_kubevirt)[0]


def plugin(name: str = "kvplace", socket: str = PLUGIN_SOCKET, **spec: Any) -> dict[str, Any]:
    return named(name, spec={"domainHooks": [{"sidecar": {"socketPath": socket}}], **spec})


def plugins_crd(hooks: str = "domainHooks") -> dict[str, Any]:
    schema: dict[str, Any] = {"properties": {"spec": {"properties": {hooks: {}, "nodeHooks": {}}}}}
    versions = [{"name": "v1alpha1", "schema": {"openAPIV3Schema": schema}}]
    return named(PLUGINS_CRD, spec={"versions": versions})


def with_plugins(*plugins: dict[str, Any], **others: Any) -> dict[str, Any]:
    """The objects that are read where the setting SIDECAR is plugin."""
    pods = {"spec": {"containers": [{"envFrom": [{"configMapRef": {"name": "settings"}}]}]}}
    return {
        "deployments": (named("kvplace-serve", component="serve", spec={"template": pods}),),
        "configmaps": (named("settings", data={"SIDECAR": "plugin"}),),
        "customresourcedefinitions": (plugins_crd(),),
        "kubevirts": (kubevirt("Plugins"),),
        "plugins": plugins,
        **others,
    }


def test_with_plugins_kubevirt_needs_their_gate_and_not_that_of_sidecars() -> None:
    assert problems(check_kubevirt, objects=with_plugins(plugin())) == []
    off = with_plugins(plugin(), kubevirts=(kubevirt("Sidecar"),))
    assert "feature gate Plugins is off" in problems(check_kubevirt, objects=off)[0]


def test_the_plugin_of_kvplace_must_call_its_hook_and_have_no_condition_for_all_vms() -> None:
    assert problems(check_plugins, objects=with_plugins(plugin())) == []
    assert problems(check_plugins, objects={"kubevirts": (kubevirt("Sidecar"),)}) == []
    assert "it is missing" in problems(check_plugins, objects=with_plugins())[0]
    elsewhere = with_plugins(plugin(socket="/var/run/kubevirt-plugin/other.sock"))
    assert "it does not call the hook" in problems(check_plugins, objects=elsewhere)[0]
    for_all = with_plugins(plugin(condition="true"))
    assert "it has a spec.condition" in problems(check_plugins, objects=for_all)[0]


def test_the_form_of_kubevirts_plugins_is_checked() -> None:
    none = with_plugins(customresourcedefinitions=())
    assert "KubeVirt has no Plugins" in problems(check_plugins, objects=none)[0]
    newer = with_plugins(plugin(), customresourcedefinitions=(plugins_crd("launcherHooks"),))
    assert "it has launcherHooks" in problems(check_plugins, objects=newer)[0]


def test_plugins_of_others_are_named_where_kubevirt_calls_them() -> None:
    theirs = {"plugins": (plugin("theirs"),)}
    (found,) = problems(check_plugins, objects=theirs | {"kubevirts": (kubevirt("Sidecar", "Plugins"),)})
    assert "it may change the pins and NUMA nodes" in found
    assert problems(check_plugins, objects=theirs | {"kubevirts": (kubevirt("Sidecar"),)}) == []


def test_a_check_whose_objects_could_not_be_read_reports_it_and_nothing_else() -> None:
    there = {"deployments": (deployment("serve"),)}
    found = examine(installation(denied={VIEW: "you may not list nodes"}, objects=there))
    results = {one.check.name: one for one in found.results}
    assert len(results) == len(CHECKS)
    assert results["ledgers"].level is Severity.UNCHECKED
    assert [one.problem for one in results["ledgers"].findings] == ["you may not list nodes"]


def test_a_cluster_without_kvplace_gets_one_next_step_instead_of_all_missing_parts() -> None:
    found = examine(installation(own_denials=("customresourcedefinitions",)))
    assert [one.check.name for one in found.results] == ["API server", "parts", "KubeVirt", "kubelets"]
    parts = found.results[1].findings
    assert [one.about for one in parts] == ["kvplace", "your rights"]
    unread = examine(installation(denied={"deployments": "you may not list deployments"}))
    assert len(unread.results) == len(CHECKS)


def test_half_an_installation_is_named_by_its_parts() -> None:
    objects = {"deployments": (deployment("serve"),), "customresourcedefinitions": (crd(KINDS[0]),)}
    (found,) = problems(check_parts, objects=objects)
    assert found.endswith("only a part is installed (kinds, serve); missing: policies, webhooks")


def mounting(component: str, secret: str, **more: Any) -> dict[str, Any]:
    made = deployment(component)
    volumes = [{"secret": {"secretName": secret, **more}}, {"secret": {"secretName": secret, **more}}]
    made["spec"]["template"]["spec"]["volumes"] = [*volumes, {"emptyDir": {}}]
    return made


def test_a_secret_that_pods_wait_for_is_named_with_who_makes_it() -> None:
    serve = mounting("serve", "tls")
    secret = named("tls")
    assert problems(check_secrets, objects={"deployments": (serve,), "secrets": (secret,)}) == []
    assert problems(check_secrets, objects={"deployments": (mounting("serve", "tls", optional=True),)}) == []

    def fix(**objects: tuple[Any, ...]) -> str:
        keeper = objects.pop("keeper", ())
        (found,) = check_secrets(installation(objects={"deployments": (serve, *keeper), **objects}))
        assert found.about == "Secret kvplace-system/tls"
        assert (
            found.problem == "it is missing, and pods of Deployment kvplace-system/kvplace-serve wait for it"
        )
        return found.fix

    assert "not on base" in fix()
    assert "logs deployment/kvplace-certificates" in fix(keeper=(deployment("certificates"),))
    assert "describe certificates" in fix(certificates=(named("tls", spec={"secretName": "tls"}),))


def test_the_policies_of_the_agent_are_searched_for_where_there_is_one() -> None:
    def missing(**objects: tuple[Any, ...]) -> set[str]:
        return {one.about.split()[1] for one in check_policies(installation(objects=objects))}

    assert missing(daemonsets=(named("kvplace-agent", component="agent"),)) == set(POLICIES)
    assert missing() == {name for name in POLICIES if not name.startswith("agent-")}
