"""Events of the real kernel reach the socket."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvplace.linux.kernel_events import Uevents

CPU = Path("/sys/devices/system/cpu/cpu0/uevent")


@pytest.fixture
def uevents() -> Iterator[Uevents]:
    if os.geteuid() != 0 or not os.access(CPU, os.W_OK):
        pytest.skip("only root can make the kernel repeat an event")
    opened = Uevents()
    yield opened
    opened.close()


def test_an_event_about_a_cpu_names_its_subsystem(uevents: Uevents) -> None:
    CPU.write_text("change\n")
    seen: list[str] = []
    while "cpu" not in seen:
        assert select.select([uevents], [], [], 10)[0], "no event has arrived"
        seen += uevents.subsystems()
    assert list(uevents.subsystems()) == []


def test_events_that_were_lost_are_reported_as_one_of_no_subsystem(uevents: Uevents) -> None:
    for _ in range(2000):  # more than the socket's buffer holds
        CPU.write_text("change\n")
    assert select.select([uevents], [], [], 10)[0]
    assert "" in set(uevents.subsystems())
