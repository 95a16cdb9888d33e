"""One story: some minutes of a small cluster in which everything fails, then calm, then the end of all pods.

What a story grants kvplace, because the design does: a request takes effect at most 20 s after it was sent, a
kubelet learns of a pod's end within seconds, and only its owner and kvplace write on a pod.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from random import Random
from random import seed as seed_everything
from typing import TypeAlias

from kvplace.controller.controller import ControllerSettings
from kvplace.core.cluster.victims import DisruptionBudget
from kvplace.core.label_terms import LabelTerm, Operator
from kvplace.core.node_topology import Enforcement
from kvplace.core.scalars import NodeName, PodUid
from kvplace.scheduler.extender import ExtenderSettings, Mode
from kvplace.scheduler.room_maker import MakeRoom
from tests.controller.replicas import EPOCH, replica
from tests.kube.faulty_cluster import FaultyCluster
from tests.nodes.machines import EIGHT, TWO, TWO_QUADS
from tests.protocol.actors import Scheduler, Server, Users
from tests.protocol.cpu_claims import CpuClaims
from tests.protocol.device_promises import BrokenPromise
from tests.protocol.devices import NodeDeviceState
from tests.protocol.disturber import Disturber
from tests.protocol.earlier_replica import OlderView, forget_reservations
from tests.protocol.evictions import KEPT, Evictions
from tests.protocol.faults import LATE_S, FaultMix
from tests.protocol.kubevirt import KubeVirt, busy_moves
from tests.protocol.loop import SeededLoop
from tests.protocol.network import Network, Undisturbed, View
from tests.protocol.node import ContainerChanges, SimulatedNode
from tests.protocol.promises import Promises
from tests.protocol.run_counts import Diary
from tests.protocol.run_kind import Kind

CALM_S = 150.0
"""Longer than everything that kvplace waits for: 60 s for a binding, and 30 s between two checks a node."""
_STEP_S = 20.0
_LEAST_PATIENCE_S = 30.0 + 8.0 + LATE_S + 2.0
"""For a claim that was stored along with another one and is still young, the longest bind, and the request
that arrives last."""
_REPLICAS = ("r1", "r2")
_APART_S = 1e-5
"""Two clocks never show the same microsecond while two replicas date a claim of one pod."""

_ROOM = {Kind.ROOM: MakeRoom.AUTOMATIC, Kind.NODES: MakeRoom.NODES}
Checks: TypeAlias = tuple[Callable[[], None], ...]


class Story:
    """The events that a seed causes."""

    def __init__(
        self, seed: int, kind: Kind = Kind.PLAIN, *, tell: Callable[[str], None] | None = None
    ) -> None:
        """`tell` gets one line for each step that has an effect."""
        seed_everything(seed)  # pauses draw their jitter from the module's own generator
        self.diary = diary = Diary(tell)
        self._random = random = Random(seed)
        self._kind = kind
        in_peace = kind is Kind.PREEMPTION and random.random() < 0.5
        self._older = ""
        """The replica that is of an earlier version, in one story of eight; mostly none."""
        if kind not in (Kind.PLAIN, Kind.DEVICES) and seed % 8 == 0:
            self._older = _REPLICAS[-1]
            diary.happened["of two versions"] += 1
        self._mix = FaultMix.draw_peaceful(random) if in_peace else FaultMix.draw(random)
        self._turmoil_s = random.choice((15.0, 40.0, 100.0))
        self._pause_s = self._turmoil_s / random.choice((8, 15, 25))
        self._settings = ExtenderSettings(
            mode=random.choice((Mode.DECIDE, Mode.DECIDE, Mode.ADVISE)),
            nominate_from_nodes=random.choice((1, 1000)),
            make_room=_ROOM.get(kind, MakeRoom.OFF),
        )
        self._controlling = ControllerSettings(patience_s=random.choice((_LEAST_PATIENCE_S, 75.0)))
        self._network = Network(self._generator(), self._mix, diary)
        self._cluster = FaultyCluster()
        self._cluster.faults = Undisturbed()
        self._servers = {name: Server(number * _APART_S) for number, name in enumerate(_REPLICAS)}
        self._nodes = []
        containers = ContainerChanges()
        kinds = {"n1": (EIGHT, TWO), "n2": (TWO, EIGHT)}
        if kind in _ROOM or kind is Kind.DEVICES:
            kinds = {"n1": (TWO_QUADS, EIGHT), "n2": (TWO_QUADS, TWO)}
        for name, machines in kinds.items():
            self._cluster.create_node(name)
            self._cluster.put_schedulable_node(name)
            how = Enforcement.DRA if kind is Kind.DRA else Enforcement.NRI
            self._cluster.put_topology(name, machines[0], enforcement=how)
            node = SimulatedNode(
                NodeName(name), machines, self._view(name), self._generator(), containers, diary, how
            )
            if kind is Kind.DEVICES:
                node.devices = NodeDeviceState(self._generator(), machines[0])
            self._nodes.append(node)
        self._promises = Promises(self._cluster, self._nodes, containers, diary)
        self._promises.all_know_reservations = not self._older
        self._promises.may_part = self._may_part
        self._cpu_claims = CpuClaims(self._cluster, diary) if kind is Kind.DRA else None
        for node in self._nodes:
            node.check_admitted = self._promises.look_at_admitted
        self._evictions: Evictions | None = None
        if kind is Kind.PREEMPTION:
            kept = DisruptionBudget("default", KEPT, (LabelTerm(KEPT, Operator.EXISTS),), allowed=0)
            self._cluster.disruption_budgets = random.choice(([], [kept]))
            self._evictions = Evictions(
                self._cluster, self._promises, self._generator(), diary, in_peace=in_peace and not self._older
            )

    def run(self) -> None:
        """Run the story; raises BrokenPromise."""
        self._loop = SeededLoop(
            self._generator(), disorder=self._mix.disorder, after_step=self._promises.look
        )
        self.diary.clock = self._loop.time
        self._cluster.time = self._date
        gc.disable()
        try:
            with busy_moves(), asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._run())
        finally:
            gc.enable()
            self._promises.raise_broken()  # whatever went wrong after it

    def _date(self) -> str:
        return (EPOCH + timedelta(seconds=self._loop.time())).isoformat()

    async def _run(self) -> None:
        promises, diary = self._promises, self.diary
        async with asyncio.TaskGroup() as group:
            lasting = [group.create_task(node.run()) for node in self._nodes]
            lasting += [group.create_task(self._serve(*known)) for known in self._servers.items()]
            for _ in range(2):
                scheduler = Scheduler(
                    self._cluster,
                    self._servers,
                    promises,
                    self._network,
                    self._generator(),
                    diary,
                    self._evictions,
                    self._cpu_claims,
                )
                lasting.append(group.create_task(scheduler.run()))
            if self._kind is Kind.NODES:
                nodes = {node.name: node for node in self._nodes}
                kubevirt = KubeVirt(self._cluster, nodes, promises, self._network, self._generator(), diary)
                lasting.append(group.create_task(kubevirt.run()))
            users = Users(self._cluster, promises, self._generator(), diary, self._kind, self._cpu_claims)
            disturber = Disturber(
                self._cluster, self._servers, self._nodes, promises, self._generator(), diary
            )
            restless = [
                group.create_task(users.run(pause_s=self._pause_s)),
                group.create_task(disturber.run(pause_s=self._mix.disturb_s)),
            ]
            try:
                await self._pass(self._turmoil_s)
                await self._calm_down(restless)
                evicted: Checks = ()
                evicted_again: Checks = ()
                if self._evictions is not None:
                    evicted = (self._evictions.check_use, self._evictions.check_waiting)
                    evicted_again = (evicted[0], self._evictions.check_waiting_since_the_last_try)
                await self._until(
                    (
                        promises.check_claims,
                        promises.check_agreement,
                        promises.check_waiting,
                        promises.check_gates,
                        *evicted,
                    ),
                    (
                        promises.check_claims_but_of_pods_that_are_gone_since_just_now,
                        promises.check_agreement_but_for_moves_that_began_just_now,
                        promises.check_waiting_since_the_last_try,
                        promises.check_gates_since_the_last_try,
                        *evicted_again,
                    ),
                )
                diary.happened["agrees"] += promises.agreeing
                if self._kind is Kind.DEVICES:
                    await self._create_in_peace(users)
                for pod in promises.pods():
                    self._cluster.delete_pod(pod.namespace, pod.name)
                await self._until((promises.check_the_end,), (promises.check_the_end,))
            except BrokenPromise as broken:
                promises.break_one(str(broken))
            finally:
                for task in (*lasting, *restless):
                    task.cancel()

    async def _create_in_peace(self, users: Users) -> None:
        """Create VMs one by one while nothing fails or ends: the kubelets choose what was predicted.

        No agent reports the devices of one before the next one is placed. The clocks agree: devices that are
        not reported count in the order of their claims.
        """
        for number, server in enumerate(self._servers.values()):
            server.clock_s = number * _APART_S
        pods = self._promises.pods()
        for pod in [*pods[::2], *(pod for pod in pods[1::2] if not pod.node)]:
            self._cluster.delete_pod(pod.namespace, pod.name)
        await self._pass(_STEP_S)
        for node in self._nodes:
            node.reads_devices = False
        self._promises.is_quiet = True
        for _ in range(4):
            users.create_one_beside_its_devices()
            await self._pass(_STEP_S / 2)
        self._promises.is_quiet = False
        for node in self._nodes:
            node.reads_devices = True
            node.wake()

    async def _pass(self, seconds: float) -> None:
        """Let time pass; raises the promise that was broken meanwhile."""
        await asyncio.sleep(seconds)
        self._promises.raise_broken()

    async def _until(self, first: Checks, again: Checks) -> None:
        """Let time pass until all is well, and a little longer: then it must still be so."""

        async def all_is_well() -> None:
            while True:
                await self._pass(_STEP_S)
                with contextlib.suppress(BrokenPromise):
                    for check in first:
                        check()
                    return

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CALM_S):
                await all_is_well()
        await self._pass(_STEP_S)
        for check in again:
            check()

    async def _calm_down(self, restless: list[asyncio.Task[None]]) -> None:
        """End all disturbances, and let what is on its way arrive."""
        for task in restless:
            task.cancel()
        await asyncio.wait(restless)
        self._network.calm = True
        for server in self._servers.values():
            if server.view is not None:
                server.view.resume()
        for pod in self._promises.pods():
            self._cluster.change_pod(pod.namespace, pod.name, gated=False)
        for node in self._nodes:
            node.register(pod.uid for pod in self._promises.pods())
        await self._network.drain()

    def _generator(self) -> Random:
        return Random(self._random.random())

    def _view(self, process: str) -> View:
        kind = OlderView if process == self._older else View
        return kind(self._cluster, process, self._network, self._generator())

    def _may_part(self, uid: PodUid) -> bool:
        replicas = (server.replica for server in self._servers.values())
        binds = any(one is not None and uid in one.extender.binder.under_way for one in replicas)
        return binds or self._network.may_part(uid)

    # The replicas.

    async def _serve(self, name: str, server: Server) -> None:
        """Run a replica that is killed at any step, and starts again."""
        random = self._generator()
        while True:
            view = server.view = self._view(name)
            life = asyncio.get_running_loop().create_task(self._live(server, view))
            try:
                await self._until_killed(random)
            finally:
                view.is_dead = True
                server.replica = server.view = None
                life.cancel()
                await asyncio.wait([life])
            self.diary.note("replica killed", name)
            await asyncio.sleep(random.choice((0.0, 0.1, 1.0, 10.0)))

    async def _until_killed(self, random: Random) -> None:
        if self._network.calm:
            await asyncio.Event().wait()
        await asyncio.sleep(random.expovariate(1 / self._mix.kill_s))
        await self._loop.after_steps(random.randrange(200))
        if self._network.calm:
            await asyncio.Event().wait()

    async def _live(self, server: Server, view: View) -> None:
        clock = self._loop.time

        def now() -> datetime:
            return EPOCH + timedelta(seconds=clock() + server.clock_s)

        extending = self._settings
        if isinstance(view, OlderView):
            extending = replace(extending, make_room=MakeRoom.OFF)
        async with replica(view, settings=self._controlling, extending=extending, now=now) as one:
            if isinstance(view, OlderView):
                forget_reservations(one)
            server.replica = one
            await asyncio.Event().wait()
