"""The containers of the node as the tree of cgroups shows them, for container runtimes without NRI.

The kernel reports every new container and every write to a cpuset. So a container gets its set when its
cgroup appears, which is before its program starts.

Until the kubelet has reported which container of a VM's pod is `compute`, that one is on the shared pool.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from kvplace.agent.conditions import TopologyReason, cpusets_enforced
from kvplace.agent.cpuset_keeper import CpusetKeeper
from kvplace.agent.node_objects import NodeObjects
from kvplace.agent.node_plan import NodeContainer
from kvplace.core.node_topology import Enforcement
from kvplace.core.scalars import PodUid
from kvplace.kube.object_records import PodRecord
from kvplace.kube.objects import COMPUTE
from kvplace.linux.container_watch import ContainerCgroup, ContainerWatch


class CgroupSource:
    """Follows the tree below a root."""

    def __init__(self, keeper: CpusetKeeper, own: NodeObjects, root: Path) -> None:
        self._keeper = keeper
        self._own = own
        self._root = root
        self._watch: ContainerWatch | None = None
        self._other_pods: set[PodUid] = set()
        """Pods with a record that has changed since containers were described last."""
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Report until cancelled; begins when the objects of the node are known.

        Without the ledger the CPUs of VMs would seem free.
        """
        await self._own.wait_until_known()
        watch = self._watch = ContainerWatch(self._root)
        loop = asyncio.get_running_loop()
        loop.add_reader(watch.fileno(), self._wake.set)
        self._own.pods.subscribe(self._pod_changed)
        good = "The cgroup of every container is set as decided."
        condition = cpusets_enforced(TopologyReason.CGROUPS_SET, good, status=True)
        try:
            self._take_in(watch)
            self._keeper.connected(Enforcement.CGROUP, condition)  # now no plan lacks a container
            while True:
                await self._wake.wait()
                self._wake.clear()
                self._take_in(watch)
        finally:
            self._watch = None
            loop.remove_reader(watch.fileno())
            watch.close()

    def search(self) -> None:
        """List all containers again."""
        if self._watch is not None:
            self._watch.look_everywhere()
            self._take_in(self._watch)

    def _pod_changed(self, before: PodRecord | None, after: PodRecord | None) -> None:
        if (pod := after or before) is not None:
            self._other_pods.add(pod.uid)
            self._wake.set()

    def _take_in(self, watch: ContainerWatch) -> None:
        """Report the changes."""
        changes = watch.read()
        self._keeper.obstacle = watch.obstacle
        known = {container.id: container for container in self._keeper.containers()}
        ended = (known.keys() - watch.containers.keys()) | (changes.appeared & known.keys())
        for container in ended:
            self._keeper.forget(container)
        new = watch.containers.keys() - (known.keys() - ended)
        for id_ in new:
            self._keeper.take(self._described(watch.containers[id_]))
        # A pod that was deleted by force keeps its description until its containers have ended.
        other = {uid for uid in self._other_pods if self._own.pods.get(uid) is not None}
        self._other_pods.clear()
        for id_ in known.keys() - ended:
            if known[id_].pod_uid in other:
                self._keeper.describe(self._described(watch.containers[id_]))
        if changes.everything:
            self._keeper.check_all()
        elif changes.written:
            self._keeper.check(changes.written)
        if ended or new or other:
            self._keeper.carry_out(first=changes.appeared)

    def _described(self, cgroup: ContainerCgroup) -> NodeContainer:
        pod = self._own.pods.get(cgroup.pod_uid)
        return NodeContainer(
            id=cgroup.id,
            name=COMPUTE if pod is not None and pod.vmi and pod.compute_container == cgroup.id else "",
            pod_uid=cgroup.pod_uid,
            namespace="" if pod is None else pod.namespace,
            pod="" if pod is None else pod.name,
            in_vm_pod=pod is not None and bool(pod.vmi),
            folder=cgroup.folder,
        )
