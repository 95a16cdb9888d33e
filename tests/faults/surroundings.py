"""Faults around `serve`: its addresses, its certificates, a second replica, foreign writers."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from harness.control_plane.cluster import MERGE_PATCH, RequestRefused
from tests.faults.faulty_cluster import Outcome, Scene
from tests.faults.observer import LEDGERS, Json, waits_with_a_reason
from tests.faults.scenario import OwnStory, Scenario


def _cut_extender(on: Scene) -> None:
    on.observer.wait_until_bound(10)
    on.stage.extender.cut_all()
    on.fault_is_over()


def _finish(on: Scene, outcome: Outcome) -> None:
    """Wait until all is well again, and state how long it took."""
    outcome.bound_s = on.after_fault(on.observer.wait_until_bound(outcome.pods))
    outcome.agree_s = on.after_fault(on.wait_until_agreed())


def _held_extender(on: Scene, outcome: Outcome) -> None:
    """kube-scheduler gives up after 10 s, and what it had asked for is carried out all the same."""
    outcome.pods = 40
    with on.burst(30):
        pass
    on.observer.wait_until_bound(10)
    with on.stage.extender.held():
        with on.burst(10):
            pass
        on.observer.wait_until(
            lambda: any("/filter" in reason(pod) for pod in on.observer.all), "that kube-scheduler gives up"
        )
    on.fault_is_over()
    _finish(on, outcome)


def _held_admission(on: Scene, outcome: Outcome) -> None:
    """The API server gives up after the webhook's limit; what it refused leaves nothing behind."""
    outcome.pods = 20
    with on.stage.admission.held(), pytest.raises(RequestRefused, match=r"pod\.kvplace\.io"):
        on.create_one("early")
    on.check()
    with on.burst(outcome.pods):
        pass
    _finish(on, outcome)


def _two_replicas(on: Scene, outcome: Outcome) -> None:
    """Two kube-schedulers race for every pod, each asks another replica; one replica dies for good."""
    outcome.pods = 40
    stage = on.stage
    with stage.second_replica() as second:
        stage.extender.cut_all()
        other = stage.installation.add_scheduler(stage.extender.url, ca_file=stage.extender_ca)
        try:
            with other.process.paused(), on.burst(outcome.pods):
                pass
            on.observer.wait_until_bound(10)
            stage.serve.process.kill()
            on.fault_is_over()
            _finish(on, outcome)
            assert stage.extender.connections[second.extender_url] > 0
        finally:
            other.stop()
            if not stage.serve.process.is_running:
                stage.serve.start()
            stage.serve.wait_until_ready()


def _rotate_extender_certificates(on: Scene, outcome: Outcome) -> None:
    """Another CA signs the certificate of extender and admission; clients trust both CAs by then."""
    outcome.pods = 40
    stage = on.stage
    with on.burst(outcome.pods):
        for file, new in zip(stage.certificate, stage.second_authority.issue("serve-next"), strict=True):
            _replace(file, new.read_bytes())
        stage.serve.process.wait_until(
            lambda: _is_signed_by(stage.second_authority.file, stage.serve.extender_url), "new certificate"
        )
        for address in (stage.extender, stage.admission):
            address.cut_all()
    _finish(on, outcome)


def _rotate_api_server_ca(on: Scene, outcome: Outcome) -> None:
    """The file with the API server's CA gets a second one, then a certificate of that one is shown."""
    outcome.pods = 40
    stage = on.stage
    with on.burst(outcome.pods):
        pass
    on.observer.wait_until_bound(10)
    both = stage.plane.ca_file.read_bytes() + stage.second_authority.file.read_bytes()
    _replace(stage.api_ca, both)
    stage.proxy.show_certificate(stage.second_authority.issue("api-server-next"))
    stage.proxy.cut_all()
    try:
        _finish(on, outcome)
        on.delete_all()
        on.wait_until_freed()
    finally:
        stage.proxy.show_certificate(stage.plane.issue_certificate("fault-proxy"))
        stage.proxy.cut_all()


def _nonsense_in_ledgers(on: Scene, outcome: Outcome) -> None:
    """Every ledger but one gets a claim that cannot be read; a person takes it out again."""
    outcome.pods = 40
    spoilt = list(on.nodes)[1:]
    for node in spoilt:
        _write_ledger(on, node, {"claims": {"nonsense": _claim("5-3", "")}, "owners": {}})
    with on.burst(outcome.pods):
        pass
    on.observer.wait_until_bound(15)
    on.observer.wait_until(
        lambda: all(pod in on.observer.bound or "ledger" in reason(pod) for pod in on.observer.all),
        "that the waiting pods name the ledgers",
    )
    assert {pod["spec"]["nodeName"] for pod in on.observer.bound} == {next(iter(on.nodes))}
    for node in spoilt:
        _write_ledger(on, node, {"claims": {"nonsense": None}})
    on.fault_is_over()
    _finish(on, outcome)


def _claims_of_nobody(on: Scene, outcome: Outcome) -> None:
    """Every core is claimed for pods that do not exist; only kvplace tidies up."""
    outcome.pods = 40
    for node, machine in on.nodes.items():
        cpus = [cpu for cpu in range(64) if machine.allocatable >> cpu & 1]
        listed = ",".join(map(str, cpus))
        owners = {str(cpu): f"nobody-{node}" for cpu in cpus}
        _write_ledger(on, node, {"claims": {f"nobody-{node}": _claim(listed, listed)}, "owners": owners})
    with on.burst(outcome.pods):
        pass
    on.fault_is_over()
    _finish(on, outcome)


