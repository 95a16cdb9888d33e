"""The threads of the agent's own container, where its cgroup may not be written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvplace.core.scalars import CpuMask
from kvplace.linux import threads
from kvplace.linux.threads import Tid, set_own_threads


def test_a_process_that_ends_meanwhile_does_not_keep_the_others_from_being_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel has no folder of it any more, or no process behind the folder."""
    ended = {2**22 + 1: ProcessLookupError(3, "No such process"), 2**22 + 2: FileNotFoundError()}
    (tmp_path / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in (*ended, os.getpid())))
    listed = Path.iterdir

    def tasks(folder: Path) -> Iterator[Path]:
        if error := ended.get(int(folder.parent.name)):
            raise error
        return listed(folder)

    seen: dict[int, int] = {}
    monkeypatch.setattr(Path, "iterdir", tasks)
    monkeypatch.setattr(threads, "set_affinity", lambda tid, cpus: seen.update({tid: cpus}))
    assert set_own_threads(tmp_path, CpuMask(1), os.getpid())
    assert seen[Tid(os.getpid())] == 1
