"""Reports of KubeVirt, kube-scheduler and the kubelet about a VM in its objects, as sentences."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from math import prod
from typing import Any

from kvplace.core.annotations import written_without_effect
from kvplace.core.cpuset import format_cpu_list
from kvplace.core.ledger import Claim, Reserved
from kvplace.core.quantity import counted
from kvplace.core.scalars import NodeName
from kvplace.kube.api_errors import unanswered
from kvplace.kube.object_client import Document, condition
from kvplace.nodes.cluster_view import VmState

_STARTING = ("ContainerCreating", "PodInitializing")
"""Reasons of containers that wait for nothing of their own."""
_SIDECAR = "kvplace-hook"
"""The command of our sidecar; KubeVirt numbers all sidecars of a VM alike."""


def state_of(document: Document) -> str:
    """Return how far an object has come in KubeVirt's word; NotCreated without one."""
    status = document.get("status") or {}
    return str(status.get("printableStatus") or status.get("phase") or VmState.NOT_CREATED.value)


def notes_on_document(document: Document, *, asks: bool) -> Iterator[str]:
    """State why an object of the cluster has no pod that opted in, whether it asks itself or not."""
    status = document.get("status") or {}
    if not asks:
        yield "it requests no cores, so kvplace does not change it"
        yield from written_without_effect(document)
    elif status.get("activePods"):
        yield (
            "its pod carries no kvplace.io/request: it was created without kvplace's webhooks; "
            "delete the pod to have it created again"
        )
    yield from _unmet(status)


def notes_on_vmi(vmi: Document) -> Iterator[str]:
    """State other facts about a VMI with pods: a pause, a migration, conditions that are not met."""
    status = vmi.get("status") or {}
    paused = condition(vmi, "Paused")
    if paused.get("status") == "True":
        name, namespace = vmi["metadata"]["name"], vmi["metadata"].get("namespace")
        yield (
            "it is paused: its vCPUs stand still, and it keeps its cores; "
            f"`virtctl unpause vmi {name} -n {namespace}` continues it"
        )
    yield from _growth(vmi)
    migration = status.get("migrationState") or {}
    if migration.get("failed"):
        yield f"its last live migration failed: {migration.get('failureReason') or 'no reason is given'}"
    elif migration and not migration.get("completed"):
        target = migration.get("targetNode") or "a node that is not chosen yet"
        yield f"it migrates live from {migration.get('sourceNode') or status.get('nodeName')} to {target}"
    # Of a VM that has not begun to start, kube-scheduler and kubelet report more than these conditions.
    begins = status.get("phase") not in ("Scheduled", "Running")
    yield from _unmet(status, ("PodScheduled", *(("Ready",) if begins else ())))


def note_on_interfaces(vmi: Document, devices: int) -> str:
    """State that a pod requests fewer devices than its VMI names; empty where it requests all.

    KubeVirt 1.9 leaves the resource of an SR-IOV network to a webhook, and a pod without it starts with no
    virtual function. `devices`: the number that the pod requests.
    """
    named = ((vmi.get("spec") or {}).get("domain") or {}).get("devices") or {}
    others = [one for key in ("gpus", "hostDevices") for one in named.get(key) or () if one.get("deviceName")]
    interfaces = [one["name"] for one in named.get("interfaces") or () if one.get("sriov") is not None]
    if not interfaces or devices >= len(others) + len(interfaces):
        return ""
    return (
        f"its pod requests no device for each of its SR-IOV interfaces ({', '.join(interfaces)}): install "
        "Multus' network resources injector, and start the VM again"
    )


def _growth(vmi: Document) -> Iterator[str]:
    """State that KubeVirt plugs vCPUs in, which it does by a live migration to a pod of the new size."""
    changing = condition(vmi, "HotVCPUChange")
    if changing.get("status") != "True":
        return
    spec, status = vmi.get("spec") or {}, vmi.get("status") or {}
    present, wanted = (
        _vcpus(topology or {})
        for topology in (status.get("currentCPUTopology"), (spec.get("domain") or {}).get("cpu"))
    )
    yield (
        f"it grows from {present} to {counted(wanted, 'vCPU')}: KubeVirt plugs vCPUs in by a live migration "
        "to a pod of the new size on another node; until it ends, the VM runs with its present vCPUs"
    )


def _vcpus(topology: Document) -> int:
    counts = (topology.get(level) for level in ("sockets", "cores", "threads"))
    return prod(count for count in counts if isinstance(count, int) and count > 0)


def notes_on_waiting(pod: Document) -> Iterator[str]:
    """Repeat the report of kube-scheduler about a pod without a node."""
    scheduled = condition(pod, "PodScheduled")
    if not scheduled:
        name = (pod.get("spec") or {}).get("schedulerName", "")
        yield f"no scheduler has tried it yet: does one run under the name {name}?"
    elif scheduled.get("message"):
        yield from _said("kube-scheduler reports", scheduled["message"])


