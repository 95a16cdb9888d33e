"""Moving memory between NUMA nodes; that it moves is tested on emulated machines with several."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvplace.core.scalars import NumaId
from kvplace.linux.kernel_files import Gone, KernelError, NotPermitted
from kvplace.linux.numa_memory import migrate_memory

NODE = NumaId(0)


@pytest.fixture
def ended() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_a_process_whose_memory_is_where_it_should_be_keeps_it() -> None:
    assert migrate_memory(os.getpid(), [NODE], [NODE]) == 0


def test_without_sources_or_targets_nothing_is_asked_of_the_kernel(ended: int) -> None:
    assert migrate_memory(ended, [], [NODE]) == migrate_memory(ended, [NODE], []) == 0


def test_a_process_that_has_ended_is_gone(ended: int) -> None:
    with pytest.raises(Gone, match=str(ended)):
        migrate_memory(ended, [NODE], [NODE])


def test_a_node_that_the_machine_does_not_have_is_an_error_that_names_it() -> None:
    assert not Path("/sys/devices/system/node/node63").exists()
    with pytest.raises((KernelError, NotPermitted), match="NUMA node 63"):
        migrate_memory(os.getpid(), [NODE], [NumaId(63)])


_AS_NOBODY = """
import os
from kvplace.linux.numa_memory import migrate_memory
os.setuid(65534)
try:
    migrate_memory(1, [0], [0])
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give its rights up for a child")
def test_without_the_right_the_error_names_the_capability() -> None:
    child = subprocess.run([sys.executable, "-c", _AS_NOBODY], capture_output=True, text=True, check=True)
    assert child.stdout.startswith("NotPermitted")
    assert "CAP_SYS_NICE" in child.stdout
