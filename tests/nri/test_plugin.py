"""The plugin: what it reports and answers, and that nothing a runtime does ends it."""

from __future__ import annotations

import asyncio
import logging
from struct import pack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplace.core.cpuset import mask_of
from kvplace.core.scalars import ContainerId, CpuMask, PodUid
from kvplace.nri import plugin as plugin_module
from kvplace.nri.plugin import NriRuntime
from kvplace.nri.values import (
    ContainerUpdate,
    Cpuset,
    Creation,
    NriContainer,
    NriEvent,
    PodSandbox,
    Runtime,
    SandboxId,
)
from tests.nri import wire
from tests.nri.fake_runtime import SUBJECT, FakeRuntime, PluginEnd, container, fake_runtime, pod, updates_in
from tests.nri.recorded_handler import RecordedHandler
from tests.profiles import examples

SHARED = Cpuset(mask_of([0, 1, 2, 7]))
POD = PodSandbox(SandboxId("sandbox-u"), "p", "default", PodUid("u"), {"app": "x"})
CONTAINER = NriContainer(
    id=ContainerId("id-c"),
    sandbox=SandboxId("sandbox-u"),
    name="c",
    mounts=frozenset({"/mnt/0", "/mnt/1", "/mnt/2"}),
    environment=("A=1", "B="),
    cdi_devices=("intel.com/vf=a",),
    cgroup_path="/kubepods/c",
    cpuset=Cpuset(mask_of([0, 1, 2, 3]), CpuMask(0b10)),
)
NO_CONTAINER = NriContainer(ContainerId(""), SandboxId(""), "")