def notes_on_containers(pod: Document) -> Iterator[str]:
    """State why the containers of a bound pod wait."""
    status, metadata, spec = pod.get("status") or {}, pod.get("metadata") or {}, pod.get("spec") or {}
    sidecars = {
        one.get("name")
        for kind in ("initContainers", "containers")
        for one in spec.get(kind) or ()
        if _SIDECAR in (one.get("command") or ())
    }
    initial = tuple(_statuses(status, "initContainerStatuses"))
    starting = held = False
    for container in (*initial, *_statuses(status, "containerStatuses")):
        name, state = container.get("name"), container.get("state") or {}
        waiting = state.get("waiting")
        if waiting is not None and waiting.get("reason") in _STARTING:
            # After an init container that waits they wait for that one.
            starting = not held
        elif waiting is not None:
            held = held or container in initial
            message = " ".join((waiting.get("message") or "").split())
            yield f"container {name} waits: {': '.join(filter(None, (waiting.get('reason'), message)))}"
            yield from _next_step(container, metadata, is_ours=name in sidecars)
        elif "running" in state and not container.get("ready") and name in sidecars:
            held = held or container in initial
            yield (
                f"container {name} runs and is not ready; `kubectl -n {metadata.get('namespace')} exec "
                f"{metadata.get('name')} -c {name} -- kvplace-hook ready --once` prints why"
            )
    if starting:
        yield "the kubelet prepares its volumes, network and images; the events name the cause of the wait"


def notes_on_held(pod: Document) -> Iterator[str]:
    """Name the containers that keep a pod running after QEMU; the kubelet ends a deleted pod anyway."""
    metadata = pod.get("metadata") or {}
    if metadata.get("deletionTimestamp"):
        return
    status = pod.get("status") or {}
    statuses = (*_statuses(status, "initContainerStatuses"), *_statuses(status, "containerStatuses"))
    running = [str(one.get("name")) for one in statuses if "running" in (one.get("state") or {})]
    yield (
        f"its QEMU in pod {metadata.get('name')} has ended and container {', '.join(running)} still runs; "
        "while it does, KubeVirt starts no migration of the VM; if it lasts, "
        f"`kubectl -n {metadata.get('namespace')} delete pod {metadata.get('name')}` ends it"
    )


def _next_step(container: Document, pod: Document, *, is_ours: bool) -> Iterator[str]:
    """State where to check next for a container that does not start, or does not stay."""
    name, reason = container.get("name"), container["state"]["waiting"].get("reason") or ""
    image = container.get("image")
    if "Image" in reason and image:
        by = ", which the flag --sidecar-image of `kvplace serve` names" if is_ours else ""
        yield f"its image is {image}{by}: can the node pull it?"
    ended = (container.get("lastState") or {}).get("terminated")
    if ended is not None:
        times, code = counted(container.get("restartCount") or 1, "time"), ended.get("exitCode")
        log = f"kubectl -n {pod.get('namespace')} logs {pod.get('name')} -c {name} --previous"
        yield f"it was started again {times}, the last time after exit code {code}; `{log}` shows why"


def _unmet(status: Document, known: Container[str] = ()) -> Iterator[str]:
    """Repeat failures and conditions that are not met, each sentence once, except migratability."""
    failed = condition({"status": status}, "Failure")
    if failed.get("status") == "True" and failed.get("message"):
        since = failed.get("lastTransitionTime")
        yield from _said(
            f"KubeVirt reports since {since}" if since else "KubeVirt reports", failed["message"]
        )
    said = set()
    for one in status.get("conditions") or ():
        kind, message = str(one.get("type")), one.get("message")
        if one.get("status") != "False" or not message or kind in known or kind.endswith("Migratable"):
            continue
        if message not in said:
            said.add(message)
            yield from _said(f"KubeVirt reports {kind} is false", message)


def _said(who: str, message: str) -> Iterator[str]:
    """Repeat a message; where it reports that a program does not answer, name that program first."""
    if sentence := unanswered(message):
        yield sentence
    yield f"{who}: {message}"


def _statuses(status: Document, key: str) -> Iterable[dict[str, Any]]:
    return status.get(key) or ()


def note_on_move(vm: str, target: NodeName, migration: str) -> str:
    """State which VM migrates to make room."""
    return f"for that {vm} migrates to {target} (migration {migration})"


def note_on_reservation(node: NodeName, claim: Claim, reserved: Reserved) -> str:
    """State the reservation of a VM while others make room for it, and the part that they still use."""
    text = f"room is made for it on {node}: CPUs {format_cpu_list(reserved.owned)} are reserved for it"
    still_in_use = (
        f"; CPUs {format_cpu_list(claim.still_in_use)} of them are still in use" if claim.still_in_use else ""
    )
    return f"{text} until {reserved.until} unless that is renewed{still_in_use}"
