"""Stories notice what they are there to notice: kvplace is broken on purpose, and a promise breaks."""

from __future__ import annotations

import re

import pytest

from tests.profiles import IN_FULL
from tests.protocol.mutations import (
    DEVICE_MUTATIONS,
    DRA_MUTATIONS,
    MUTATIONS,
    NODES_MUTATIONS,
    PREEMPTION_MUTATIONS,
    ROOM_MUTATIONS,
)
from tests.protocol.replay import run
from tests.protocol.run_kind import Kind

STORIES = 1500
"""Most are noticed within thirty, the last ones within some two hundred: which, changes with the code."""


TRIED = list(MUTATIONS) if IN_FULL else ["bind-without-the-cores"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", TRIED)
def test_a_mistake_breaks_a_promise(name: str) -> None:
    kinds = {
        Kind.ROOM: ROOM_MUTATIONS,
        Kind.NODES: NODES_MUTATIONS,
        Kind.DEVICES: DEVICE_MUTATIONS,
        Kind.PREEMPTION: PREEMPTION_MUTATIONS,
        Kind.DRA: DRA_MUTATIONS,
    }
    flags = [f"--{kind.value}" for kind, names in kinds.items() if name in names]
    answer = run("--mutation", name, "--count", str(STORIES), *flags)
    assert answer.returncode == 1, f"{STORIES} stories do not notice: {name}"
    assert re.search(r"^story \d+: ([1267]|M|P|D): ", answer.stderr, re.MULTILINE), answer.stderr
