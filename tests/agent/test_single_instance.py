"""One agent on a node."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.waiting import PATIENCE_S
from kvplace.agent.process import only_instance
from kvplace.core.errors import Misconfigured

HOLD = """
import fcntl, os, sys
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(descriptor, fcntl.LOCK_EX)
os.pwrite(descriptor, b"%d" % os.getpid(), 0)
print("locked", flush=True)
sys.stdin.read()
"""


def _other_agent(lock: Path) -> subprocess.Popen[str]:
    lock.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-c", HOLD, str(lock)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "locked\n"
    return other


def _end(other: subprocess.Popen[str]) -> None:
    other.kill()
    other.communicate()


async def test_a_second_agent_waits_and_names_the_first_until_that_is_killed(tmp_path: Path) -> None:
    lock = tmp_path / "kvplace" / "agent.lock"
    other = _other_agent(lock)
    waits: asyncio.Queue[str] = asyncio.Queue()

    async def second() -> str:
        async with only_instance(lock, waits.put_nowait):
            return lock.read_text()

    task = asyncio.create_task(second())
    assert f"Another agent runs on this node (process {other.pid})" in await waits.get()
    done, _ = await asyncio.wait([task], timeout=0.1)
    assert not done
    _end(other)
    assert await task == str(os.getpid())


async def test_one_that_waits_can_be_ended_and_takes_no_lock_later(tmp_path: Path) -> None:
    lock = tmp_path / "agent.lock"
    other = _other_agent(lock)
    waits: asyncio.Queue[str] = asyncio.Queue()

    async def second() -> None:
        async with only_instance(lock, waits.put_nowait):
            raise AssertionError("the other one has it")

    task = asyncio.create_task(second())
    await waits.get()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    _end(other)
    async with asyncio.timeout(PATIENCE_S), only_instance(lock, waits.put_nowait):
        pass


async def test_the_only_agent_does_not_wait(tmp_path: Path) -> None:
    waits: list[str] = []
    for _ in range(2):
        async with only_instance(tmp_path / "run" / "agent.lock", waits.append):
            assert (tmp_path / "run" / "agent.lock").read_text() == str(os.getpid())
    assert waits == []


async def test_a_lock_that_cannot_be_made_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Misconfigured, match=r"file/agent\.lock cannot be opened"):
        async with only_instance(tmp_path / "file" / "agent.lock", print):
            pass


async def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "agent.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Misconfigured):
        async with only_instance(tmp_path / "agent.lock", print):
            pass
    assert not (tmp_path / "elsewhere").exists()
