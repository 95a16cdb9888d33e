"""The machines as a fixture; one runs at a time, and tests that want the same one share it.

@on_machines(TWO_SOCKETS, (FOUR_NODES, Kernel.V6_12))
def test_something(machine: EmulatedMachine) -> None: ...
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.emulated_machine.kernels import FetchFailed, Kernel, NoMachineHere, fetched
from harness.emulated_machine.machine import EmulatedMachine, emulated_machine
from harness.emulated_machine.shape import Shape

Wanted = Shape | tuple[Shape, Kernel]


def on_machines(*wanted: Wanted) -> pytest.MarkDecorator:
    """Run a test on each of these machines, with the older kernel where none is named.

    The marker lets `-m 'not emulated'` leave the test out.
    """
    machines = [(each, Kernel.V6_1) if isinstance(each, Shape) else each for each in wanted]
    params = [
        pytest.param((shape, kernel), id=f"{shape.name}-{kernel.name}", marks=pytest.mark.emulated)
        for shape, kernel in machines
    ]
    return pytest.mark.parametrize("machine", params, indirect=True, scope="session")


@pytest.fixture(scope="session")
def machine(request: pytest.FixtureRequest) -> Iterator[EmulatedMachine]:
    """Boot the machine that `on_machines` names; each test puts its changes back."""
    shape, kernel = request.param
    try:
        fetched(kernel)
    except (NoMachineHere, FetchFailed) as reason:
        pytest.skip(f"no emulated machine: {reason}")
    with emulated_machine(shape, kernel) as running:
        yield running
