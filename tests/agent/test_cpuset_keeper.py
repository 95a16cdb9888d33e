"""Whatever happens in whatever order, cgroups end as planned: with either source of containers.

No container runs on CPUs that a claim in effect owns for another, and a VM has its own.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvplace.agent.back_off import MOST_REPAIRS
from kvplace.agent.planner import plan_node
from kvplace.core.cpuset import mask_of
from kvplace.core.errors import Misconfigured
from kvplace.core.scalars import ContainerId, CpuMask, PodUid
from kvplace.kube.objects import COMPUTE
from tests.agent.any_order_nodes import SIDECAR, AnyNode, CgroupNode, NriNode, Running
from tests.profiles import examples

numbers = st.integers(0, 100)
some_cpus = st.sets(st.integers(0, 7), min_size=1).map(mask_of)


class AnyOrder(RuleBasedStateMachine):
    """A node with two VMs and plain pods on which the agent may be killed at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.bound: frozenset[PodUid] = frozenset()
        self.writes: Counter[ContainerId] = Counter()
        self.node: AnyNode = self.make()

    def make(self) -> AnyNode:
        raise NotImplementedError

    def teardown(self) -> None:
        self.node.close()

    @rule()
    @precondition(lambda self: self.node.keeper is None)
    def the_agent_starts(self) -> None:
        self.node.start_agent()

    @rule()
    @precondition(lambda self: self.node.keeper is not None)
    def the_agent_is_killed(self) -> None:
        self.node.kill_agent()

    @rule(second=st.booleans())
    def a_vm_is_bound(self, second: bool) -> None:
        self.bound |= {list(self.node.claims)[second]}
        self.node.bind(self.bound)

    @rule(second=st.booleans())
    def a_vm_is_released_when_its_containers_are_gone(self, second: bool) -> None:
        uid = list(self.node.claims)[second]
        if uid not in self.node.pods():
            self.bound -= {uid}
            self.node.bind(self.bound)

    @rule()
    def a_vm_gets_its_sidecar_and_its_qemu(self) -> None:
        for uid in sorted(self.bound - self.node.pods()):
            self.node.create(uid, SIDECAR)
            self.node.create(uid, COMPUTE)

    @rule()
    def a_plain_container_is_created(self) -> None:
        self.node.create(self.node.plain, "app")

    @rule(number=numbers)
    def a_container_takes_the_next_step(self, number: int) -> None:
        self.node.next_step(number)

    @rule()
    def the_kubelet_reports_its_containers(self) -> None:
        self.node.name_containers()

    @rule(number=numbers, cpus=some_cpus)
    def the_kubelet_updates_a_container(self, number: int, cpus: CpuMask) -> None:
        if container := self._one(number):
            self.node.update(container.id, cpus)

    @rule(number=numbers, cpus=some_cpus)
    def another_program_writes_a_cgroup(self, number: int, cpus: CpuMask) -> None:
        container = self._one(number)
        if container and self.writes[container.id] < MOST_REPAIRS - 2:
            self.writes[container.id] += 1
            self.node.write(container.id, cpus)

    @rule(number=numbers)
    def a_container_stops(self, number: int) -> None:
        if container := self._one(number):
            self.node.stop(container.id)

    @invariant()
    def every_cgroup_is_as_planned_and_specs_say_the_same(self) -> None:
        self.node.settle()
        if self.node.keeper is None:
            return
        state, containers = self.node.planned()
        plan = plan_node(state, containers)
        assert self.node.keeper.plan.pool == plan.pool
        assert self.node.keeper.plan.refused == plan.refused
        assert self.node.keeper.plan.pods.keys() == plan.pods.keys()
        for container in self.node.running():
            assert container.cpus == plan.containers[container.id].cpus, container
            assert self.node.specs().get(container.id, container.cpus) == container.cpus

    @invariant()
    def owned_cpus_are_used_by_their_owner_alone(self) -> None:
        if self.node.keeper is None:
            return
        assert not self.node.keeper.plan.refused
        for container in self.node.running():
            own = container.uid if container.name == COMPUTE else None
            for other in self.bound - {own}:
                assert not container.cpus & self._owned(other), container
            if own in self.bound:
                assert container.cpus == self.node.claims[container.uid].placement.cpus

    def _owned(self, uid: PodUid) -> CpuMask:
        return self.node.claims[uid].placement.owned

    def _one(self, number: int) -> Running | None:
        found = self.node.running()
        return found[number % len(found)] if found else None


class WithNri(AnyOrder):
    """Containers that the runtime reports."""

    def make(self) -> AnyNode:
        return NriNode()


class WithCgroups(AnyOrder):
    """Containers that the tree of cgroups shows."""

    def make(self) -> AnyNode:
        try:
            return CgroupNode()
        except (Misconfigured, PermissionError) as error:
            pytest.skip(f"no cpuset cgroup can be made here, which needs root: {error}")


TestWithNri = WithNri.TestCase
TestWithNri.settings = settings(max_examples=examples(100), stateful_step_count=50)
TestWithCgroups = WithCgroups.TestCase
TestWithCgroups.settings = settings(max_examples=examples(25), stateful_step_count=25)
