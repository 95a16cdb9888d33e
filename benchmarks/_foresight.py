"""How few VMs would have to be split if all arrivals and departures were known beforehand.

A mixed-integer programme for one load on one machine of equal NUMA nodes, without moves. Every VM lies whole
on one node or is split, in any parts and over any nodes; at every arrival no node holds more than it has.
Parts may be fractions of CPUs, so the answer is a bound that may be too good, never too bad.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks._plots import NotInstalled
from kvplace.simulate.scenario import Arrival, LoadEvent, SimulatedVm


@dataclass(frozen=True, slots=True)
class Foresight:
    """The fewest VMs that have to be split."""

    split: int
    """By the best plan that was found."""
    at_least: int
    """Below this no plan can be; the same as `split` when the solver finished in its time."""


def fewest_split(events: Sequence[LoadEvent], node_cpus: Sequence[int], *, seconds: float) -> Foresight:
    """Solve one load; raises NotInstalled when the solver is not there."""
    try:
        import highspy
    except ImportError as error:
        raise NotInstalled("highspy", "bench") from error
    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    solver.silent()
    solver.setOptionValue("time_limit", seconds)
    solver.setOptionValue("threads", 1)
    vms = [event.vm for event in events if isinstance(event, Arrival)]
    whole = {vm.id: [solver.addBinary() for _ in node_cpus] for vm in vms}
    split = {vm.id: solver.addBinary() for vm in vms}
    parts = {vm.id: [solver.addVariable(0, min(size, vm.request.vcpus)) for size in node_cpus] for vm in vms}
    for vm in vms:
        solver.addConstr(solver.qsum(whole[vm.id]) + split[vm.id] == 1)
        solver.addConstr(solver.qsum(parts[vm.id]) == vm.request.vcpus * split[vm.id])
    for running in _fullest(events):
        for node, size in enumerate(node_cpus):
            used = [vm.request.vcpus * whole[vm.id][node] + parts[vm.id][node] for vm in running]
            solver.addConstr(solver.qsum(used) <= size)
    solver.minimize(solver.qsum(split.values()))
    found = solver.getInfo()
    return Foresight(round(found.objective_function_value), _rounded_up(found.mip_dual_bound))


def _fullest(events: Sequence[LoadEvent]) -> list[list[SimulatedVm]]:
    """The VMs that run just before each departure, and at the end: other moments have fewer VMs."""
    running: dict[str, SimulatedVm] = {}
    moments = []
    grown = False
    for event in events:
        if isinstance(event, Arrival):
            running[event.vm.id] = event.vm
        else:
            if grown:
                moments.append(list(running.values()))
            del running[event.vm.id]
        grown = isinstance(event, Arrival)
    return [*moments, list(running.values())]


def _rounded_up(bound: float) -> int:
    return max(0, int(-(-(bound - 1e-6) // 1)))
