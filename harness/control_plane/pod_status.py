"""The status that a kubelet would write for a pod, read from its containers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness.control_plane.container_life import ContainerLife, now

Json = dict[str, Any]

RUN_CONTAINER_ERROR = "RunContainerError"
"""A kubelet's reason for a container that its runtime could not start."""


def container_statuses(pod: Json) -> list[Json]:
    """List the status of each container of a pod, init containers first."""
    status = pod.get("status", {})
    return [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]


def container_runs(pod: Json, name: str) -> bool:
    """Return whether a container, or an init container, of a pod runs."""
    return any(each["name"] == name and "running" in each["state"] for each in container_statuses(pod))


def start_failures(pod: Json) -> list[str]:
    """List why containers of a pod were not started by the runtime; another try would not help."""
    waiting = [status.get("state", {}).get("waiting", {}) for status in container_statuses(pod)]
    return [state["message"] for state in waiting if state.get("reason") == RUN_CONTAINER_ERROR]


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the pod would be reached; nothing listens there."""

    host: str
    pod: str

    def status(self) -> Json:
        return {
            "hostIP": self.host,
            "hostIPs": [{"ip": self.host}],
            "podIP": self.pod,
            "podIPs": [{"ip": self.pod}],
        }


@dataclass(frozen=True, slots=True)
class PodContainers:
    """The containers of one pod, init containers (sidecars among them) apart."""

    init: list[ContainerLife]
    main: list[ContainerLife]

    def named(self, name: str) -> ContainerLife:
        """Return one container; raises KeyError with the names that there are."""
        by_name = {life.spec["name"]: life for life in [*self.init, *self.main]}
        if name not in by_name:
            raise KeyError(f"no container {name}, only {', '.join(by_name)}")
        return by_name[name]

    def refuse(self, reason: str, message: str) -> None:
        """Report of all containers that they cannot be started."""
        for life in [*self.init, *self.main]:
            life.refuse(reason, message)

    @property
    def are_initialized(self) -> bool:
        return all(life.started if life.restart == "Always" else life.exit_code == 0 for life in self.init)

    @property
    def are_over(self) -> bool:
        """Whether the main containers have ended for good, or never start; the sidecars end then."""
        if any(life.restart == "Never" and life.exit_code for life in self.init):
            return True
        return all(life.exit_code is not None for life in self.main)

    @property
    def unready(self) -> list[str]:
        sidecars = [life for life in self.init if life.restart == "Always"]
        return [life.spec["name"] for life in [*sidecars, *self.main] if not life.ready]

    @property
    def phase(self) -> str:
        """Pending until every container has begun, then Running until all have ended, sidecars too."""
        if self.are_over and not any(life.is_running for life in self.init):
            return "Failed" if any(life.exit_code != 0 for life in self.main) else "Succeeded"
        begun = all(life.is_running or life.exit_code is not None or life.last_state for life in self.main)
        return "Running" if begun else "Pending"


class StatusReading:
    """Writes the status of one pod, remembering when each condition last changed."""

    def __init__(self, containers: PodContainers, addresses: Addresses) -> None:
        self._containers = containers
        self._addresses = addresses
        self._started_at = now()
        self._conditions: dict[str, Json] = {}

    def status(self, pod: Json) -> Json:
        """Return the status to write; equal as long as nothing has changed."""
        containers, uid = self._containers, pod["metadata"]["uid"]
        phase = containers.phase
        over = phase in {"Succeeded", "Failed"}
        unready = containers.unready
        reason = "PodCompleted" if over else "ContainersNotReady"
        message = "" if over else f"containers with unready status: [{' '.join(unready)}]"
        missing_gate = "" if unready else _missing_gate(pod)
        conditions = [
            self._condition("PodScheduled", holds=True),
            self._condition("PodReadyToStartContainers", holds=not over),
            self._condition(
                "Initialized", holds=containers.are_initialized, reason="ContainersNotInitialized"
            ),
            self._condition("ContainersReady", holds=not unready, reason=reason, message=message),
            self._condition("Ready", holds=False, reason="ReadinessGatesNotReady", message=missing_gate)
            if missing_gate
            else self._condition("Ready", holds=not unready, reason=reason, message=message),
        ]
        return {
            "phase": phase,
            "conditions": conditions,
            "startTime": self._started_at,
            **self._addresses.status(),
            "initContainerStatuses": [life.status(uid) for life in containers.init],
            "containerStatuses": [life.status(uid) for life in containers.main],
        }

    def _condition(self, kind: str, *, holds: bool, reason: str = "", message: str = "") -> Json:
        status = "True" if holds else "False"
        old = self._conditions.get(kind)
        since = old["lastTransitionTime"] if old and old["status"] == status else now()
        explained = {"reason": None, "message": None} if holds else {"reason": reason, "message": message}
        self._conditions[kind] = {"type": kind, "status": status, "lastTransitionTime": since, **explained}
        return self._conditions[kind]


def _missing_gate(pod: Json) -> str:
    """State which readiness gate is not True yet; others set them, a kubelet only reads them."""
    holds = {c["type"]: c["status"] == "True" for c in pod.get("status", {}).get("conditions", [])}
    for gate in pod["spec"].get("readinessGates", []):
        kind = gate["conditionType"]
        if not holds.get(kind, False):
            verb = "is not True" if kind in holds else "does not exist"
            return f'corresponding condition of pod readiness gate "{kind}" {verb}.'
    return ""
