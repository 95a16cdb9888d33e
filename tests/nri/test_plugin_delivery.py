"""The courier: carries updates in the answer to Synchronize, and hangs up once the runtime has them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from kvplace.core.cpuset import mask_of
from kvplace.core.errors import Unavailable
from kvplace.nri import plugin as plugin_module
from kvplace.nri.plugin import MAX_UPDATES, NriRuntime
from kvplace.nri.values import ContainerUpdate, Cpuset, NriContainer
from tests.nri import wire
from tests.nri.fake_runtime import SUBJECT, FakeRuntime, PluginEnd, container, updates_in

UNIMPLEMENTED = {1: wire.message({1: 12, 2: "no such method"})}


def _update_all(containers: Sequence[NriContainer]) -> list[ContainerUpdate]:
    return [ContainerUpdate(found.id, Cpuset(mask_of([3]))) for found in containers]


async def _hung_up(end: PluginEnd) -> None:
    assert await end.reader.read() == b""


async def test_it_carries_the_chosen_updates_of_existing_containers_and_hangs_up(
    runtime: FakeRuntime,
) -> None:
    def choose(containers: Sequence[NriContainer]) -> list[ContainerUpdate]:
        return [
            ContainerUpdate(found.id, Cpuset(mask_of([3])))
            for found in containers
            if found.cpuset.cpus != mask_of([3])
        ]

    delivery = asyncio.create_task(NriRuntime(runtime.socket).deliver(choose))
    end = await runtime.plugin()
    assert await end.register() == ("kvplace-courier", "99")
    assert await end.configure() == 1 << 2
    answer = await end.synchronize([], [container("a"), container("b", cpus="3"), container("c", cpus="2")])
    assert updates_in(answer) == [("id-a", "3", "", 1), ("id-c", "3", "", 1)]
    await end.take_call(UNIMPLEMENTED)
    await delivery
    await _hung_up(end)


async def test_it_stays_until_the_runtime_shows_that_it_has_read_the_answer(runtime: FakeRuntime) -> None:
    delivery = asyncio.create_task(NriRuntime(runtime.socket).deliver(_update_all))
    end, _ = await runtime.ready_plugin([], [container("a")])
    done, _ = await asyncio.wait([delivery], timeout=0.1)
    assert not done
    await end.take_call(UNIMPLEMENTED)
    await delivery


async def test_it_never_adjusts_a_container_that_is_created_meanwhile(runtime: FakeRuntime) -> None:
    delivery = asyncio.create_task(NriRuntime(runtime.socket).deliver(_update_all))
    end, _ = await runtime.ready_plugin([], [container("a")])
    assert await end.call("CreateContainer", SUBJECT) == b""
    assert await end.call("UpdateContainer", SUBJECT) == b""
    assert await end.call("StopContainer", SUBJECT) == b""
    await end.take_call(UNIMPLEMENTED)
    await delivery


async def test_one_connection_carries_50_updates_at_most(runtime: FakeRuntime) -> None:
    delivery = asyncio.create_task(NriRuntime(runtime.socket).deliver(_update_all))
    end, answer = await runtime.ready_plugin([], [container(f"c{number}") for number in range(120)])
    assert len(updates_in(answer)) == MAX_UPDATES == 50
    await end.take_call(UNIMPLEMENTED)
    await delivery


async def test_a_runtime_that_is_not_there_is_an_error_that_names_the_socket(runtime: FakeRuntime) -> None:
    await runtime.stop()
    with pytest.raises(Unavailable, match=f"no NRI runtime answers at {runtime.socket}"):
        await NriRuntime(runtime.socket).deliver(_update_all)
    await runtime.start()


async def test_a_runtime_that_disconnects_is_an_error(runtime: FakeRuntime) -> None:
    delivery = asyncio.create_task(NriRuntime(runtime.socket).deliver(_update_all))
    end, _ = await runtime.ready_plugin([], [container("a")])
    end.hang_up()
    with pytest.raises(Unavailable, match="closed the connection"):
        await delivery


async def test_a_runtime_that_never_answers_is_an_error_in_the_end(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin_module, "_DELIVERY_TIMEOUT_S", 0.1)
    with pytest.raises(Unavailable, match=r"within 0\.1 s"):
        await NriRuntime(runtime.socket).deliver(_update_all)
