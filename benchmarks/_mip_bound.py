"""An upper bound on the VMs that a plan without moves can place, by mixed-integer programming (MIP).

The program assigns each VM to at most one domain of its scope (an L3 group, NUMA node, socket or machine).
Its constraints are a relaxation: each one holds for every possible placement.

* The exclusive VMs inside a domain own at most its free CPUs, and VMs that need whole cores at most its
  free cores.
* All VMs inside a domain use at most the free memory and huge pages of its NUMA nodes.
* A VM goes only to a domain where `place` would put it if it were alone.

The bound can only be too high. The program leaves out how VMs share the parts of a wide domain, the equal
shares of the `spread` scopes, the CPUs of sharing VMs, threads left over on cores of unequal width, and
domains that overlap. A plan that reaches the bound is optimal.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import accumulate
from typing import TYPE_CHECKING

from benchmarks._plots import NotInstalled
from kvplace.core.allocator.available_units import AvailableUnits
from kvplace.core.allocator.layout import ScopeDomain
from kvplace.core.cluster.draft import Draft, DraftNode, Shape, scope_domains, shapes_of
from kvplace.core.cluster.planning import Tally, VmRequest
from kvplace.core.occupant import ClusterNode
from kvplace.core.request import NumaMemory, Request, Smt
from kvplace.core.scalars import Bytes

if TYPE_CHECKING:
    import highspy

_TOLERANCE = 1e-3
"""The solver computes with floats; the true values are integers."""

_LARGEST = 1 << 24
"""Larger coefficients make the solver numerically unstable."""


@dataclass(frozen=True, slots=True)
class MipBound:
    """The solver's result within its time limit."""

    bound: Tally
    """No plan places more VMs, or as many with more vCPUs."""
    finished: bool
    """Whether the program was solved; else the bound is the best one known at the time limit."""
    seconds: float


def mip_bound(
    nodes: Sequence[ClusterNode], requests: Sequence[VmRequest], *, seconds: float = 30.0
) -> MipBound:
    """Bound the VMs that any plan without moves can place; raises NotInstalled without HiGHS."""
    try:
        import highspy
    except ImportError as error:
        raise NotInstalled("highspy", "bench") from error
    began = time.monotonic()
    program = _Program(
        Draft.empty(nodes), shapes_of((vm.request for vm in requests), (vm.closed for vm in requests))
    )
    if program.is_empty:
        return MipBound(Tally(0, 0), True, time.monotonic() - began)
    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    for name, value in {
        "output_flag": False,
        "mip_rel_gap": 0.0,
        "mip_abs_gap": 0.999,  # the objective is a whole number
        "time_limit": max(0.0, seconds - (time.monotonic() - began)),
    }.items():
        solver.setOptionValue(name, value)
    solver.passModel(program.model())
    solver.run()
    status = solver.getModelStatus()
    known = status in (highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kTimeLimit)
    return MipBound(
        program.bound(solver.getInfo().mip_dual_bound if known else math.inf),
        status == highspy.HighsModelStatus.kOptimal,
        time.monotonic() - began,
    )


@dataclass(frozen=True, slots=True)
class _Variable:
    """How many VMs of one shape go to one domain of one node."""

    shape: Shape
    node: int
    domain: ScopeDomain
    numa: frozenset[int]
    cpus: int
    """The fewest CPUs that each of them owns."""
    cores: int
    """The fewest whole cores that each of them owns."""