def _claims_taken_away(on: Scene, outcome: Outcome) -> None:
    """The claims of bound pods vanish from the ledgers; new pods come while they are restored."""
    outcome.pods = 40
    with on.burst(20):
        pass
    on.observer.wait_until_bound(20)
    on.wait_until_agreed()
    for node in on.nodes:
        spec = on.ledger(node)
        gone = {"owners": dict.fromkeys(spec["owners"]), "claims": dict.fromkeys(spec["claims"])}
        if spec["claims"]:
            _write_ledger(on, node, gone)
    on.fault_is_over()
    on.wait_until_agreed()
    outcome.agree_s = on.after_fault(on.wait_until_agreed())
    with on.burst(20):
        pass
    outcome.bound_s = on.since_burst(on.observer.wait_until_bound(outcome.pods))
    on.wait_until_agreed()


def _nonsense_in_annotations(on: Scene, outcome: Outcome) -> None:
    """The cpu-map of every node but one cannot be read; no client can change the results on a pod."""
    outcome.pods = 40
    spoilt = list(on.nodes)[1:]
    for node in spoilt:
        _annotate(on, f"/api/v1/nodes/{node}", {"cpu-map": '{"socket0": ["one", 2'})
    with on.burst(outcome.pods):
        pass
    on.observer.wait_until_bound(15)
    on.observer.wait_until(
        lambda: all(pod in on.observer.bound or "cpu-map" in reason(pod) for pod in on.observer.all),
        "that the waiting pods name the annotation",
    )
    pod = on.observer.bound[0]["metadata"]["name"]
    for key in ("cpu-map", "kvplace.io/placement", "kvplace.io/request"):
        with pytest.raises(RequestRefused, match="cannot be changed"):
            _annotate(on, f"{on.pods_path}/{pod}", {key: "{}"})
    for node in spoilt:
        _annotate(on, f"/api/v1/nodes/{node}", {"cpu-map": None})
    on.fault_is_over()
    _finish(on, outcome)


def reason(pod: Json) -> str:
    """Return why kube-scheduler has not found a node; empty when it has not reported it."""
    conditions = pod.get("status", {}).get("conditions", [])
    return next(
        (
            str(one["message"])
            for one in conditions
            if one["type"] == "PodScheduled" and waits_with_a_reason(pod)
        ),
        "",
    )


def _claim(cpus: str, owned: str) -> Json:
    return {
        "namespace": "default",
        "pod": "nobody",
        "policy": "exclusive",
        "cpus": cpus,
        "owned": owned,
    }


def _write_ledger(on: Scene, node: str, spec: Json) -> None:
    """Write into a ledger as a user who may, and who knows nothing of kvplace."""
    path = f"{LEDGERS}/{node}"
    try:
        on.plane.request("PATCH", path, {"spec": spec}, content_type=MERGE_PATCH)
    except RequestRefused as refused:
        if refused.status != 404:
            raise
        ledger = {
            "apiVersion": "kvplace.io/v1alpha1",
            "kind": "NodeLedger",
            "metadata": {"name": node},
            "spec": spec,
        }
        on.plane.request("POST", LEDGERS, ledger)


def _annotate(on: Scene, path: str, annotations: dict[str, str | None]) -> None:
    on.plane.request("PATCH", path, {"metadata": {"annotations": annotations}}, content_type=MERGE_PATCH)


def _replace(file: Path, content: bytes) -> None:
    """Replace a file in one step, as the kubelet does with what it mounts."""
    new = file.with_suffix(".new")
    new.write_bytes(content)
    new.replace(file)


def _is_signed_by(authority: Path, url: str) -> bool:
    host, _, port = url.removeprefix("https://").rpartition(":")
    try:
        ssl.get_server_certificate((host, int(port)), ca_certs=str(authority), timeout=5)
    except OSError:
        return False
    return True


SURROUNDINGS: tuple[Scenario | OwnStory, ...] = (
    Scenario("cut-extender", "kube-scheduler's connections cut", during=_cut_extender, quick=True),
    OwnStory("held-extender", "the extender silent until kube-scheduler gives up", _held_extender),
    OwnStory("held-admission", "admission silent until the API server gives up", _held_admission),
    OwnStory("two-replicas", "one of two replicas killed for good", _two_replicas, quick=True),
    OwnStory(
        "extender-certificates", "certificate and CA of the extender replaced", _rotate_extender_certificates
    ),
    OwnStory(
        "api-server-ca", "certificate and CA of the API server replaced", _rotate_api_server_ca, quick=True
    ),
    OwnStory("ledger-nonsense", "ledgers that cannot be read", _nonsense_in_ledgers, quick=True),
    OwnStory("ledger-nobody", "all cores claimed for pods that do not exist", _claims_of_nobody),
    OwnStory("ledger-emptied", "claims of bound pods taken away", _claims_taken_away, quick=True),
    OwnStory("annotation-nonsense", "node annotations that cannot be read", _nonsense_in_annotations),
)
