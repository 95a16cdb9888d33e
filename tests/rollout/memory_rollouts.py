"""VMs in memory: the calls of a rollout, and a KubeVirt that does what a test asks it to.

The rules are those of an API server: a document is created once, an application makes or keeps an object, a
deletion concerns one UID. `bind`, `run` and `pin` play scheduler, virt-handler and agent.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, TypeVar, cast

from kvplace.core.errors import Conflict
from kvplace.core.scalars import NodeName
from kvplace.core.well_known_names import ROLLOUT_LABEL
from kvplace.kube.api_rollouts import Quota
from kvplace.kube.memory_objects import ObjectLog
from kvplace.kube.reported_vms import LAUNCHERS, VMI_PHASES, VMS, LauncherPod, ReportedVm
from kvplace.kube.watches import EVERYTHING, Kind, Selector, WatchEvent

K = TypeVar("K")
R = TypeVar("R")

NAMESPACE = "default"


class MemoryRollouts:
    """VMs, VMIs and pods of the namespace `default`."""

    def __init__(self) -> None:
        self.now = 1_000_000.0
        """The clock of the API server, in seconds since 1970."""
        self.documents: dict[str, str] = {}
        self.quotas: tuple[Quota, ...] = ()
        self.applied: list[str] = []
        """The name of every VM that was really made, in order; one that is made twice is here twice."""
        self.manifests: dict[str, Mapping[str, Any]] = {}
        self._uids = itertools.count(1)
        self._vms: ObjectLog[ReportedVm] = ObjectLog(VMS)
        self._vmis: ObjectLog[ReportedVm] = ObjectLog(VMI_PHASES)
        self.pods_linger = False
        """Whether pods outlive their deleted VMs until `end_pods`."""
        self._pods: ObjectLog[LauncherPod] = ObjectLog(LAUNCHERS)
        self._logs: Mapping[Kind[Any, Any], ObjectLog[Any]] = {
            VMS: self._vms,
            VMI_PHASES: self._vmis,
            LAUNCHERS: self._pods,
        }

    # The calls of a rollout.

    def watch(self, kind: Kind[K, R], selector: Selector = EVERYTHING) -> AsyncIterator[WatchEvent[R]]:
        selector.check(kind)
        return cast(ObjectLog[R], self._logs[kind]).watch(selector)

    async def read_all(self, kind: Kind[K, R], selector: Selector = EVERYTHING) -> tuple[R, ...]:
        await asyncio.sleep(0)
        selector.check(kind)
        return cast(ObjectLog[R], self._logs[kind]).selected(selector)

    async def apply_vm(self, vm: Mapping[str, Any], *, dry_run: bool = False) -> None:
        await asyncio.sleep(0)
        name = vm["metadata"]["name"]
        if dry_run:
            return
        log: ObjectLog[Any] = self._vms if vm["kind"] == "VirtualMachine" else self._vmis
        if log.get(name) is not None:
            if self.manifests.get(name) != vm:
                raise Conflict(f"{name} was written by another client")
            return
        self.applied.append(name)
        self.manifests[name] = vm
        rollout = vm["metadata"].get("labels", {}).get(ROLLOUT_LABEL, "")
        labels = {ROLLOUT_LABEL: rollout}
        if vm["kind"] == "VirtualMachine":
            self._vms.put(name, self._made(name, rollout), labels)
        if vm["kind"] != "VirtualMachine" or vm["spec"].get("runStrategy") != "Halted":
            self._vmis.put(name, self._made(name, rollout), labels)
            pod = LauncherPod(NAMESPACE, f"virt-launcher-{name}", self._uid(), name, rollout)
            self._pods.put(name, pod, labels)

    async def delete_vm(self, kind: str, namespace: str, name: str, uid: str) -> None:
        await asyncio.sleep(0)
        log: ObjectLog[Any] = self._vms if kind == "VirtualMachine" else self._vmis
        known = log.get(name)
        if known is None:
            return
        if known.uid != uid:
            raise Conflict(f"{name} has UID {known.uid}, not {uid}")
        for each in self._logs.values():
            if each is not self._pods or not self.pods_linger:
                each.remove(name)

    def orphan(self, name: str) -> None:
        """Delete a VirtualMachine whose instance and pod are still there."""
        self._vms.remove(name)

    def relabel_instance(self, name: str) -> None:
        """Take the label of the rollout off an instance, as after an edit of the VM's template."""
        self._change_vmi(name, rollout="")

    def end_pods(self) -> None:
        """Let the pods of deleted VMs end."""
        for name in [str(name) for name in self._pods.records]:
            if name not in self._vms.records:
                self._pods.remove(name)

    async def read_documents(self, namespace: str, rollout: str = "") -> Mapping[str, str]:
        await asyncio.sleep(0)
        return {name: text for name, text in self.documents.items() if rollout in ("", name)}

    async def store_document(self, namespace: str, rollout: str, text: str) -> None:
        await asyncio.sleep(0)
        if rollout in self.documents:
            raise Conflict(f"kvplace-rollout-{rollout} exists")
        self.documents[rollout] = text

    async def delete_document(self, namespace: str, rollout: str) -> None:
        await asyncio.sleep(0)
        self.documents.pop(rollout, None)

    async def read_quotas(self, namespace: str) -> tuple[Quota, ...]:
        await asyncio.sleep(0)
        return self.quotas

    async def close(self) -> None:
        """End all watches."""
        for log in self._logs.values():
            log.close()

    # What KubeVirt, the scheduler and the agent do.

    @property
    def vms(self) -> list[ReportedVm]:
        """The VirtualMachines that are there."""
        return list(self._vms.records.values())

    @property
    def waiting(self) -> list[str]:
        """The VMs whose pod has no node yet."""
        return [pod.vmi for pod in self._pods.records.values() if not pod.node]

    def bind(self, name: str, node: str = "worker") -> None:
        self._change_pod(name, node=NodeName(node), bound_since=self.now, waiting="")

    def run(self, name: str) -> None:
        self._change_vmi(name, status="Running", running_since=self.now)

    def pin(self, name: str) -> None:
        self._change_pod(name, pinned_since=self.now)

    def strays(self, name: str, why: str) -> None:
        self._change_pod(name, unpinned=why)

    def end(self, name: str, *, told: bool = True) -> None:
        """Let the guest of a VM shut down by itself; the agent may or may not report it."""
        pod = self._pods.get(name)
        assert pod is not None, name
        if told and pod.pinned_since is not None:
            self._change_pod(name, pinned_since=None, was_pinned=True, unpinned="its threads have ended")
        self._change_pod(name, has_ended=True)
        self._change_vmi(name, status="Succeeded")

    def keep_waiting(self, name: str, why: str) -> None:
        self._change_pod(name, waiting=why)

    def fail(self, name: str, why: str) -> None:
        self._change_vmi(name, status="Failed", failure=why)

    def keep_unmade(self, name: str, why: str) -> None:
        """Let virt-controller fail to make the pod of a VM."""
        self._pods.remove(name)
        self._change_vmi(name, unmade=why)

    def make_pod(self, name: str) -> None:
        """Let virt-controller make the pod after all."""
        vmi = self._vmis.get(name)
        assert vmi is not None, name
        self._vmis.put(name, replace(vmi, unmade=""))
        pod = LauncherPod(NAMESPACE, f"virt-launcher-{name}", self._uid(), name, vmi.rollout)
        self._pods.put(name, pod, {ROLLOUT_LABEL: vmi.rollout})

    def forget_the_past(self) -> None:
        """Make every watch list again."""
        for log in self._logs.values():
            log.relist_all()

    def _change_pod(self, name: str, **changes: Any) -> None:
        pod = self._pods.get(name)
        assert pod is not None, name
        self._pods.put(name, replace(pod, **changes))

    def _change_vmi(self, name: str, **changes: Any) -> None:
        vmi = self._vmis.get(name)
        assert vmi is not None, name
        self._vmis.put(name, replace(vmi, **changes))

    def _made(self, name: str, rollout: str) -> ReportedVm:
        created = datetime.fromtimestamp(self.now, UTC).isoformat()
        return ReportedVm(NAMESPACE, name, self._uid(), created, rollout=rollout)

    def _uid(self) -> str:
        return f"uid-{next(self._uids)}"
