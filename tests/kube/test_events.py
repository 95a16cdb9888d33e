"""The recorder of events: each message once in a while, changed ones at once, and never a flood."""

from __future__ import annotations

import asyncio

import pytest

from kvplace.core.errors import Unavailable
from kvplace.core.scalars import PodUid
from kvplace.kube import events
from kvplace.kube.events import (
    AT_ONCE,
    MESSAGES_PER_PERIOD,
    PERIOD_S,
    EventReason,
    EventRecord,
    EventRecorder,
    pod_reference,
    vmi_reference,
)
from tests.kube.faults import Operation
from tests.kube.faulty_cluster import FaultyCluster

VM = vmi_reference("default", "vm", "uid-vm")
OTHER = vmi_reference("default", "other", "uid-other")


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def cluster() -> FaultyCluster:
    return FaultyCluster()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def recorder(cluster: FaultyCluster, clock: Clock) -> EventRecorder:
    return EventRecorder(cluster, clock=clock)


async def test_an_equal_message_is_written_again_only_after_the_period(
    cluster: FaultyCluster, clock: Clock, recorder: EventRecorder
) -> None:
    for moment in (0.0, 1.0, PERIOD_S - 1.0):
        clock.now = moment
        recorder.record(EventRecord(VM, EventReason.DOES_NOT_FIT, "3 nodes: not enough CPUs"))
    await recorder.finish()
    assert len(cluster.events) == 1
    clock.now = PERIOD_S
    recorder.record(EventRecord(VM, EventReason.DOES_NOT_FIT, "3 nodes: not enough CPUs"))
    await recorder.finish()
    assert cluster.events == [EventRecord(VM, EventReason.DOES_NOT_FIT, "3 nodes: not enough CPUs")] * 2


async def test_a_changed_message_is_written_at_once_and_the_old_one_is_not_repeated(
    cluster: FaultyCluster, recorder: EventRecorder
) -> None:
    for nodes in (3, 2, 3, 2):
        recorder.record(EventRecord(VM, EventReason.DOES_NOT_FIT, f"{nodes} nodes: not enough CPUs"))
    await recorder.finish()
    assert [event.note for event in cluster.events] == [
        "3 nodes: not enough CPUs",
        "2 nodes: not enough CPUs",
    ]


async def test_objects_and_reasons_are_counted_apart(cluster: FaultyCluster, recorder: EventRecorder) -> None:
    written = [
        EventRecord(VM, EventReason.DOES_NOT_FIT, "same"),
        EventRecord(OTHER, EventReason.DOES_NOT_FIT, "same"),
        EventRecord(VM, EventReason.CORES_OVERLAP, "same"),
    ]
    for event in written:
        recorder.record(event)
    await recorder.finish()
    assert cluster.events == written


async def test_a_pod_of_another_namespace_that_names_a_vm_does_not_use_up_its_messages(
    cluster: FaultyCluster, recorder: EventRecorder
) -> None:
    foreign = vmi_reference("of-a-tenant", VM.name, VM.uid)
    for number in range(MESSAGES_PER_PERIOD + 3):
        recorder.record(EventRecord(foreign, EventReason.DOES_NOT_FIT, f"message {number}"))
    recorder.record(EventRecord(VM, EventReason.DOES_NOT_FIT, "message 0"))
    await recorder.finish()
    assert [event.note for event in cluster.events if event.regarding == VM] == ["message 0"]
    assert len(cluster.events) == MESSAGES_PER_PERIOD + 1


async def test_a_message_that_changes_every_second_does_not_flood(
    cluster: FaultyCluster, clock: Clock, recorder: EventRecorder
) -> None:
    for second in range(int(2 * PERIOD_S)):
        clock.now = float(second)
        recorder.record(EventRecord(VM, EventReason.DOES_NOT_FIT, f"best {second}"))
    recorder.record(EventRecord(OTHER, EventReason.DOES_NOT_FIT, "not held back by the first"))
    await recorder.finish()
    of_vm = [event.note for event in cluster.events if event.regarding == VM]
    first_of_each_period = [start + n for start in (0, int(PERIOD_S)) for n in range(MESSAGES_PER_PERIOD)]
    assert of_vm == [f"best {second}" for second in first_of_each_period]
    assert cluster.events[-1].regarding == OTHER