@dataclass(slots=True)
class _Rows:
    """Constraints as `lowest <= sum <= highest`, each a row of (variable, factor)."""

    highest: list[float] = field(default_factory=list)
    entries: list[list[tuple[int, int]]] = field(default_factory=list)

    def add(self, entries: list[tuple[int, int]], most: int) -> None:
        """Add a row of integers, divided by their greatest common divisor."""
        entries = [(variable, factor) for variable, factor in entries if factor]
        if not entries:
            return
        common = reduce(math.gcd, (factor for _, factor in entries))
        most = max(0, most) // common
        unit = max(1, -(-most // _LARGEST))  # rounding only raises the bound
        self.entries.append([(variable, factor // common // unit) for variable, factor in entries])
        self.highest.append(float(-(-most // unit)))


class _Program:
    def __init__(self, draft: Draft, shapes: Sequence[Shape]) -> None:
        self._vms: dict[Shape, list[int]] = {}
        for vm, shape in enumerate(shapes):
            self._vms.setdefault(shape, []).append(vm)
        self._variables = [
            variable
            for shape in self._vms
            for index, node in enumerate(draft.nodes)
            for variable in _variables(shape, index, node)
        ]
        self._rows = _Rows()
        by_shape: dict[Shape, list[tuple[int, int]]] = {}
        by_node: dict[int, list[int]] = {}
        for number, variable in enumerate(self._variables):
            by_shape.setdefault(variable.shape, []).append((number, 1))
            by_node.setdefault(variable.node, []).append(number)
        for shape, entries in by_shape.items():
            self._rows.add(entries, len(self._vms[shape]))
        for index, numbers in by_node.items():
            self._add_node(draft.nodes[index], numbers)
        self._weight = sum(shape.vcpus for shape in shapes) + 1
        """The value of a VM apart from its vCPUs: more than all vCPUs together."""

    def _add_node(self, node: DraftNode, numbers: list[int]) -> None:
        variables = {self._variables[n].domain.cpus: self._variables[n] for n in numbers}
        for cpus, variable in variables.items():
            inside = [n for n in numbers if not self._variables[n].domain.cpus & ~cpus]
            free, cores = (node.free.cpus & cpus).bit_count(), _whole_cores(node, variable.domain)
            self._rows.add([(n, self._variables[n].cpus) for n in inside], free)
            self._rows.add([(n, self._variables[n].cores) for n in inside], cores)
        for numa in {variable.numa for variable in variables.values()}:
            inside = [n for n in numbers if self._variables[n].numa <= numa]
            self._add_memory(node, numa, inside)

    def _add_memory(self, node: DraftNode, numa: frozenset[int], inside: list[int]) -> None:
        shapes = {n: self._variables[n].shape for n in inside}
        if node.free.memory:
            free = sum(max(0, count) for id_, count in node.free.memory if id_ in numa)
            self._rows.add([(n, shape.memory) for n, shape in shapes.items()], free)
        for size in sorted({size for shape in shapes.values() for size in shape.request.huge_pages}):
            free = sum(max(0, n) for id_, of, n in node.free.huge_pages if id_ in numa and of == size)
            self._rows.add([(n, _pages(shape.request, size)) for n, shape in shapes.items()], free)

    @property
    def is_empty(self) -> bool:
        """Whether no VM fits anywhere, even alone."""
        return not self._variables

    def model(self) -> highspy.HighsLp:
        """Give the program to HiGHS as a matrix in row-wise form."""
        import highspy

        lp = highspy.HighsLp()
        lp.sense_ = highspy.ObjSense.kMaximize
        lp.num_col_, lp.num_row_ = len(self._variables), len(self._rows.entries)
        lp.col_cost_ = [float(self._weight + variable.shape.vcpus) for variable in self._variables]
        lp.col_lower_ = [0.0] * lp.num_col_
        lp.col_upper_ = [float(len(self._vms[variable.shape])) for variable in self._variables]
        lp.integrality_ = [highspy.HighsVarType.kInteger] * lp.num_col_
        lp.row_lower_ = [-highspy.kHighsInf] * lp.num_row_
        lp.row_upper_ = self._rows.highest
        matrix = lp.a_matrix_
        matrix.format_ = highspy.MatrixFormat.kRowwise
        matrix.num_col_, matrix.num_row_ = lp.num_col_, lp.num_row_
        matrix.start_ = [0, *accumulate(len(row) for row in self._rows.entries)]
        matrix.index_ = [variable for row in self._rows.entries for variable, _ in row]
        matrix.value_ = [float(factor) for row in self._rows.entries for _, factor in row]
        return lp

    def bound(self, objective: float) -> Tally:
        """Translate a bound of the objective to VMs and vCPUs."""
        all_vms = sum(map(len, self._vms.values()))
        all_vcpus = self._weight - 1
        if objective >= all_vms * self._weight + all_vcpus:
            return Tally(all_vms, all_vcpus)
        vms, vcpus = divmod(math.floor(objective + _TOLERANCE), self._weight)
        return Tally(vms, vcpus)


def _variables(shape: Shape, index: int, node: DraftNode) -> list[_Variable]:
    found = []
    for domain in scope_domains(node.node.topology, shape.request):
        if node.place_within(shape, domain.cpus) is not None:
            ids = [numa.id for numa in node.node.topology.numa_nodes if numa.cpus & domain.cpus]
            cpus, cores = _least_owned(node, shape.request, domain)
            found.append(_Variable(shape, index, domain, frozenset(ids), cpus, cores))
    return found


def _least_owned(node: DraftNode, request: Request, domain: ScopeDomain) -> tuple[int, int]:
    """The fewest CPUs and whole cores that a VM owns, wherever in the domain it is placed."""
    if not request.owns_cpus:
        return 0, 0
    need = AvailableUnits(node.node.topology, node.free, request).need
    if request.options.smt is Smt.PREFER:
        return need, 0
    widths = {
        core.bit_count()
        for part in domain.parts
        for cell in part.segments
        for core in cell.whole_cores
        if not core & ~node.free.cpus
    }
    if request.options.smt is Smt.ISOLATE:
        return need * min(widths), need
    cores = -(-need // max(widths))
    return (cores * max(widths) if len(widths) == 1 else need), cores


def _whole_cores(node: DraftNode, domain: ScopeDomain) -> int:
    return sum(
        not core & ~node.free.cpus
        for part in domain.parts
        for cell in part.segments
        for core in cell.whole_cores
    )


def _pages(request: Request, size: Bytes) -> int:
    return 0 if request.options.numa_memory is NumaMemory.OFF else request.huge_pages.get(size, 0)