@pytest.mark.usefixtures("plugin")
class TestCalls:
    async def test_it_registers_and_subscribes_to_the_events_of_its_handler(
        self, runtime: FakeRuntime
    ) -> None:
        end = await runtime.plugin()
        assert await end.register() == ("kvplace", "50")
        assert await end.configure() == 1 << 3 | 1 << 5 | 1 << 9

    async def test_the_handler_learns_all_that_exists_and_its_updates_are_the_answer(
        self, runtime: FakeRuntime, handler: RecordedHandler
    ) -> None:
        handler.updates = [ContainerUpdate(ContainerId("id-a"), SHARED)]
        existing = [container("c", cpus="0-3", mems="1", pid=42)]
        _, answer = await runtime.ready_plugin([pod("u")], existing)
        assert handler.calls == [("synchronize", Runtime("containerd", "v2.2.9", 2.0))]
        assert (handler.pods, handler.containers) == ([POD], [CONTAINER])
        assert updates_in(answer) == [("id-a", "0-2,7", "", 1)]
        assert 2 not in wire.fields(answer)

    async def test_a_synchronization_in_parts_is_collected_and_answered_at_its_end(
        self, runtime: FakeRuntime, handler: RecordedHandler
    ) -> None:
        handler.updates = [ContainerUpdate(ContainerId("id-a"), SHARED)]
        end = await runtime.plugin()
        await end.register()
        await end.configure()
        first = await end.synchronize([pod("u"), pod("v")], [container("a")], more=True)
        assert wire.fields(first) == {2: [1]}
        assert handler.calls == []
        last = await end.synchronize([], [container("b")])
        assert updates_in(last)
        assert [found.uid for found in handler.pods] == ["u", "v"]
        assert [found.name for found in handler.containers] == ["a", "b"]

    async def test_a_creation_is_answered_with_cpus_memory_nodes_and_updates_of_others(
        self, runtime: FakeRuntime, handler: RecordedHandler
    ) -> None:
        end, _ = await runtime.ready_plugin()
        handler.creation = Creation(
            Cpuset(mask_of([4, 5]), CpuMask(0b1)), (ContainerUpdate(ContainerId("id-b"), SHARED),)
        )
        answer = await end.call("CreateContainer", SUBJECT)
        assert handler.calls[-1] == ("create", POD, CONTAINER)
        cpu = wire.at(answer, 1, 6, 2, 2)
        assert (wire.at(cpu, 6), wire.at(cpu, 7)) == (b"4-5", b"0")
        assert updates_in(answer, 2) == [("id-b", "0-2,7", "", 1)]

    async def test_a_creation_without_cpus_adjusts_nothing(self, runtime: FakeRuntime) -> None:
        end, _ = await runtime.ready_plugin()
        assert await end.call("CreateContainer", SUBJECT) == b""

    async def test_an_update_shows_the_resources_asked_for_and_is_answered_with_ours(
        self, runtime: FakeRuntime, handler: RecordedHandler
    ) -> None:
        end, _ = await runtime.ready_plugin()
        handler.updates = [ContainerUpdate(ContainerId("id-c"), SHARED)]
        asked = wire.message({2: wire.message({1: wire.message({1: 2048}), 6: "0-7"})})
        answer = await end.call("UpdateContainer", SUBJECT + wire.message({3: asked}))
        assert handler.calls[-1] == ("update", POD, CONTAINER, Cpuset(mask_of(range(8))))
        assert updates_in(answer) == [("id-c", "0-2,7", "", 1)]

    async def test_a_stop_is_answered_with_updates_of_others(
        self, runtime: FakeRuntime, handler: RecordedHandler
    ) -> None:
        end, _ = await runtime.ready_plugin()
        handler.updates = [ContainerUpdate(ContainerId("id-b"), SHARED)]
        assert updates_in(await end.call("StopContainer", SUBJECT)) == [("id-b", "0-2,7", "", 1)]
        assert handler.calls[-1] == ("stop", POD, CONTAINER)

    @pytest.mark.parametrize(
        ("method", "number", "event"),
        [
            ("RunPodSandbox", 1, NriEvent.RUN_POD),
            ("StopPodSandbox", 2, NriEvent.STOP_POD),
            ("RemovePodSandbox", 3, NriEvent.REMOVE_POD),
            ("PostCreateContainer", 5, NriEvent.POST_CREATE),
            ("StartContainer", 6, NriEvent.START),
            ("PostStartContainer", 7, NriEvent.POST_START),
            ("PostUpdateContainer", 9, NriEvent.POST_UPDATE),
            ("RemoveContainer", 11, NriEvent.REMOVE),
        ],
    )
    async def test_an_event_is_the_same_as_a_call_of_its_own_and_as_a_state_change(
        self, runtime: FakeRuntime, handler: RecordedHandler, method: str, number: int, event: NriEvent
    ) -> None:
        end, _ = await runtime.ready_plugin()
        assert await end.call(method, SUBJECT) == b""
        state_change = wire.message({1: number, 2: wire.at(SUBJECT, 1), 3: wire.at(SUBJECT, 2)})
        assert await end.call("StateChange", state_change) == b""
        assert handler.calls[1:] == [("observe", event, POD, CONTAINER)] * 2

    async def test_an_event_of_a_pod_comes_without_a_container(
        self, runtime: FakeRuntime, handler: RecordedHandler
    ) -> None:
        end, _ = await runtime.ready_plugin()
        await end.call("RemovePodSandbox", wire.message({1: pod("u")}))
        assert handler.calls[-1] == ("observe", NriEvent.REMOVE_POD, POD, NO_CONTAINER)

    async def test_a_state_change_of_an_event_to_come_is_answered_and_ignored(
        self, runtime: FakeRuntime, handler: RecordedHandler
    ) -> None:
        end, _ = await runtime.ready_plugin()
        assert await end.call("StateChange", wire.message({1: 77, 2: pod("u")})) == b""
        assert await end.call("Shutdown") == b""
        assert len(handler.calls) == 1

    @pytest.mark.parametrize(
        ("service", "method"),
        [
            ("nri.pkg.api.v1alpha1.Plugin", "ValidateContainerAdjustment"),
            ("nri.pkg.api.v1alpha1.Plugin", "events"),
            ("nri.pkg.api.v2.Plugin", "CreateContainer"),
        ],
    )
    async def test_an_unknown_method_is_answered_with_unimplemented(
        self, runtime: FakeRuntime, service: str, method: str
    ) -> None:
        end, _ = await runtime.ready_plugin()
        status = wire.fields(wire.at(await end.response(method, SUBJECT, service), 1))
        assert status[1] == [12]
        assert status[2] == [f"{service}/{method} is not implemented".encode()]

    async def test_a_handler_that_raises_changes_nothing_and_stays_connected(
        self, runtime: FakeRuntime, handler: RecordedHandler, caplog: pytest.LogCaptureFixture
    ) -> None:
        end, _ = await runtime.ready_plugin()
        handler.fails_with = KeyError("a bug")
        assert await end.call("CreateContainer", SUBJECT) == b""
        assert "CreateContainer failed; answered with no change" in caplog.text
        handler.fails_with = None
        await end.call("StopContainer", SUBJECT)
        assert handler.calls[-1][0] == "stop"

    async def test_a_handler_that_is_too_slow_is_answered_for_before_the_runtime_gives_up(
        self, runtime: FakeRuntime, handler: RecordedHandler, caplog: pytest.LogCaptureFixture
    ) -> None:
        end = await runtime.plugin()
        await end.register()
        await end.configure(request_ms=100)
        await end.synchronize()
        handler.blocked = asyncio.Event()
        assert await end.call("CreateContainer", SUBJECT) == b""
        assert "no decision on CreateContainer within 0.075 s" in caplog.text

    async def test_calls_are_handled_in_their_order_one_after_the_other(
        self, runtime: FakeRuntime, handler: RecordedHandler
    ) -> None:
        end, _ = await runtime.ready_plugin()
        handler.blocked = asyncio.Event()
        for stream, method in (97, "CreateContainer"), (99, "RemovePodSandbox"):
            request = wire.message({1: "nri.pkg.api.v1alpha1.Plugin", 2: method, 3: SUBJECT})
            end.send(wire.frames(wire.PLUGIN, wire.ttrpc(stream, wire.REQUEST, request)))
        await handler.reached("create begins")
        handler.blocked.set()
        assert [(await end.message(wire.PLUGIN))[0] for _ in range(2)] == [97, 99]
        steps = [handler.steps.get_nowait() for _ in range(handler.steps.qsize())]
        assert steps == ["create ends", "observe begins", "observe ends"]


