"""Whatever happens in whatever order, cgroups end as decided."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.pod_cgroups import Driver, PodCgroups, container_id, pod_cgroups, pod_uid
from kvplace.agent.cgroup_source import CgroupSource
from kvplace.agent.cpuset_keeper import CpusetKeeper
from kvplace.agent.node_objects import NodeObjects
from kvplace.agent.node_report import NodeReport
from kvplace.agent.planner import plan_node
from kvplace.core.cpuset import format_cpu_list
from kvplace.core.errors import Misconfigured
from kvplace.core.ledger import Ledger, LedgerChange, claim_of
from kvplace.core.scalars import ContainerId
from kvplace.kube.objects import COMPUTE
from kvplace.kube.records import LedgerRecord, PodRecord
from kvplace.kube.watches import Apply, Delete, Init, InitDone
from kvplace.linux.kernel_files import Gone
from tests.agent.nodes_in_use import NODE, machine_of, placed
from tests.effort import examples

VMS = {1: "1", 2: "0"}
"""The CPU that each VM asks for; both together would leave no shared pool."""
PODS = (*VMS, 3)
_pods, _vms, _containers = st.sampled_from(PODS), st.sampled_from(list(VMS)), st.integers(1, 2)

actions = st.lists(
    st.one_of(
        st.tuples(st.just("create"), _pods, _containers),
        st.tuples(st.just("remove"), _pods, _containers),
        st.tuples(st.just("write"), _pods, _containers),
        st.tuples(st.just("claim"), _vms, st.just(0)),
        st.tuples(st.just("release"), _vms, st.just(0)),
        st.tuples(st.just("name"), _vms, _containers),
        st.tuples(st.just("restart"), st.just(0), st.just(0)),
    ),
    max_size=14,
)
pauses = st.lists(st.booleans(), min_size=14, max_size=14)


@dataclass
class Node:
    """A node, its agent's enforcement, and what may happen to both."""

    pods: PodCgroups
    own: NodeObjects = field(default_factory=lambda: NodeObjects(NODE, machine_of([0, 1])))
    ledger: Ledger = field(default_factory=Ledger)
    version: int = 0

    def __post_init__(self) -> None:
        for store in self.own.stores:
            store.apply(Init())
            store.apply(InitDone())
        self.start()

    def start(self) -> None:
        """Start an agent; what it remembers is in its cgroups and in the cluster."""
        self.keeper = CpusetKeeper(self.own, NodeReport(), self.pods.own, sweep_s=600, starting_s=600)
        source = CgroupSource(self.keeper, self.own, self.pods.own.root)
        self.task = asyncio.create_task(self.keeper.run(source))

    async def end(self) -> None:
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task

    async def happens(self, what: str, pod: int, number: int) -> None:
        folder = self.pods.pod(pod_uid(pod)) / _id(pod, number) if pod else self.pods.base
        match what:
            case "create":
                self.pods.make(folder)
            case "remove" if folder.exists():
                self.pods.remove(folder)
            case "write" if folder.exists():
                self.pods.hierarchy.set(folder, machine_of([0, 1]).cpus)
            case "claim":
                record = self._record(pod)
                self._change(LedgerChange((claim_of(record.uid, placed(record.uid, VMS[pod]).placement),)))
                self.own.pods.apply(Apply(record))
            case "release":
                self.own.pods.apply(Delete(self._record(pod)))
                self._change(LedgerChange(releases=(pod_uid(pod),)))
            case "name" if pod_uid(pod) in self.own.pods.records:
                self.own.pods.apply(
                    Apply(replace(self.own.pods.records[pod_uid(pod)], compute_container=_id(pod, number)))
                )
            case "restart":
                await self.end()
                self.start()

    def _record(self, pod: int) -> PodRecord:
        uid = pod_uid(pod)
        text = placed(uid, VMS[pod]).to_json()
        return PodRecord("vms", f"vm-{pod}", uid, node=NODE, phase="Running", placement=text, vmi=f"{pod}")

    def _change(self, change: LedgerChange) -> None:
        self.ledger = self.ledger.after(change)
        self.version += 1
        self.own.ledgers.apply(Apply(LedgerRecord(NODE, self.ledger, str(self.version))))

    def differences(self) -> dict[str, str]:
        """What is in the cgroups and not as decided for these containers and this state."""
        known = list(self.keeper.containers())
        if {each.id for each in known} != set(self._made()):
            return {"containers": "not all are known"}
        pods = self.own.pods.records
        named = {pod.compute_container for pod in pods.values()} & {each.id for each in known}
        if {each.id for each in known if each.name == COMPUTE and each.pod_uid in pods} != named:
            return {"containers": "not all are named"}
        decided = plan_node(self.own.state, known).containers
        found = {}
        for each in known:
            assert each.folder is not None
            with contextlib.suppress(Gone):
                found[each.id] = self.pods.hierarchy.configured(each.folder)
        return {
            f"{one}": f"{format_cpu_list(cpus)} instead of {format_cpu_list(decided[one].cpus)}"
            for one, cpus in found.items()
            if cpus != decided[one].cpus
        }

    def _made(self) -> Iterator[ContainerId]:
        for pod in PODS:
            for number in (1, 2):
                if (self.pods.pod(pod_uid(pod)) / _id(pod, number)).exists():
                    yield _id(pod, number)


def _id(pod: int, number: int) -> ContainerId:
    return container_id(pod * 16 + number)


@pytest.fixture(scope="module")
def cgroups() -> None:
    try:
        with pod_cgroups():
            pass
    except (Misconfigured, PermissionError) as error:
        pytest.skip(f"no cpuset cgroup can be made here, which needs root: {error}")


@settings(max_examples=examples(40))
@given(actions, pauses)
def test_cgroups_end_as_decided(
    cgroups: None, happening: list[tuple[str, int, int]], pauses: list[bool]
) -> None:
    asyncio.run(_happen(happening, pauses))


async def _happen(happening: list[tuple[str, int, int]], pauses: list[bool]) -> None:
    with pod_cgroups(Driver.CGROUPFS) as pods:
        node = Node(pods)
        try:
            await asyncio.sleep(0.002)  # the first sweep finds everything; what comes after it is events
            for (what, pod, number), pause in zip(happening, pauses, strict=False):
                await node.happens(what, pod, number)
                await asyncio.sleep(0.002 if pause else 0)
            for _ in range(3000):
                if not node.differences():
                    break
                await asyncio.sleep(0.001)
            assert node.differences() == {}
            assert not node.task.done()
        finally:
            await node.end()
