"""The agent notices what changes about its machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from unittest.mock import Mock

import pytest

from harness.waiting import PATIENCE_S
from kvplace.agent import this_machine
from kvplace.agent.this_machine import MachineWatch, ReservedBy, ThisMachine
from kvplace.core.cpuset import parse_cpu_list
from kvplace.service.process import in_background
from tests.agent.hosts import CONFIG, STATE, STATIC_STATE, Host

NEVER_S = 3600.0


class Changes:
    """The reports of a watch."""

    def __init__(self, watch: MachineWatch) -> None:
        self._watch = watch
        self._seen: asyncio.Queue[ThisMachine] = asyncio.Queue()
        watch.subscribe(lambda: self._seen.put_nowait(watch.machine))

    async def next(self) -> ThisMachine:
        async with asyncio.timeout(PATIENCE_S):
            return await self._seen.get()

    @property
    def count(self) -> int:
        return self._seen.qsize()


@contextlib.asynccontextmanager
async def watching(host: Host, every_s: float = 0.02) -> AsyncIterator[Changes]:
    settings = replace(host.settings(), check_machine_every_s=every_s)
    watch = MachineWatch(settings)
    await watch._check()  # the second reading is over before a test changes files
    changes = Changes(watch)
    async with in_background(watch.run()):
        await asyncio.sleep(0)  # the watch has begun
        yield changes


async def test_a_cpu_that_goes_offline_or_comes_back_is_noticed(host: Host) -> None:
    async with watching(host) as changes:
        host.online({0, 1, 2, 3, 4, 5})
        assert (await changes.next()).topology.cpus == parse_cpu_list("0-5")
        host.online(set(range(8)))
        assert (await changes.next()).topology.cpus == parse_cpu_list("0-7")


async def test_huge_pages_and_the_kubelets_files_are_noticed(host: Host) -> None:
    async with watching(host) as changes:
        host.huge_pages(0, 3)
        assert (await changes.next()).topology.numa_nodes[0].huge_pages == {1 << 30: 3}
        host.write(CONFIG, "reservedSystemCPUs: '3,7'")
        assert (await changes.next()).topology.reserved == parse_cpu_list("3,7")
        host.write(STATE, json.dumps(STATIC_STATE))
        assert (await changes.next()).kubelet_cpus.observes_only


async def test_memory_that_is_plugged_in_is_noticed(host: Host) -> None:
    async with watching(host) as changes:
        host.write("sys/devices/system/node/node1/meminfo", "Node 1 MemTotal:       33554432 kB")
        assert (await changes.next()).topology.numa_nodes[1].memory == 32 << 30


async def test_a_machine_that_was_read_while_it_changed_is_read_again_at_the_end_of_the_change(
    host: Host,
) -> None:
    """The kernel lists a CPU as online before it shows its caches."""
    host.online(set(range(7)))
    watch = MachineWatch(host.settings())
    host.online(set(range(8)))
    host.write("sys/devices/system/cpu/cpu7/cache/index3/shared_cpu_list", "7")
    await watch._check()
    assert watch.machine.topology.cpus == parse_cpu_list("0-7")
    host.write("sys/devices/system/cpu/cpu7/cache/index3/shared_cpu_list", "2,3,6,7")
    await watch._check()
    assert watch.machine.topology.l3_groups == (parse_cpu_list("0-1,4-5"), parse_cpu_list("2-3,6-7"))


async def test_a_machine_that_was_half_shown_at_the_start_is_read_again_although_no_file_has_changed(
    host: Host,
) -> None:
    """The kernel's files about caches are not compared."""
    caches = "sys/devices/system/cpu/cpu7/cache/index3/shared_cpu_list"
    host.write(caches, "7")
    watch = MachineWatch(host.settings())
    halves = (parse_cpu_list("0-1,4-5"), parse_cpu_list("2-3,6-7"))
    assert watch.machine.topology.l3_groups != halves
    host.write(caches, "2,3,6,7")
    await watch._check()
    assert watch.machine.topology.l3_groups == halves