@pytest.mark.usefixtures("plugin")
class TestBadRuntimes:
    """Each of them is configured to the handler once and followed by a new connection that works."""

    async def _next_connection_works(self, runtime: FakeRuntime, handler: RecordedHandler) -> None:
        end, _ = await runtime.ready_plugin()
        await end.call("CreateContainer", SUBJECT)
        assert handler.calls[-1] == ("create", POD, CONTAINER)

    @pytest.mark.parametrize(
        ("junk", "reason"),
        [
            (b"\x16\x03\x01" * 100, "sent a frame of"),
            (pack(">II", 1, 2**32 - 1), "sent a frame of 4294967295 bytes"),
            (wire.frames(1, pack(">IIBB", 5 << 20, 1, 1, 0)), "sent a message of 5242880 bytes"),
            (wire.frames(1, wire.ttrpc(1, 3, b"")), "sent a message of type 3"),
            (wire.frames(1, wire.ttrpc(1, 1, b"\xff\xff\xff")), "3 bytes that are not a Request"),
            (wire.frames(1, wire.ttrpc(1, 2, b"")), "sent a RESPONSE on connection 1"),
            (wire.frames(2, wire.ttrpc(1, 1, b"")), "sent a REQUEST on connection 2"),
        ],
    )
    async def test_junk_ends_the_connection(
        self, runtime: FakeRuntime, handler: RecordedHandler, junk: bytes, reason: str
    ) -> None:
        end, _ = await runtime.ready_plugin()
        end.send(junk)
        assert reason in str(await handler.gone.get())
        await self._next_connection_works(runtime, handler)

    async def test_a_call_with_a_payload_that_is_not_a_message_ends_the_connection(
        self, runtime: FakeRuntime, handler: RecordedHandler
    ) -> None:
        end, _ = await runtime.ready_plugin()
        request = wire.message({1: "nri.pkg.api.v1alpha1.Plugin", 2: "CreateContainer", 3: b"\x0a\xff"})
        end.send(wire.frames(wire.PLUGIN, wire.ttrpc(99, wire.REQUEST, request)))
        assert "2 bytes that are not a ContainerRequest" in str(await handler.gone.get())
        await self._next_connection_works(runtime, handler)

    async def test_half_a_frame_and_the_end(self, runtime: FakeRuntime, handler: RecordedHandler) -> None:
        end, _ = await runtime.ready_plugin()
        end.send(wire.frames(1, wire.ttrpc(1, 1, b"abc"))[:-2])
        end.hang_up()
        assert str(await handler.gone.get()) == "the NRI runtime closed the connection"
        await self._next_connection_works(runtime, handler)

    async def test_a_runtime_that_refuses_the_registration(
        self, runtime: FakeRuntime, handler: RecordedHandler
    ) -> None:
        end = await runtime.plugin()
        await end.take_call({1: wire.message({1: 2, 2: "invalid plugin index"})})
        assert str(await handler.gone.get()) == "the NRI runtime answered with error 2: invalid plugin index"
        await self._next_connection_works(runtime, handler)

    async def test_a_runtime_that_disconnects_before_it_has_answered(
        self, runtime: FakeRuntime, handler: RecordedHandler
    ) -> None:
        (await runtime.plugin()).hang_up()
        assert "NRI runtime" in str(await handler.gone.get())
        await self._next_connection_works(runtime, handler)

    async def test_a_runtime_that_disconnects_while_a_handler_works(
        self, runtime: FakeRuntime, handler: RecordedHandler
    ) -> None:
        end, _ = await runtime.ready_plugin()
        handler.blocked = asyncio.Event()
        request = wire.message({1: "nri.pkg.api.v1alpha1.Plugin", 2: "CreateContainer", 3: SUBJECT})
        end.send(wire.frames(wire.PLUGIN, wire.ttrpc(99, wire.REQUEST, request)))
        await handler.reached("create begins")
        end.hang_up()
        handler.blocked.set()
        handler.blocked = None
        await handler.gone.get()
        await self._next_connection_works(runtime, handler)

    @pytest.mark.parametrize("step", ["register", "configure", "synchronize"])
    async def test_a_runtime_that_never_answers_is_left_after_a_time(
        self, runtime: FakeRuntime, handler: RecordedHandler, step: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(plugin_module, "HANDSHAKE_TIMEOUT_S", 0.2)
        runtime.hang_up_all()  # the one that has the old timeout
        await handler.gone.get()
        await runtime.plugin()
        end = await runtime.plugin()
        if step != "register":
            await end.register()
        if step == "synchronize":
            await end.configure()
        assert "0.2 s" in str(await handler.gone.get())

    async def test_more_containers_than_any_node_has_are_not_collected(
        self, runtime: FakeRuntime, handler: RecordedHandler, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(plugin_module, "MAX_SYNCHRONIZED", 3)
        end = await runtime.plugin()
        await end.register()
        await end.configure()
        await end.synchronize([], [container("a"), container("b")], more=True)
        request = {1: "nri.pkg.api.v1alpha1.Plugin", 2: "Synchronize"}
        payload = wire.message({2: [container("c"), container("d")]})
        body = wire.message({**request, 3: payload})
        end.send(wire.frames(wire.PLUGIN, wire.ttrpc(99, wire.REQUEST, body)))
        assert "announced more than 3" in str(await handler.gone.get())

    async def test_an_answer_that_comes_too_late_or_to_nothing_is_ignored(
        self, runtime: FakeRuntime, handler: RecordedHandler
    ) -> None:
        end, _ = await runtime.ready_plugin()
        end.send(wire.frames(wire.RUNTIME, wire.ttrpc(4711, wire.RESPONSE, b"")))
        await end.call("CreateContainer", SUBJECT)
        assert handler.gone.empty()


class TestReconnecting:
    async def test_it_waits_for_a_runtime_and_reports_it_once(
        self, handler: RecordedHandler, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with fake_runtime() as runtime:
            await runtime.stop()
            task = asyncio.create_task(NriRuntime(runtime.socket).run(handler))
            for _ in range(3):
                assert "no NRI runtime answers at" in str(await handler.gone.get())
            assert caplog.text.count("no NRI runtime answers at") == 1
            await runtime.start()
            await runtime.ready_plugin()
            assert handler.calls[-1][0] == "synchronize"
            task.cancel()
            await asyncio.wait([task])

    async def test_pauses_grow_up_to_2_seconds_and_start_anew_after_a_connection(
        self, handler: RecordedHandler
    ) -> None:
        pauses: list[float] = []
        connected = asyncio.Event()

        async def pause(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 7:
                await runtime.start()
            if len(pauses) == 8:
                connected.set()
                await asyncio.Event().wait()

        async with fake_runtime() as runtime:
            await runtime.stop()
            task = asyncio.create_task(NriRuntime(runtime.socket, pause).run(handler))
            end, _ = await runtime.ready_plugin()
            end.hang_up()
            await connected.wait()
            task.cancel()
            await asyncio.wait([task])
        assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 0.1]


class TestAnyBytes:
    @settings(max_examples=examples(60))
    @given(junk=st.lists(st.binary(max_size=200), max_size=8), framed=st.booleans())
    async def test_whatever_a_runtime_sends_the_plugin_answers_or_hangs_up(
        self, junk: list[bytes], framed: bool
    ) -> None:
        async with fake_runtime() as runtime:
            handler = RecordedHandler()
            task = asyncio.create_task(NriRuntime(runtime.socket).run(handler))
            end, _ = await runtime.ready_plugin()
            for data in junk:
                end.send(wire.frames(1, wire.ttrpc(1, 1, data)) if framed else data)
            await _drained(end)
            end.hang_up()
            await handler.gone.get()
            assert not task.done()
            task.cancel()
            await asyncio.wait([task])


async def _drained(end: PluginEnd) -> None:
    try:
        await end.writer.drain()
    except ConnectionError:
        logging.getLogger(__name__).debug("the plugin hung up")
