"""The reports of others about a VM that does not come up lead to the cause and to the next command."""

from __future__ import annotations

from typing import Any

import pytest

from kvplace.explain.notes import (
    note_on_interfaces,
    notes_on_containers,
    notes_on_document,
    notes_on_vmi,
    notes_on_waiting,
)

AWAY = (
    'failed calling webhook "vmi.kvplace.io": failed to call webhook: Post "https://x.svc:443/admit/vmi": '
    "connect: connection refused"
)
SERVE = "`kvplace serve` does not answer"
LOOK = "`kubectl -n kvplace-system get pods` shows whether it runs"
Json = dict[str, Any]


def condition(kind: str, status: str, message: str, reason: str = "") -> Json:
    found = {"type": kind, "status": status, "message": message, "reason": reason}
    return {**found, "lastTransitionTime": "2026-11-23T02:00:00Z"}


def pod(state: Json, **container: Json | int) -> Json:
    name = "hook-sidecar-0"
    return {
        "metadata": {"namespace": "shop", "name": "virt-launcher-db"},
        "spec": {"containers": [{"name": name, "command": ["kvplace-hook"]}]},
        "status": {"containerStatuses": [{"name": name, "image": "hook:1", "state": state, **container}]},
    }


def test_a_vm_whose_instance_cannot_be_made_states_why_and_who_does_not_answer() -> None:
    status = {"conditions": [condition("Ready", "False", "none"), condition("Failure", "True", AWAY)]}
    notes = list(notes_on_document({"status": status}, asks=True))
    assert notes == [
        f"{SERVE} the API server (webhook vmi.kvplace.io): connect: connection refused; {LOOK}",
        f"KubeVirt reports since 2026-11-23T02:00:00Z: {AWAY}",
        "KubeVirt reports Ready is false: none",
    ]


def test_a_refusal_of_the_instance_is_repeated_as_it_is() -> None:
    refused = 'admission webhook "v.example.org" denied the request: not on Mondays'
    status = {"conditions": [condition("Failure", "True", refused)]}
    (note,) = notes_on_document({"status": status}, asks=True)
    assert note == f"KubeVirt reports since 2026-11-23T02:00:00Z: {refused}"


@pytest.mark.parametrize(
    ("devices", "requested", "missing"),
    [
        ({"interfaces": [{"name": "fast", "sriov": {}}, {"name": "default"}]}, 0, "(fast)"),
        ({"interfaces": [{"name": "fast", "sriov": {}}]}, 1, ""),
        ({"interfaces": [{"name": "a", "sriov": {}}, {"name": "b", "sriov": {}}]}, 1, "(a, b)"),
        ({"interfaces": [{"name": "a", "sriov": {}}], "gpus": [{"deviceName": "x.com/gpu"}]}, 1, "(a)"),
        ({"interfaces": [{"name": "default", "masquerade": {}}]}, 0, ""),
        ({"gpus": [{"deviceName": "x.com/gpu"}]}, 0, ""),
        ({}, 0, ""),
    ],
)
def test_an_interface_without_a_device_is_named(devices: Json, requested: int, missing: str) -> None:
    note = note_on_interfaces({"spec": {"domain": {"devices": devices}}}, requested)
    assert note == (
        f"its pod requests no device for each of its SR-IOV interfaces {missing}: install Multus' network "
        "resources injector, and start the VM again"
        if missing
        else ""
    )


def test_a_pod_that_waits_because_serve_is_down_reports_it_first() -> None:
    message = 'Post "https://kvplace-extender:9443/v1/filter": EOF'
    waiting = {"status": {"conditions": [condition("PodScheduled", "False", message)]}}
    assert list(notes_on_waiting(waiting)) == [
        f"{SERVE} kube-scheduler: EOF; {LOOK}", f"kube-scheduler reports: {message}"
    ]  # fmt: skip


def test_a_sidecar_whose_image_cannot_be_pulled_is_named_with_who_chose_it() -> None:
    stuck = pod({"waiting": {"reason": "ImagePullBackOff", "message": "not found"}})
    assert list(notes_on_containers(stuck)) == [
        "container hook-sidecar-0 waits: ImagePullBackOff: not found",
        "its image is hook:1, which the flag --sidecar-image of `kvplace serve` names: can the node pull it?",
    ]


def test_a_sidecar_that_is_not_ready_is_all_that_the_containers_after_it_wait_for() -> None:
    initializing: Json = {"waiting": {"reason": "PodInitializing"}}
    held = pod({})
    held["spec"] = {"initContainers": held["spec"]["containers"]}
    held["status"] = {
        "initContainerStatuses": [{"name": "hook-sidecar-0", "state": {"running": {}}, "ready": False}],
        "containerStatuses": [{"name": "compute", "state": initializing}],
    }
    (note,) = notes_on_containers(held)
    assert note == (
        "container hook-sidecar-0 runs and is not ready; `kubectl -n shop exec virt-launcher-db "
        "-c hook-sidecar-0 -- kvplace-hook ready --once` prints why"
    )


def test_a_sidecar_that_crashes_leads_to_its_log() -> None:
    ended: Json = {"terminated": {"exitCode": 2}}
    stuck = pod({"waiting": {"reason": "CrashLoopBackOff"}}, lastState=ended, restartCount=4)
    assert list(notes_on_containers(stuck)) == [
        "container hook-sidecar-0 waits: CrashLoopBackOff",
        (
            "it was started again 4 times, the last time after exit code 2; `kubectl -n shop logs "
            "virt-launcher-db -c hook-sidecar-0 --previous` shows why"
        ),
    ]


def test_a_vm_that_grows_states_both_sizes_and_that_it_needs_another_node() -> None:
    vmi: Json = {
        "spec": {"domain": {"cpu": {"sockets": 8, "cores": 1, "threads": 1, "maxSockets": 16}}},
        "status": {
            "phase": "Running",
            "currentCPUTopology": {"sockets": 4, "cores": 1, "threads": 1},
            "conditions": [{"type": "HotVCPUChange", "status": "True"}],
        },
    }
    (note,) = notes_on_vmi(vmi)
    assert note.startswith("it grows from 4 to 8 vCPUs: KubeVirt plugs vCPUs in by a live migration")
    vmi["status"]["conditions"][0]["status"] = "False"
    assert not any("grows" in note for note in notes_on_vmi(vmi))
