"""The life of one container on a hollow node: started, probed, restarted, ended.

The rules are the kubelet's: readiness and liveness wait for the startup probe; thresholds and periods come
from the pod; an exit is followed by a restart where the restart policy asks for one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from harness.control_plane.containers import ContainerRequest, ContainerRunner, RunningContainer, log_tail

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Timing:
    """How fast a hollow node is; None keeps the value of the pod, or of a kubelet."""

    probe_period_s: float | None = None
    restart_backoff_s: float = 10.0


@dataclass(slots=True)
class ContainerLife:
    """One container; `on_change` is called whenever its status would read differently."""

    spec: Json
    restart: str
    on_change: Callable[[], None]
    timing: Timing
    running: RunningContainer | None = None
    state: Json = field(default_factory=lambda: {"waiting": {"reason": "PodInitializing"}})
    last_state: Json = field(default_factory=dict)
    started: bool = False
    ready: bool = False
    restarts: int = 0
    _hollow_end: asyncio.Future[int] | None = None
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _over: asyncio.Event | None = None

    @property
    def is_running(self) -> bool:
        return "running" in self.state

    @property
    def exit_code(self) -> int | None:
        """The exit code when the container has ended for good."""
        code: int | None = self.state.get("terminated", {}).get("exitCode")
        return code

    def status(self, pod_uid: str) -> Json:
        """Return the containerStatuses entry."""
        return {
            "name": self.spec["name"],
            "image": self.spec["image"],
            "imageID": f"hollow://{self.spec['image']}",
            "containerID": f"hollow://{pod_uid}/{self.spec['name']}/{self.restarts}",
            "state": self.state,
            "lastState": self.last_state,
            "started": self.started,
            "ready": self.ready,
            "restartCount": self.restarts,
            # Without it the API server resizes no pod.
            "resources": self.spec.get("resources") or {},
        }

    async def live(self, runner: ContainerRunner | None, request: Callable[[], ContainerRequest]) -> None:
        """Run the container until it has ended for good."""
        self._over = asyncio.Event()
        try:
            while True:
                self._hollow_end = asyncio.get_running_loop().create_future()
                wanted = request()
                self.running = None if runner is None else await runner(wanted)
                self._become({"running": {"startedAt": now()}})
                if self._stopping.is_set():
                    await self.stop_running(0)
                ended = self._ended(await self._run_once(), wanted)
                again = self.restart == "Always" or (self.restart == "OnFailure" and ended["exitCode"] != 0)
                if self._stopping.is_set() or not again:
                    self._become({"terminated": ended})
                    return
                self.last_state = {"terminated": ended}
                if self.restarts:
                    self._become({"waiting": {"reason": "CrashLoopBackOff"}})
                    await self._back_off()
                self.restarts += 1
        finally:
            self._over.set()

    async def stop(self, grace_s: float) -> None:
        """End the container for good and wait until `live` has returned; harmless when it has already."""
        self._stopping.set()
        await self.stop_running(grace_s)
        if self._over is not None:
            await self._over.wait()
        if "terminated" not in self.state:
            self.state = {"terminated": {"exitCode": 137, "reason": "ContainerStatusUnknown"}}
        self.started = self.ready = False

    async def stop_running(self, grace_s: float) -> None:
        """End the running process; `live` decides the next step."""
        if self.running is not None:
            await self.running.stop(grace_s)
        else:
            self.complete()

    def complete(self) -> None:
        """Let a hollow container end with 0; harmless when it is a process or has ended already."""
        if self.running is None and self._hollow_end is not None and not self._hollow_end.done():
            self._hollow_end.set_result(0)

    def end(self, exit_code: int) -> None:
        """Let a hollow container end as if its program had exited."""
        if self.running is not None or self._hollow_end is None or self._hollow_end.done():
            raise ValueError(f"container {self.spec['name']} is not a running hollow one")
        self._hollow_end.set_result(exit_code)

    def refuse(self, reason: str, message: str) -> None:
        """Report that the container cannot be started, with a kubelet's reason and the cause."""
        self._become({"waiting": {"reason": reason, "message": message}})

    def _ended(self, code: int, request: ContainerRequest) -> Json:
        self.started = self.ready = False
        ended = {
            "exitCode": code,
            "reason": "Completed" if code == 0 else "Error",
            "startedAt": self.state["running"]["startedAt"],
            "finishedAt": now(),
        }
        # As with terminationMessagePolicy FallbackToLogsOnError, so that a test sees why the container died.
        return ended if code == 0 else {**ended, "message": log_tail(request.log)}

    async def _back_off(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.timing.restart_backoff_s):
                await self._stopping.wait()

    def _become(self, state: Json) -> None:
        self.state = state
        self.on_change()

    async def _run_once(self) -> int:
        """Probe the container while it runs; return its exit code."""
        if self.running is None:
            self.started = self.ready = True
            self.on_change()
            assert self._hollow_end is not None
            return await self._hollow_end
        # A probe that cannot even be carried out is an error of the set-up: the group lets it out.
        async with asyncio.TaskGroup() as group:
            probing = group.create_task(self._probe(self.running))
            code = await self.running.exited()
            probing.cancel()
        return code

    async def _probe(self, running: RunningContainer) -> None:
        if "startupProbe" in self.spec and not await self._until_healthy(running, self.spec["startupProbe"]):
            await running.stop(float(self.spec["startupProbe"].get("terminationGracePeriodSeconds", 30)))
            return
        self.started = True
        self.ready = "readinessProbe" not in self.spec
        self.on_change()
        async with asyncio.TaskGroup() as probes:
            if "readinessProbe" in self.spec:
                probes.create_task(self._follow_readiness(running, self.spec["readinessProbe"]))
            if "livenessProbe" in self.spec:
                probes.create_task(self._end_when_dead(running, self.spec["livenessProbe"]))

    async def _until_healthy(self, running: RunningContainer, probe: Json) -> bool:
        failures = 0
        await asyncio.sleep(probe.get("initialDelaySeconds", 0))
        while failures < probe.get("failureThreshold", 3):
            if await _succeeds(running, probe):
                return True
            failures += 1
            await self._pause(probe)
        return False

    async def _follow_readiness(self, running: RunningContainer, probe: Json) -> None:
        streak, last = 0, False
        await asyncio.sleep(probe.get("initialDelaySeconds", 0))
        while True:
            healthy = await _succeeds(running, probe)
            streak = streak + 1 if healthy == last else 1
            last = healthy
            threshold = probe.get("successThreshold", 1) if healthy else probe.get("failureThreshold", 3)
            if healthy != self.ready and streak >= threshold:
                self.ready = healthy
                self.on_change()
            await self._pause(probe)

    async def _end_when_dead(self, running: RunningContainer, probe: Json) -> None:
        await asyncio.sleep(probe.get("initialDelaySeconds", 0))
        failures = 0
        while failures < probe.get("failureThreshold", 3):
            failures = 0 if await _succeeds(running, probe) else failures + 1
            await self._pause(probe)
        await running.stop(float(probe.get("terminationGracePeriodSeconds", 30)))

    async def _pause(self, probe: Json) -> None:
        await asyncio.sleep(self.timing.probe_period_s or probe.get("periodSeconds", 10))


async def _succeeds(running: RunningContainer, probe: Json) -> bool:
    """Carry out one exec probe; other kinds need a pod network, which a hollow node has not, and count as
    passed.
    """
    if "exec" not in probe:
        return True
    code, _ = await running.run(probe["exec"]["command"], float(probe.get("timeoutSeconds", 1)))
    return code == 0


def now() -> str:
    """Return the time as Kubernetes writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
