"""One pod on a hollow node: from bound to Ready, and from deleted to gone.

The status of the pod follows from its containers alone, as with a kubelet: Ready once
every container is, and every readiness gate, which others set; gone only after every container has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness.control_plane.container_life import ContainerLife, Json, Timing
from harness.control_plane.containers import ContainerRequest, ContainerRunner, NotStarted
from harness.control_plane.kube_stream import STRATEGIC_MERGE_PATCH, KubeClient
from harness.control_plane.pod_files import NotPlayed, PodVolumes, environment, expand
from harness.control_plane.pod_status import RUN_CONTAINER_ERROR, Addresses, PodContainers, StatusReading


@dataclass(frozen=True, slots=True)
class Kubelet:
    """The shared state of all pods of a group of hollow nodes."""

    client: KubeClient
    folder: Path
    runner: ContainerRunner | None
    timing: Timing
    may_end: Callable[[Json], asyncio.Event]
    """States when a deleted pod's containers may be ended."""


class HollowPod:
    """Plays one pod; `run` returns when it is gone from the API server."""

    def __init__(self, kubelet: Kubelet, pod: Json, addresses: Addresses) -> None:
        self.pod = pod
        self.uid: str = pod["metadata"]["uid"]
        self.path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"
        self.folder = kubelet.folder / self.uid
        self.volumes = PodVolumes(self.folder / "volumes")
        self._kubelet = kubelet
        self._addresses = addresses
        self._change = asyncio.Event()
        self._is_gone = False
        self._written: Json | None = None
        spec = pod["spec"]
        restart = spec.get("restartPolicy", "Always")
        init_restart = "Never" if restart == "Never" else "OnFailure"
        self.containers = PodContainers(
            init=[self._life(container, init_restart) for container in spec.get("initContainers", [])],
            main=[self._life(container, restart) for container in spec["containers"]],
        )
        self._reading = StatusReading(self.containers, addresses)

    def see(self, pod: Json) -> None:
        """Take notice of the pod's newest state."""
        self.pod = pod
        self._notice()

    def vanish(self) -> None:
        """Take notice that the pod is gone from the API server."""
        self._is_gone = True
        self._notice()

    async def run(self) -> None:
        """Play the pod until it is gone; in every case no process and no file stays behind."""
        if self.pod["status"].get("phase") in {"Succeeded", "Failed"}:
            await self._until(lambda: self._is_deleted)
            await self._delete()
            return
        try:
            async with asyncio.TaskGroup() as tasks:
                playing = [tasks.create_task(self._report()), tasks.create_task(self._live())]
                await self._until(lambda: self._is_deleted)
                if not self._is_gone:
                    await self._kubelet.may_end(self.pod).wait()
                await self._stop_all(self._grace_s)
                for task in playing:
                    task.cancel()
            await self._write_status()
            await self._delete()
        finally:
            await self._stop_all(0)
            self.volumes.remove()

    # Changes of the pod by others

    @property
    def _is_deleted(self) -> bool:
        return self._is_gone or "deletionTimestamp" in self.pod["metadata"]

    @property
    def _grace_s(self) -> float:
        return 0 if self._is_gone else float(self.pod["metadata"].get("deletionGracePeriodSeconds", 30))

    def _notice(self) -> None:
        # Waiters hold the event of their time, so each change wakes all of them and none misses it.
        self._change.set()
        self._change = asyncio.Event()

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._change.wait()

    # Containers

    def _life(self, spec: Json, restart: str) -> ContainerLife:
        return ContainerLife(spec, spec.get("restartPolicy", restart), self._notice, self._kubelet.timing)

    async def _live(self) -> None:
        """Start the containers in their order and let them live; end the sidecars when they have ended."""
        try:
            self.volumes.refresh(self.pod)
        except NotPlayed as missing:
            self.containers.refuse("CreateContainerConfigError", f"a hollow node has no {missing}")
            return
        async with asyncio.TaskGroup() as sidecars:
            if await self._initialize(sidecars):
                async with asyncio.TaskGroup() as tasks:
                    for life in self.containers.main:
                        tasks.create_task(self._start(life))
            if self.containers.are_over:
                await asyncio.gather(*(life.stop(self._grace_s) for life in self.containers.init))
                self._notice()

    async def _initialize(self, sidecars: asyncio.TaskGroup) -> bool:
        """Start the init containers one after the other; returns whether the main containers may start."""
        for life in self.containers.init:
            task = sidecars.create_task(self._start(life))
            if life.restart == "Always":
                await self._until(functools.partial(_has_started, life))
                continue
            await self._until(functools.partial(_has_begun, life))
            life.complete()
            await task
            if life.exit_code != 0:
                return False
        return True

    async def _start(self, life: ContainerLife) -> None:
        try:
            await life.live(self._kubelet.runner, lambda: self._request(life.spec))
        except NotPlayed as missing:
            life.refuse("CreateContainerConfigError", f"a hollow node has no {missing}")
        except NotStarted as failure:
            life.refuse(RUN_CONTAINER_ERROR, str(failure))

    async def _stop_all(self, grace_s: float) -> None:
        # Sidecars among the init containers go last.
        await asyncio.gather(*(life.stop(grace_s) for life in self.containers.main))
        await asyncio.gather(*(life.stop(grace_s) for life in self.containers.init))

    def _request(self, spec: Json) -> ContainerRequest:
        pod = {**self.pod, "status": {**self.pod["status"], **self._addresses.status()}}
        variables = environment(pod, spec)
        security = {**pod["spec"].get("securityContext", {}), **spec.get("securityContext", {})}
        scratch = self.folder / "scratch" / spec["name"]
        scratch.mkdir(parents=True, exist_ok=True)
        return ContainerRequest(
            pod=pod,
            name=spec["name"],
            image=spec["image"],
            command=tuple(expand(word, variables) for word in spec.get("command", [])),
            args=tuple(expand(word, variables) for word in spec.get("args", [])),
            environment=variables,
            mounts=self.volumes.mounts(pod, spec),
            user=security.get("runAsUser", 0),
            group=security.get("runAsGroup", 0),
            scratch=scratch,
            log=self._kubelet.folder / f"{pod['metadata']['name']}-{spec['name']}.log",
        )

    # Writing to the API server

    async def _report(self) -> None:
        """Keep the files and the written status true."""
        while True:
            change = self._change
            with contextlib.suppress(NotPlayed):  # The containers report it.
                self.volumes.refresh(self.pod)
            await self._write_status()
            await change.wait()

    async def _write_status(self) -> None:
        """Write the status unless the API server has it already."""
        status = self._reading.status(self.pod)
        if self._is_gone or status == self._written:
            return
        body = {"metadata": {"uid": self.uid}, "status": status}
        if await self._kubelet.client.persist("PATCH", f"{self.path}/status", body, STRATEGIC_MERGE_PATCH):
            self._written = status

    async def _delete(self) -> None:
        if not self._is_gone:
            body = {"gracePeriodSeconds": 0, "preconditions": {"uid": self.uid}}
            await self._kubelet.client.persist("DELETE", self.path, body)


def _has_started(life: ContainerLife) -> bool:
    return life.started


def _has_begun(life: ContainerLife) -> bool:
    return life.is_running or life.exit_code is not None
