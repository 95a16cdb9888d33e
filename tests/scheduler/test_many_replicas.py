"""Replicas, schedulers, faults and deaths in any order: no core has two owners, all are free in the end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import combinations, count
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvplace.controller.controller import ControllerSettings
from kvplace.core.errors import Unavailable
from kvplace.core.placement import PodPlacement
from kvplace.core.request import OnFailure, Policy, Scope, Smt
from kvplace.kube.records import PodRecord
from kvplace.kube.watches import LEDGERS, NODES, PODS, TOPOLOGIES, Kind
from kvplace.scheduler.extender import ExtenderSettings, Mode
from tests.controller.replicas import Replica, asking_pod, replica
from tests.effort import examples
from tests.kube.faults import Moment, Operation
from tests.nodes.machines import EIGHT, TWO
from tests.scheduler.counting import Network
from tests.virtual_time import JumpingLoop

EPOCH = datetime(2026, 1, 2, tzinfo=UTC)
NODE_NAMES = ("one", "two")
KINDS: tuple[Kind[str, object], ...] = (PODS, NODES, TOPOLOGIES, LEDGERS)  # type: ignore[assignment]
LONGEST_DELAY_S = 15.0
"""A request that lands later than a claim is waited for (60 s) can do harm, as everywhere: the agent is
the last judge then. Here the network is at most as slow as its timeouts."""


@dataclass
class Living:
    """A replica's process: its parts, and how to end it."""

    parts: Replica
    life: asyncio.Task[None]
    end: asyncio.Event


pauses = st.sampled_from([0.0, 0.0, 0.05, 0.3, 1.2])
SLOW_OR_LOST = (Operation.BIND, Operation.BIND, Operation.WRITE_LEDGER, Operation.READ_POD)