async def test_a_machine_that_no_longer_changes_is_not_read_again(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = MachineWatch(host.settings())
    read = Mock(side_effect=this_machine.read_this_machine)
    monkeypatch.setattr(this_machine, "read_this_machine", read)
    for _ in range(3):
        await watch._check()
    assert read.call_count == 1  # whatever was half shown at the start
    host.online({0, 1, 2, 3, 4, 5})
    for _ in range(3):
        await watch._check()
    assert read.call_count == 1 + 2  # the change, and whatever was half shown then


async def test_an_unreadable_machine_is_read_again_and_the_old_one_counts_meanwhile(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    warned = asyncio.Event()
    monkeypatch.setattr(this_machine.log, "warning", lambda *_: warned.set())
    async with watching(host) as changes:
        host.online(set())
        host.write("sys/devices/system/cpu/online", "7-3")
        async with asyncio.timeout(PATIENCE_S):
            await warned.wait()
        assert changes.count == 0
        host.online({0, 1, 2, 3})
        assert (await changes.next()).topology.cpus == parse_cpu_list("0-3")


async def test_files_written_again_with_the_same_content_change_nothing(host: Host) -> None:
    async with watching(host) as changes:
        host.write(CONFIG, "kind: KubeletConfiguration")
        host.online({0, 1, 2, 3, 4, 5})
        assert (await changes.next()).topology.cpus == parse_cpu_list("0-5")
        assert changes.count == 0


async def test_a_change_while_another_agent_still_ran_is_noticed_at_the_start(host: Host) -> None:
    watch = MachineWatch(replace(host.settings(), check_machine_every_s=NEVER_S))
    changes = Changes(watch)
    host.online({0, 1, 2, 3, 4, 5})
    async with in_background(watch.run()):
        assert (await changes.next()).topology.cpus == parse_cpu_list("0-5")


async def test_the_kubelets_state_is_noticed_without_comparing_files(host: Host) -> None:
    host.write(STATE, json.dumps({"policyName": "none", "defaultCpuSet": "", "checksum": 1353318690}))
    async with watching(host, every_s=NEVER_S) as changes:
        written = host.root / f"{STATE}.tmp"
        written.write_text(json.dumps(STATIC_STATE))
        written.rename(host.root / STATE)
        found = (await changes.next()).kubelet_cpus
        assert (found.observes_only, found.held) == (True, parse_cpu_list("2-3,6-7"))


@pytest.mark.parametrize("edited", ["", "reservedSystemCPUs: 5-2", "a: ["])
async def test_while_the_kubelets_configuration_is_edited_its_reserved_cpus_stay(
    host: Host, edited: str
) -> None:
    host.write(CONFIG, "reservedSystemCPUs: '2,6'")
    async with watching(host) as changes:
        host.write(CONFIG, edited)
        found = await changes.next()
        assert found.topology.reserved == parse_cpu_list("2,6")
        assert found.reserved_by is ReservedBy.KUBELET
        (note,) = found.notes
        assert CONFIG in note
        assert note.endswith("; the last readable settings count")
        host.write(CONFIG, "reservedSystemCPUs: '3,7'")
        assert (await changes.next()).topology.reserved == parse_cpu_list("3,7")


async def test_while_an_editor_replaces_the_kubelets_configuration_its_reserved_cpus_stay(
    host: Host,
) -> None:
    """Editors move the old file away before they write the new one."""
    host.write(CONFIG, "reservedSystemCPUs: '2,6'")
    async with watching(host) as changes:
        (host.root / CONFIG).rename(host.root / f"{CONFIG}~")
        found = await changes.next()
        assert found.topology.reserved == parse_cpu_list("2,6")
        assert found.notes == (f"{host.root / CONFIG} does not exist; the last readable settings count",)


async def test_while_the_kubelets_state_is_damaged_the_last_good_one_counts(host: Host) -> None:
    host.write(STATE, json.dumps(STATIC_STATE))
    async with watching(host) as changes:
        host.write(STATE, json.dumps(STATIC_STATE)[:-20])
        found = (await changes.next()).kubelet_cpus
        assert (found.observes_only, found.held) == (True, parse_cpu_list("2-3,6-7"))
        assert found.problem.endswith("; the last one that could be read counts")
        host.write(STATE, json.dumps(STATIC_STATE))
        assert (await changes.next()).kubelet_cpus.problem == ""
