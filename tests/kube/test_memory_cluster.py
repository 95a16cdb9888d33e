"""The in-memory cluster under random histories: replicas with stale views, foreign writers, lost pasts.

The machine keeps a book of its own about what was granted and compares: no CPU has two owners, what a
replica got is what is stored, and every watcher ends with the state that the cluster has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from kvplace.core.errors import Conflict, Refused, Unavailable
from kvplace.core.ledger import (
    Ledger,
    LedgerChange,
    OwnershipConflict,
    ledger_document,
    merge_patch,
    read_ledger,
)
from kvplace.core.scalars import NodeName, PodUid
from kvplace.kube.memory_objects import ObjectLog
from kvplace.kube.object_records import LedgerRecord, PodRecord
from kvplace.kube.store import Store
from kvplace.kube.watches import LEDGERS, PLACED_PODS, PODS, ApiKind, Apply, Init, InitApply, InitDone, Kind
from tests.kube.example_claims import claim, taking
from tests.kube.faults import Moment, Operation
from tests.kube.faulty_cluster import FaultyCluster
from tests.kube.ledger_strategies import changes, ledgers, merged
from tests.profiles import examples

T = TypeVar("T")
NODES = (NodeName("one"), NodeName("two"))


class Replicas(RuleBasedStateMachine):
    """Several replicas of kvplace, each with views of its own age, on one cluster."""

    views = Bundle("views")
    pods = Bundle("pods")

    @initialize()
    def start(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.cluster = FaultyCluster()
        self.ledger_store: Store[NodeName, LedgerRecord] = Store(LEDGERS)
        self.pod_store: Store[PodUid, PodRecord] = Store(PODS, PLACED_PODS)
        self.followers = [
            self.loop.create_task(store.run(self.cluster)) for store in (self.ledger_store, self.pod_store)
        ]
        self.granted: dict[str, Ledger] = {node: Ledger() for node in NODES}
        self.documents: dict[str, Any] = {node: ledger_document(Ledger()) for node in NODES}
        self.bound: dict[str, str] = {}
        self.count = 0
        for node in NODES:
            self.wait(self.cluster.create_ledger(node))

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.wait(self.cluster.close())
            self.wait(asyncio.gather(*self.followers))
            self.loop.close()

    def wait(self, what: Coroutine[Any, Any, T] | asyncio.Future[T]) -> T:
        return self.loop.run_until_complete(what)

    @rule(target=views, node=st.sampled_from(NODES))
    def read(self, node: NodeName) -> LedgerRecord:
        record = self.wait(self.cluster.read_ledger(node))
        assert record is not None
        assert record.ledger == self.granted[node]
        return record

    @rule(target=views, view=views, change=changes)
    def write(self, view: LedgerRecord, change: LedgerChange) -> Any:
        node = view.node
        fresh = view.ledger == self.granted[node]
        patch = merge_patch(view.ledger, change)
        try:
            written = self.wait(self.cluster.write_ledger(view, change))
        except OwnershipConflict:
            with pytest.raises(OwnershipConflict):
                self.granted[node].after(change)
            return multiple()
        except Conflict:
            return multiple()
        assert fresh, "a stale view was written"
        self.granted[node] = self.granted[node].after(change)
        self.documents[node] = merged(self.documents[node], patch)
        assert written.ledger == self.granted[node]
        return written

    @rule(target=views, view=views, change=changes, lost=st.sampled_from(Moment))
    def write_and_lose_the_answer(self, view: LedgerRecord, change: LedgerChange, lost: Moment) -> Any:
        self.cluster.faults.fail(Operation.WRITE_LEDGER, Unavailable("timeout"), moment=lost)
        try:
            with pytest.raises(Unavailable):
                self.wait(self.cluster.write_ledger(view, change))
        except Conflict:
            return multiple()
        if lost is Moment.AFTER:
            self.granted[view.node] = self.granted[view.node].after(change)
            self.documents[view.node] = merged(self.documents[view.node], merge_patch(view.ledger, change))
        return self.read(view.node)

    @rule(node=st.sampled_from(NODES), ledger=ledgers())
    def somebody_else_puts_a_ledger(self, node: NodeName, ledger: Ledger) -> None:
        before = self.granted[node].owners
        hands_over = any(before.get(cpu, owner) != owner for cpu, owner in ledger.owners.items())
        try:
            self.cluster.put_ledger(node, ledger)
        except OwnershipConflict:
            assert hands_over
        else:
            assert not hands_over
            self.granted[node], self.documents[node] = ledger, ledger_document(ledger)

    @rule(target=pods)
    def a_pod_arrives(self) -> tuple[str, PodUid]:
        self.count += 1
        name = f"pod-{self.count}"
        return name, self.cluster.create_pod(name, request="{}").uid

    @rule(pod=pods, node=st.sampled_from(NODES), lost=st.booleans())
    def bind(self, pod: tuple[str, PodUid], node: NodeName, lost: bool) -> None:
        name, uid = pod
        if lost:
            self.cluster.faults.fail(Operation.BIND, Unavailable("timeout"), moment=Moment.AFTER)
        try:
            self.wait(self.cluster.bind("default", name, uid, node, {"cpu-map": node}))
        except Conflict:
            assert uid in self.bound
        except Refused:
            assert self.wait(self.cluster.read_pod("default", name)) is None
        except Unavailable:
            assert lost
            self.bound[uid] = node
        else:
            assert uid not in self.bound
            self.bound[uid] = node
        self.forget_faults()

    @rule(pod=pods)
    def delete_pod(self, pod: tuple[str, PodUid]) -> None:
        try:
            self.cluster.delete_pod("default", pod[0], force=True)
        except Refused:
            assert self.wait(self.cluster.read_pod("default", pod[0])) is None
        self.bound.pop(pod[1], None)

    @rule(kind=st.sampled_from([PODS, LEDGERS]), what=st.sampled_from(["compact", "drop", "pause", "resume"]))
    def watches_have_a_bad_day(self, kind: Any, what: str) -> None:
        do = {
            "compact": self.cluster.compact,
            "drop": self.cluster.drop_watches,
            "pause": self.cluster.pause_watches,
            "resume": self.cluster.resume_watches,
        }
        do[what](kind)

    @rule()
    def everybody_catches_up(self) -> None:
        for kind in (PODS, LEDGERS):
            self.cluster.resume_watches(kind)
        self.wait(self.settle())
        stored = {node: self.wait(self.cluster.read_ledger(node)) for node in NODES}
        assert dict(self.ledger_store.records) == stored
        assert {uid: pod.node for uid, pod in self.pod_store.records.items() if pod.node} == self.bound

    async def settle(self) -> None:
        """Let the followers run until they have nothing left to read."""
        for _ in range(3):
            await asyncio.sleep(0)

    def forget_faults(self) -> None:
        self.cluster.faults = type(self.cluster.faults)()

    @invariant()
    def no_cpu_is_owned_twice(self) -> None:
        if not hasattr(self, "granted"):
            return
        for node in NODES:
            record = self.wait(self.cluster.read_ledger(node))
            assert record is not None
            record.ledger.check()
            assert record.ledger == self.granted[node]
            assert read_ledger(self.documents[node]) == record.ledger


TestReplicas = Replicas.TestCase
TestReplicas.settings = settings(max_examples=examples(50), stateful_step_count=25, deadline=None)


async def test_a_write_can_be_held_while_another_overtakes_it() -> None:
    cluster = FaultyCluster()
    record = await cluster.create_ledger(NodeName("one"))
    hold = cluster.faults.hold(Operation.WRITE_LEDGER)
    slow = asyncio.create_task(cluster.write_ledger(record, taking(claim("slow", 1))))
    await hold.reached.wait()
    await cluster.write_ledger(record, taking(claim("quick", 1)))
    hold.release()
    with pytest.raises(Conflict):
        await slow
    assert cluster.faults.pending == 0


async def test_the_third_call_fails_when_the_script_reports_it() -> None:
    cluster = FaultyCluster()
    cluster.faults.fail(Operation.CREATE_LEDGER, Unavailable("no"), nth=3)
    await cluster.create_ledger(NodeName("one"))
    await cluster.create_ledger(NodeName("two"))
    with pytest.raises(Unavailable):
        await cluster.create_ledger(NodeName("three"))
    assert await cluster.read_ledger(NodeName("three")) is None
    assert (await cluster.create_ledger(NodeName("three"))).node == "three"


async def test_a_paused_watch_shows_an_old_world_until_it_resumes() -> None:
    cluster = FaultyCluster()
    store = Store(PODS, PLACED_PODS)
    follower = asyncio.create_task(store.run(cluster))
    await store.wait_until_synced()
    changed = asyncio.Event()
    store.subscribe(lambda old, new: changed.set())
    cluster.pause_watches(PODS)
    uid = cluster.create_pod("vm", request="{}").uid
    await cluster.bind("default", "vm", uid, NodeName("one"), {})
    assert store.get(uid) is None
    cluster.resume_watches(PODS)
    await changed.wait()
    assert store.get(uid) is not None
    await cluster.close()
    await follower


async def test_a_watch_that_reads_too_slowly_lists_again_and_misses_nothing() -> None:
    log: ObjectLog[str] = ObjectLog(Kind(ApiKind("texts"), lambda text: text, {}), log_limit=4)
    watch = log.watch()
    assert [await anext(watch), await anext(watch)] == [Init(), InitDone()]
    for number in range(8):
        log.put(number % 3, f"v{number}")
    assert [await anext(watch) for _ in range(5)] == [
        Init(),
        InitApply("v6"),
        InitApply("v7"),
        InitApply("v5"),
        InitDone(),
    ]
    log.put(0, "v9")
    assert await anext(watch) == Apply("v9")
    log.close()
    assert [event async for event in watch] == []


async def test_five_hundred_vms_are_bound_without_a_double() -> None:
    """As the demo does it: claim, then bind, in many tasks at once."""
    cluster = FaultyCluster()
    nodes = [f"node-{number}" for number in range(25)]
    for node in nodes:
        await cluster.create_ledger(NodeName(node))

    async def place(number: int) -> None:
        pod = cluster.create_pod(f"vm-{number}", request="{}")
        node = nodes[number % len(nodes)]
        while True:
            record = await cluster.read_ledger(NodeName(node))
            assert record is not None
            free = [cpu for cpu in range(80) if cpu not in record.ledger.owners][:4]
            try:
                await cluster.write_ledger(record, taking(claim(pod.uid, *free)))
            except Conflict:
                continue
            break
        await cluster.bind("default", pod.name, pod.uid, NodeName(node), {"cpu-map": "{}"})

    await asyncio.gather(*(place(number) for number in range(500)))
    for node in nodes:
        record = await cluster.read_ledger(NodeName(node))
        assert record is not None
        record.ledger.check()
        assert len(record.ledger.owners) == 80