async def test_an_event_that_is_lost_is_written_at_the_next_equal_one(
    cluster: FaultyCluster, recorder: EventRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.faults.fail(Operation.RECORD_EVENT, Unavailable("busy"))
    for _ in range(3):
        recorder.record(EventRecord(VM, EventReason.DOES_NOT_FIT, "3 nodes: not enough CPUs"))
        await recorder.finish()
    assert len(cluster.events) == 1
    assert "event lost: busy" in caplog.text


async def test_recording_does_not_wait_and_finish_waits_for_all(
    cluster: FaultyCluster, recorder: EventRecorder
) -> None:
    held = cluster.faults.hold(Operation.RECORD_EVENT)
    recorder.record(EventRecord(VM, EventReason.DOES_NOT_FIT, "slow"))
    recorder.record(EventRecord(OTHER, EventReason.DOES_NOT_FIT, "quick"))
    await held.reached.wait()
    finishing = asyncio.create_task(recorder.finish())
    while not cluster.events:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert [event.note for event in cluster.events] == ["quick"]
    assert not finishing.done()
    held.release()
    await finishing
    assert [event.note for event in cluster.events] == ["quick", "slow"]


async def test_a_burst_of_events_leaves_connections_to_others(
    cluster: FaultyCluster, recorder: EventRecorder
) -> None:
    held = [cluster.faults.hold(Operation.RECORD_EVENT, nth=number + 1) for number in range(AT_ONCE)]
    for number in range(3 * AT_ONCE):
        recorder.record(
            EventRecord(vmi_reference("default", "vm", f"uid-{number}"), EventReason.DOES_NOT_FIT, "no room")
        )
    for hold in held:
        await hold.reached.wait()
    for _ in range(5):  # rounds of the loop in which more could be sent
        await asyncio.sleep(0)
    assert cluster.faults.calls[Operation.RECORD_EVENT] == AT_ONCE
    for hold in held:
        hold.release()
    await recorder.finish()
    assert len(cluster.events) == 3 * AT_ONCE


async def test_the_end_does_not_wait_for_an_api_server_that_takes_no_events(
    cluster: FaultyCluster, recorder: EventRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    held = cluster.faults.hold(Operation.RECORD_EVENT)
    recorder.record(EventRecord(VM, EventReason.DOES_NOT_FIT, "slow"))
    await held.reached.wait()
    await recorder.finish(within_s=0.0)
    assert (recorder.unwritten, cluster.events) == (0, [])
    assert "some events are lost" in caplog.text


async def test_remembered_and_waiting_events_are_bounded(
    cluster: FaultyCluster, recorder: EventRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "_REMEMBERED", 3)
    monkeypatch.setattr(events, "_UNWRITTEN", 4)
    for number in range(6):
        recorder.record(
            EventRecord(
                pod_reference("default", f"vm-{number}", PodUid(str(number))),
                EventReason.DOES_NOT_FIT,
                "full",
            )
        )
    await recorder.finish()
    assert [event.regarding.uid for event in cluster.events] == ["0", "1", "2", "3"]
    recorder.record(
        EventRecord(pod_reference("default", "vm-3", PodUid("3")), EventReason.DOES_NOT_FIT, "full")
    )  # remembered
    recorder.record(
        EventRecord(pod_reference("default", "vm-0", PodUid("0")), EventReason.DOES_NOT_FIT, "full")
    )  # forgotten, so written again
    await recorder.finish()
    assert [event.regarding.uid for event in cluster.events[4:]] == ["0"]


def test_every_reason_and_action_is_one_word() -> None:
    for reason in EventReason:
        assert reason.value.isalpha()
        assert reason.value[0].isupper()
        assert reason.action.isalpha()
