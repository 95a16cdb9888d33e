"""Affinities of threads, read and set by system call, distinguished from threads that are gone."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvplace.core.cpuset import bits_of, mask_of
from kvplace.linux import kernel_files
from kvplace.linux.kernel_files import Gone
from kvplace.linux.threads import OutsideCpuset, Tid, affinity_of, set_affinity

MINE = mask_of(os.sched_getaffinity(0))
NO_SUCH_CPU = mask_of([8000])


@pytest.fixture
def sleeper() -> Iterator[Tid]:
    """A process that does nothing."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield Tid(process.pid)
        process.kill()


def test_what_is_set_is_read_back_and_is_what_proc_states(sleeper: Tid) -> None:
    for cpu in bits_of(MINE):
        set_affinity(sleeper, mask_of([cpu]))
        assert affinity_of(sleeper) == mask_of([cpu])
        assert kernel_files.allowed_cpus_of(Path(f"/proc/{sleeper}")) == mask_of([cpu])


def test_one_thread_is_set_and_the_others_stay() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        assert thread.native_id is not None
        first = mask_of(list(bits_of(MINE))[:1])
        set_affinity(Tid(thread.native_id), first)
        assert affinity_of(Tid(thread.native_id)) == first
        assert affinity_of(Tid(os.getpid())) == MINE
    finally:
        stop.set()
        thread.join()


def test_cpus_that_do_not_exist_are_left_out_and_refused_where_there_is_no_other(sleeper: Tid) -> None:
    first = mask_of(list(bits_of(MINE))[:1])
    set_affinity(sleeper, first | NO_SUCH_CPU)
    assert affinity_of(sleeper) == first
    with pytest.raises(OutsideCpuset, match=rf"thread {sleeper} cannot be set to CPU 8000"):
        set_affinity(sleeper, NO_SUCH_CPU)
    assert affinity_of(sleeper) == first


def test_a_thread_that_has_ended_is_gone() -> None:
    with subprocess.Popen(["/bin/true"]) as process:
        process.wait()
    with pytest.raises(Gone, match=f"thread {process.pid}"):
        affinity_of(Tid(process.pid))
    with pytest.raises(Gone, match=f"thread {process.pid}"):
        set_affinity(Tid(process.pid), MINE)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_thread_that_may_not_be_set_is_not_taken_for_one_that_is_gone(sleeper: Tid) -> None:
    program = f"""
import os
from kvplace.linux.threads import affinity_of, set_affinity
from kvplace.linux.kernel_files import NotPermitted
os.setuid(65534)
try:
    set_affinity({sleeper}, affinity_of({sleeper}))
except NotPermitted as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "Operation not permitted; the agent needs CAP_SYS_NICE" in result.stdout
