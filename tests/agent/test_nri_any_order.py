"""Whatever happens in whatever order: no container runs on CPUs that a claim in effect owns for another."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvplace.agent.back_off import MOST_REPAIRS
from kvplace.agent.cpuset_keeper import CpusetKeeper
from kvplace.agent.node_report import NodeReport
from kvplace.agent.nri_source import NriSource
from kvplace.agent.this_node import ThisNode
from kvplace.core.cpuset import mask_of
from kvplace.core.scalars import NO_CPUS, ContainerId, PodUid
from kvplace.nri.values import Cpuset
from tests.agent.nodes_in_use import OTHER_VM, PLAIN, VM, node_with, placed
from tests.agent.played_runtime import Phase, PlayedContainer, PlayedObjects, PlayedRuntime, now
from tests.effort import examples

CLAIMS = {VM: placed(VM, "2-3"), OTHER_VM: placed(OTHER_VM, "4-6")}
"""What each VM owns when it is bound; CPUs 0, 1 and 7 are always in the shared pool."""
EIGHT_CPUS = mask_of(range(8))
some_cpus = st.sets(st.integers(0, 7), min_size=1).map(mask_of)
numbers = st.integers(0, 100)


class AnyOrder(RuleBasedStateMachine):
    """A node with two VMs and plain pods on which the agent may be killed at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.bound: frozenset[PodUid] = frozenset()
        self.runtime = PlayedRuntime(EIGHT_CPUS)
        self.agent: NriSource | None = None
        self.writes: Counter[ContainerId] = Counter()
        self.carried_out = False
        """Whether the agent is there and has acted on the newest state of its node."""

    @rule()
    @precondition(lambda self: self.agent is None)
    def the_agent_starts(self) -> None:
        self.objects = PlayedObjects(self._state())
        self.keeper = CpusetKeeper(self.objects, NodeReport(), self.runtime.cgroups)
        self.agent = NriSource(self.keeper, self.runtime, self.runtime.cgroups.root)
        self.runtime.connect(self.agent)
        self.carried_out = True

    @rule()
    @precondition(lambda self: self.agent is not None)
    def the_agent_is_killed(self) -> None:
        self.agent = None
        self.runtime.disconnect()
        self.carried_out = False

    @rule(uid=st.sampled_from([VM, OTHER_VM]))
    def a_vm_is_bound(self, uid: PodUid) -> None:
        self.bound |= {uid}
        self._changed()

    @rule(uid=st.sampled_from([VM, OTHER_VM]))
    def a_vm_is_released_when_its_containers_are_gone(self, uid: PodUid) -> None:
        if not self._containers(uid):
            self.bound -= {uid}
            self._changed()

    @rule()
    def a_vm_gets_its_sidecar_and_its_qemu(self) -> None:
        for uid in self.bound:
            if not self._containers(uid):
                pod = self.runtime.run_pod(uid)
                self.runtime.create(pod, "hook-sidecar-0")
                self.runtime.create(pod, "compute")

    @rule()
    def a_plain_container_is_created(self) -> None:
        self.runtime.create(self.runtime.run_pod(PLAIN, vm=False), "app")

    @rule(number=numbers)
    def a_container_takes_the_next_step(self, number: int) -> None:
        container = self._one(number, Phase.CREATED, Phase.READ, Phase.STARTING)
        if container is None:
            return
        match container.phase:
            case Phase.CREATED:
                self.runtime.read_spec(container)
            case Phase.READ:
                self.runtime.make_task(container)
            case Phase.STARTING:
                self.runtime.start(container)
                if self.carried_out:
                    assert not container.first_cpus & self._owned_by_others(container)

    @rule(number=numbers, cpus=some_cpus)
    def the_kubelet_updates_a_container(self, number: int, cpus: int) -> None:
        if container := self._one(number, Phase.RUNNING):
            self.runtime.update(container, Cpuset(EIGHT_CPUS & cpus))

    @rule(number=numbers, cpus=some_cpus)
    def somebody_writes_a_cgroup(self, number: int, cpus: int) -> None:
        container = self._one(number, Phase.RUNNING)
        if container and self.writes[container.id] < MOST_REPAIRS - 2:
            self.writes[container.id] += 1
            self.runtime.write_cgroup(container, EIGHT_CPUS & cpus)
            if self.agent is not None:
                self.keeper.check([container.id])

    @rule(number=numbers)
    def a_container_stops(self, number: int) -> None:
        if container := self._one(number, Phase.RUNNING):
            self.runtime.stop(container)

    @invariant()
    def owned_cpus_are_used_by_their_owner_alone(self) -> None:
        if self.carried_out:
            for container in self._running():
                assert not self.runtime.cpus_of(container) & self._owned_by_others(container), container

    @invariant()
    def a_vm_has_its_cpus(self) -> None:
        if self.carried_out:
            for container in self._running():
                if container.name == "compute":
                    assert self.runtime.cpus_of(container) == CLAIMS[container.pod.uid].placement.owned

    @invariant()
    def specs_say_what_cgroups_say(self) -> None:
        if self.carried_out:
            for container in self._running():
                assert container.spec.cpus in (NO_CPUS, self.runtime.cpus_of(container))

    def _state(self) -> ThisNode:
        return node_with(*(CLAIMS[uid] for uid in sorted(self.bound)))

    def _changed(self) -> None:
        """Let the agent see the newest state, if it is there."""
        if self.agent is not None:
            self.objects.become(self._state())
            self.keeper.carry_out()
            now(self.agent.carry_specs())

    def _containers(self, uid: PodUid) -> list[PlayedContainer]:
        return [found for found in self.runtime.containers.values() if found.pod.uid == uid]

    def _running(self) -> list[PlayedContainer]:
        return [found for found in self.runtime.containers.values() if found.phase is Phase.RUNNING]

    def _one(self, number: int, *phases: Phase) -> PlayedContainer | None:
        found = [container for container in self.runtime.containers.values() if container.phase in phases]
        return found[number % len(found)] if found else None

    def _owned_by_others(self, container: PlayedContainer) -> int:
        uid = container.pod.uid
        own = uid if container.name == "compute" else None
        return mask_of(cpu for other in self.bound if other != own for cpu in CLAIMS[other].placement.vcpus)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=examples(100), stateful_step_count=50)
