"""A CPU that goes offline, or comes back, is noticed without a restart of the agent."""

from __future__ import annotations

from harness.emulated_machine.fixtures import on_machines
from harness.emulated_machine.machine import EmulatedMachine
from harness.emulated_machine.shape import TWO_SOCKETS
from kvplace.core.cpuset import parse_cpu_list
from tests.emulated_machine.hot_plug import online_sets


@on_machines(TWO_SOCKETS)
def test_a_cpu_that_goes_offline_and_comes_back_is_noticed(machine: EmulatedMachine) -> None:
    without, again = machine.call_within(120, online_sets, 3)
    everything = parse_cpu_list(f"0-{machine.shape.cpus - 1}")
    assert (without, again) == (everything & ~(1 << 3), everything)