class Replicas(RuleBasedStateMachine):
    """Everything that may happen around one small cluster that has more VMs than room."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = JumpingLoop()
        self.living: list[Living] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.in_flight: set[str] = set()
        self.names = count()
        self.turns = count()
        self.is_scheduling = True

    @initialize(mode=st.sampled_from(Mode), asked=st.lists(st.integers(1, 8), min_size=3, max_size=8))
    def a_cluster_of_two_nodes_two_replicas_and_some_vms(self, mode: Mode, asked: list[int]) -> None:
        async def begin() -> None:
            self.cluster = Network()
            self.cluster.create_node("one", topology=EIGHT)
            self.cluster.create_node("two", topology=TWO)
            self.extending = ExtenderSettings(mode=mode)
            await self._start(0)
            await self._start(5)
            for vcpus in asked:
                self._arrive(vcpus)
            self.tasks.add(asyncio.create_task(self._kube_scheduler()))
            await asyncio.sleep(0.3)

        self.loop.run(begin())

    # What users, kube-scheduler and kubelet do.

    async def _kube_scheduler(self) -> None:
        """Try every pod that waits, again and again, with whichever replica is asked next."""
        while True:
            for pod in self._waiting():
                if self.living and self.is_scheduling and pod.uid not in self.in_flight:
                    self.in_flight.add(pod.uid)
                    one = self.living[next(self.turns) % len(self.living)].parts
                    self.tasks.add(asyncio.create_task(self._attempt(one, pod)))
            await asyncio.sleep(0.5)

    async def _attempt(self, one: Replica, pod: PodRecord) -> None:
        try:
            async with asyncio.timeout(10.0):
                names = (await one.filter(pod)).names or []
                if names:
                    scores = await one.scores(pod, *names)
                    await asyncio.sleep(0.01 * (next(self.turns) % 7))
                    await one.bind(pod, max(names, key=lambda name: (scores[name], name)))
        except (TimeoutError, asyncio.CancelledError):
            pass  # the replica is slow, or dead
        finally:
            self.in_flight.discard(pod.uid)

    @rule(
        asked=st.lists(st.integers(1, 8), min_size=1, max_size=4),
        scope=st.sampled_from([Scope.ONE_SOCKET, Scope.ANY, Scope.ONE_L3]),
        policy=st.sampled_from([Policy.EXCLUSIVE, Policy.EXCLUSIVE, Policy.SHARE]),
        smt=st.sampled_from(Smt),
        on_failure=st.sampled_from([OnFailure.WAIT, OnFailure.WAIT, OnFailure.FLOAT]),
        pause=pauses,
    )
    def vms_arrive(
        self, asked: list[int], scope: Scope, policy: Policy, smt: Smt, on_failure: OnFailure, pause: float
    ) -> None:
        for vcpus in asked:
            self._arrive(vcpus, scope=scope, policy=policy, smt=smt, on_failure=on_failure)
        self._pass(pause)

    @precondition(lambda self: self.living and self._pods())
    @rule(data=st.data(), node=st.sampled_from(NODE_NAMES), pause=pauses)
    def an_old_decision_is_bound(self, data: st.DataObject, node: str, pause: float) -> None:
        """A retry after a timeout, another scheduler, or a pod that is long bound."""
        pod = data.draw(st.sampled_from(self._pods()))
        one = data.draw(st.sampled_from(self.living)).parts

        async def attempt() -> None:
            with contextlib.suppress(asyncio.CancelledError):
                await one.bind(pod, node)

        self.tasks.add(self.loop.create_task(attempt()))
        self._pass(pause)

    @precondition(lambda self: self._bound())
    @rule(
        data=st.data(),
        how=st.sampled_from(["succeeds", "fails", "compute ends", "deleted", "deleted", "forced"]),
        pause=pauses,
    )
    def a_vm_ends(self, data: st.DataObject, how: str, pause: float) -> None:
        pod = data.draw(st.sampled_from(self._bound()))
        match how:
            case "deleted" | "forced":
                self.cluster.delete_pod("default", pod.name, force=how == "forced")
            case "compute ends":
                self.cluster.change_pod("default", pod.name, compute_terminated=True)
            case _:
                phase = "Succeeded" if how == "succeeds" else "Failed"
                self.cluster.change_pod("default", pod.name, phase=phase)
        self._pass(pause)

    @precondition(lambda self: self._waiting())
    @rule(data=st.data())
    def a_vm_that_waits_is_given_up(self, data: st.DataObject) -> None:
        self.cluster.delete_pod("default", data.draw(st.sampled_from(self._waiting())).name)

    # What goes wrong.

    @precondition(lambda self: len(self.living) > 1)
    @rule(data=st.data())
    def a_replica_dies(self, data: st.DataObject) -> None:
        self._end(data.draw(st.sampled_from(self.living)))

    @precondition(lambda self: len(self.living) < 3 and not self._watches_stand_still())
    @rule(skew=st.sampled_from([0, 5, -5]))
    def a_replica_starts(self, skew: int) -> None:
        self.loop.run(self._start(skew))

    @rule(
        operation=st.sampled_from(SLOW_OR_LOST),
        moment=st.sampled_from(Moment),
        times=st.sampled_from([1, 2, 8, 40]),
        pause=pauses,
    )
    def answers_are_lost(self, operation: Operation, moment: Moment, times: int, pause: float) -> None:
        self.cluster.faults.fail(operation, Unavailable("timeout"), moment=moment, times=times)
        self._pass(pause)

    @rule(
        operation=st.sampled_from(SLOW_OR_LOST),
        moment=st.sampled_from(Moment),
        seconds=st.sampled_from([0.2, 5.0, LONGEST_DELAY_S]),
        pause=pauses,
    )
    def the_next_call_is_slow(
        self, operation: Operation, moment: Moment, seconds: float, pause: float
    ) -> None:
        async def delay() -> None:
            hold = self.cluster.faults.hold(operation, moment=moment)

            async def let_go() -> None:
                await hold.reached.wait()
                await asyncio.sleep(seconds)
                hold.release()

            self.tasks.add(asyncio.create_task(let_go()))

        self.loop.run(delay())
        self._pass(pause)

    @rule(
        kind=st.sampled_from(KINDS),
        what=st.sampled_from(["pause", "resume", "resume", "drop"]),
        pause=pauses,
    )
    def watches_fail(self, kind: Kind[str, object], what: str, pause: float) -> None:
        match what:
            case "pause":
                self.cluster.pause_watches(kind)
            case "resume":
                self.cluster.resume_watches(kind)
            case "drop":
                self.cluster.drop_watches(kind)
        self._pass(pause)

    @rule(seconds=st.sampled_from([1.0, 12.0, 65.0]))
    def time_passes(self, seconds: float) -> None:
        self._pass(seconds)

    @rule()
    def everything_settles(self) -> None:
        self._settle()
        claims = dict(self._claims())
        for pod in self._bound():
            placement = PodPlacement.from_json(pod.placement).placement
            if not placement.floats:
                owned, cpus = claims.pop((pod.uid, pod.node))
                assert (owned, cpus) == (placement.owned, placement.cpus), pod.name
        assert claims == {}
        self.is_scheduling = True

    # What must hold after every step.

    @invariant()
    def no_core_has_two_living_owners(self) -> None:
        placed = [(pod, PodPlacement.from_json(pod.placement).placement) for pod in self._bound()]
        for (pod, one), (other_pod, other) in combinations(placed, 2):
            if pod.node == other_pod.node:
                assert one.owned & other.owned == 0, (pod.name, other_pod.name)
                assert one.owned & other.cpus == other.owned & one.cpus == 0, (pod.name, other_pod.name)

    @invariant()
    def every_stored_ledger_is_in_order(self) -> None:
        for record in getattr(self, "cluster", Network())._ledgers.records.values():
            record.ledger.check()

    def teardown(self) -> None:
        if hasattr(self, "cluster"):
            self._settle()
            for pod in self._pods():
                self.cluster.delete_pod("default", pod.name, force=True)
            self._settle()
            assert dict(self._claims()) == {}
            assert all(not record.ledger.owners for record in self.cluster._ledgers.records.values())
            for one in list(self.living):
                self._end(one)
        self.loop.finish()

    # Inside.

    async def _start(self, skew: int) -> None:
        ready: asyncio.Future[Replica] = self.loop.create_future()
        end = asyncio.Event()

        async def life() -> None:
            async with replica(
                self.cluster,
                settings=ControllerSettings(replica=f"replica-{next(self.names)}"),
                extending=self.extending,
                now=lambda: EPOCH + timedelta(seconds=self.loop.time() + skew),
            ) as parts:
                ready.set_result(parts)
                await end.wait()

        task = asyncio.create_task(life())
        self.living.append(Living(await ready, task, end))

    def _end(self, one: Living) -> None:
        self.living.remove(one)
        one.end.set()
        self.loop.run(asyncio.wait([one.life]))

    def _arrive(self, vcpus: int, **options: Any) -> None:
        asking_pod(self.cluster, f"vm-{next(self.names)}", vcpus, **options)

    def _pass(self, seconds: float) -> None:
        self.loop.run(asyncio.sleep(seconds))

    def _settle(self) -> None:
        """Let all faults end and everybody do what they have to; no new VM is scheduled meanwhile."""
        self.is_scheduling = False
        for kind in KINDS:
            self.cluster.resume_watches(kind)
        for fault in self.cluster.faults._faults:
            if fault.hold is not None:
                fault.hold.release()
        self.cluster.faults._faults.clear()
        for shelf_pod in self._pods():
            if shelf_pod.deleting:
                self.cluster.delete_pod("default", shelf_pod.name, force=True)
        if not self.living:
            self.loop.run(self._start(0))
        self._pass(180.0)

    def _watches_stand_still(self) -> bool:
        return any(self.cluster._logs[kind]._paused for kind in KINDS)

    def _pods(self) -> list[PodRecord]:
        return list(self.cluster._pods.records.values()) if hasattr(self, "cluster") else []

    def _waiting(self) -> list[PodRecord]:
        return [pod for pod in self._pods() if not pod.node]

    def _bound(self) -> list[PodRecord]:
        """The pods whose QEMU may run."""
        return [pod for pod in self._pods() if pod.node and not _has_ended(pod)]

    def _claims(self) -> Iterator[tuple[tuple[str, str], tuple[int, int]]]:
        for record in self.cluster._ledgers.records.values():
            for uid, claim in record.ledger.claims.items():
                yield (uid, record.node), (claim.owned, claim.cpus)


def _has_ended(pod: PodRecord) -> bool:
    return pod.phase in ("Succeeded", "Failed") or pod.compute_terminated


TestReplicas = Replicas.TestCase
TestReplicas.settings = settings(max_examples=examples(25), stateful_step_count=40, deadline=None)
