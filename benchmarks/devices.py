"""VMs with devices beside their cores: kvplace, and the peers under the same VMs.

    python -m benchmarks.devices [--quick] [--seeds 6] [--vms 600]

The machines are one of each type with two sockets that comes with kvplace: 6 machines with 2, 4 or 8 NUMA
nodes. VMs of 2 to 16 CPUs arrive in bursts of up to 4 and end. Together they request 85 % of the CPUs. At
most 40 % of them have devices: 1 or 2 virtual functions (VFs), a GPU, or a GPU and a VF, together at most 75
% of the devices. All ways get the same VMs. A VM that is refused does not arrive again, and no VM moves. The
first fifth of the VMs is not counted.

* *local*: VMs with devices that have a CPU on the NUMA node of each device, in percent of the running ones
* *all cores*: all CPUs of the VM are on NUMA nodes of its devices
* *refused*: VMs with devices that never ran
* *without*: VMs without devices that never ran
* *failed pods*: pods that the kubelet did not admit, for every 100 VMs. Each VM has 3 tries
* *NUMA*, *L3*: VMs without devices on more NUMA nodes or L3 groups than on the empty machine
* *followed*: VMs that got other cores after the kubelet had chosen their devices, before QEMU started

kvplace runs beside a kubelet with the CPU manager policy `none` and the topology manager policy of the row.
The kubelet takes the devices after the bind. It admits the pods of a burst in any order. With `required`, a
VM does not start if its devices are not local and its cores cannot follow them. VMs have the scope `any`.

The other rows are re-implementations (benchmarks/peers). "spread" and "pack" are the scores LeastAllocated
and MostAllocated of CPUs.

* *Topology Manager*: kube-scheduler chooses the machine by its score. Then the kubelet merges the hints of
  its device manager and of its static CPU manager
* *Koordinator joint*: the scheduler merges these hints, MostAllocated
* *DRA devices*: all devices of a VM are in one claim with matchAttribute on the NUMA node, first fit; the
  static CPU manager chooses the CPUs. With CPUs in the same claim, dra-driver-cpu gives CPUs of that node

The last table is about the prediction at the bind, with `preferred` and `pack`. *As predicted* are VMs with
all devices on the NUMA nodes that kvplace knew or predicted. VMs with *unknown* devices got cores on the NUMA
node with most free devices, and *local at first* is the share where this was right. *Remote* are the VMs that
run with a device that is not local.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial

from benchmarks._device_load import LAYOUTS, Burst, Layout, device_load
from benchmarks._device_ways import Dra, Koordinator, Kubelets, Kvplace, Outcome, Way, is_local
from benchmarks._plots import Figure, NotInstalled, legend_beside, write_plot
from benchmarks._tables import table
from benchmarks._traces import nodes_when_empty
from benchmarks.peers.kube_scheduler import least_allocated, most_allocated
from kvplace.core.allocator.set_cover import fewest
from kvplace.core.cluster.node_choice import Strategy
from kvplace.core.device_locality import Certainty
from kvplace.core.request import DeviceNuma
from kvplace.core.scalars import CpuMask
from kvplace.core.topology import Topology
from kvplace.simulate.scenario import Departure, SimulatedVm

TRIES = 3
OFF, PREFERRED, REQUIRED = DeviceNuma.OFF, DeviceNuma.PREFERRED, DeviceNuma.REQUIRED


def kvplace(
    mode: DeviceNuma, policy: str, *, claims: bool = False, strategy: Strategy = Strategy.PACK
) -> Callable[[Layout, int], Way]:
    """Place as kvplace does with a value of `device-numa`, beside a kubelet with a policy."""
    return partial(Kvplace, mode=mode, policy=policy, claims=claims, strategy=strategy)


WAYS: Mapping[str, Callable[[Layout, int], Way]] = {
    "kvplace off, best-effort, pack": kvplace(OFF, "best-effort"),
    "kvplace preferred, best-effort, pack": kvplace(PREFERRED, "best-effort"),
    "kvplace preferred, best-effort, spread": kvplace(PREFERRED, "best-effort", strategy=Strategy.SPREAD),
    "kvplace required, best-effort, pack": kvplace(REQUIRED, "best-effort"),
    "kvplace required, best-effort, spread": kvplace(REQUIRED, "best-effort", strategy=Strategy.SPREAD),
    "kvplace preferred, none, pack": kvplace(PREFERRED, "none"),
    "kvplace required, none, pack": kvplace(REQUIRED, "none"),
    "kvplace preferred, DRA, pack": kvplace(PREFERRED, "none", claims=True),
    "kvplace preferred, DRA, spread": kvplace(PREFERRED, "none", claims=True, strategy=Strategy.SPREAD),
    "kvplace required, DRA, pack": kvplace(REQUIRED, "none", claims=True),
    "kvplace required, DRA, spread": kvplace(REQUIRED, "none", claims=True, strategy=Strategy.SPREAD),
    "Topology Manager best-effort, spread": partial(Kubelets, score=least_allocated, policy="best-effort"),
    "Topology Manager best-effort, pack": partial(Kubelets, score=most_allocated, policy="best-effort"),
    "Topology Manager single-numa-node, spread": partial(
        Kubelets, score=least_allocated, policy="single-numa-node"
    ),
    "Topology Manager single-numa-node, pack": partial(
        Kubelets, score=most_allocated, policy="single-numa-node"
    ),
    "Koordinator joint, best-effort": partial(Koordinator, score=most_allocated, policy="best-effort"),
    "Koordinator joint, single-numa-node": partial(
        Koordinator, score=most_allocated, policy="single-numa-node"
    ),
    "DRA devices, static CPU manager": partial(Dra, score=least_allocated, cpus_too=False),
    "DRA devices and CPUs in one claim": partial(Dra, score=least_allocated, cpus_too=True),
}
"""Every way to place VMs, by the name that tables give it."""
POLICIES = ("none", "best-effort", "restricted", "single-numa-node")
HEADS = ("local", "all cores", "refused", "without", "failed pods", "NUMA", "L3", "followed")


@dataclass(frozen=True, slots=True)
class Trial:
    """One load under one way to place it."""

    layout: Layout
    seed: int
    vms: int
    way: str

    def begin(self) -> Way:
        """Start with empty machines."""
        if self.way in WAYS:
            return WAYS[self.way](self.layout, self.seed)
        return Kvplace(self.layout, self.seed, PREFERRED, self.way)


Counts = Counter[str]


def tried(trial: Trial) -> Counts:
    """Count what becomes of the VMs of one load."""
    way, counts, seen = trial.begin(), Counts(), 0
    for event in device_load(trial.layout, trial.seed, trial.vms):
        if isinstance(event, Departure):
            way.end(event.vm)
            continue
        seen += len(event)
        found = Counts()
        for outcome in started(way, event, found):
            count(outcome, found)
        if seen > trial.vms // 5:
            counts += found
    return counts


def started(way: Way, burst: Burst, counts: Counts) -> list[Outcome]:
    """Create VMs; those with a pod that the kubelet did not admit are created again."""
    outcomes: list[Outcome] = []
    waiting: Sequence[SimulatedVm] = burst
    for number in range(TRIES):
        found = way.start(waiting)
        waiting = [one.vm for one in found if one.pod_failed]
        counts["failed pods"] += len(waiting)
        outcomes += [one for one in found if not one.pod_failed or number == TRIES - 1]
        if not waiting:
            break
    return outcomes


def count(outcome: Outcome, counts: Counts) -> None:
    """Count one VM."""
    topology, cpus = outcome.topology, outcome.cpus
    has_devices = bool(outcome.vm.request.devices)
    counts["VMs"] += 1
    counts["VMs with devices" if has_devices else "VMs without"] += 1
    if topology is None:
        counts["refused" if has_devices else "without refused"] += 1
    elif has_devices:
        counts["running"] += 1
        counts["local"] += is_local(topology, cpus, outcome.devices or {})
        counts["all cores"] += set(topology.nodes_of(CpuMask(cpus))) <= outcome.device_nodes
        counts["followed"] += outcome.corrected
    else:
        counts["running without"] += 1
        groups = sum(1 for l3 in topology.l3_groups if l3 & cpus)
        size = outcome.vm.request.vcpus
        counts["NUMA"] += len(topology.nodes_of(CpuMask(cpus))) > nodes_when_empty(topology, size)
        counts["L3"] += groups > l3_groups_when_empty(topology, size)
    if outcome.certainty is not None and has_devices:
        kind = "foreseen" if outcome.certainty in (Certainty.CERTAIN, Certainty.PREDICTED) else "unknown"
        if outcome.certainty is Certainty.REJECTED:
            kind = "rejected"
        counts[kind] += 1
        counts[f"{kind} as predicted"] += outcome.predicted
        counts[f"{kind} at first"] += outcome.local_at_first
        counts[f"{kind} followed"] += outcome.corrected
        runs = topology is not None
        counts[f"{kind} remote"] += runs and not is_local(topology, cpus, outcome.devices or {})  # type: ignore[arg-type]


@cache
def l3_groups_when_empty(topology: Topology, count: int) -> int:
    """The fewest L3 groups that give so many CPUs when the machine is empty."""
    return fewest([(l3 & topology.allocatable).bit_count() for l3 in topology.l3_groups], count)


Found = Mapping[Trial, Counts]
SHARES = {
    "local": ("local", "running"),
    "all cores": ("all cores", "running"),
    "refused": ("refused", "VMs with devices"),
    "without": ("without refused", "VMs without"),
    "failed pods": ("failed pods", "VMs"),
    "NUMA": ("NUMA", "running without"),
    "L3": ("L3", "running without"),
    "followed": ("followed", "running"),
}
"""Numerator and denominator of the columns."""


def by_seed(found: Found, way: str, column: str, layouts: Iterable[Layout]) -> list[float]:
    """A column in percent, all layouts together, one number for each seed."""
    part, whole = SHARES[column]
    chosen = set(layouts)
    seeds: dict[int, Counts] = {}
    for trial, counts in found.items():
        if trial.way == way and trial.layout in chosen:
            seeds[trial.seed] = seeds.get(trial.seed, Counts()) + counts
    return [100 * one[part] / one[whole] if one[whole] else 0.0 for one in seeds.values()]


def cell(numbers: Sequence[float]) -> str:
    """Write mean and standard deviation; nothing at all is a dash."""
    if not any(numbers):
        return "0"
    deviation = statistics.stdev(numbers) if len(numbers) > 1 else 0.0
    return f"{statistics.mean(numbers):.1f} ± {deviation:.1f}"


def report(found: Found) -> None:
    """Print the tables."""
    for name, layouts in (*((one.name, (one,)) for one in LAYOUTS), ("all together", LAYOUTS)):
        print(f"\n{name}: percent, mean ± standard deviation over seeds")
        rows = [[way, *(cell(by_seed(found, way, column, layouts)) for column in HEADS)] for way in WAYS]
        print(table(["", *HEADS], rows))
    print("\nPrediction with kvplace preferred, VMs of all layouts and seeds together")
    heads = (
        *("VMs", "predicted", "as predicted", "unknown", "local at first", "followed", "remote"),
        "failed pods",
    )
    print(table(["policy of the kubelet", *heads], [predictions(found, policy) for policy in POLICIES]))


def predictions(found: Found, policy: str) -> list[str]:
    """One row of the table of predictions."""
    counts = sum((one for trial, one in found.items() if trial.way == policy), Counts())
    foreseen, unknown = counts["foreseen"], counts["unknown"]
    return [
        policy,
        str(counts["VMs with devices"]),
        str(foreseen),
        percent(counts["foreseen as predicted"], foreseen),
        str(unknown),
        percent(counts["unknown at first"], unknown),
        str(counts["foreseen followed"] + counts["unknown followed"]),
        str(counts["foreseen remote"] + counts["unknown remote"]),
        str(counts["failed pods"]),
    ]


def percent(part: int, whole: int) -> str:
    """Write a share in percent; a dash where there is nothing."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def draw(found: Found, figure: Figure) -> None:
    """Draw for each way which of the VMs with devices are local, remote or refused."""
    names = list(WAYS)[::-1]
    panel = figure.subplots()
    local, refused = [], []
    for way in names:
        refused.append(statistics.mean(by_seed(found, way, "refused", LAYOUTS)))
        share = statistics.mean(by_seed(found, way, "local", LAYOUTS))
        local.append(share * (100 - refused[-1]) / 100)
    rest = [100 - one - other for one, other in zip(local, refused, strict=True)]
    left = [0.0] * len(names)
    for label, widths, color in (
        ("devices local", local, "#2a6f97"),
        ("devices not local", rest, "#c8553d"),
        ("refused", refused, "#b0b7bf"),
    ):
        panel.barh(range(len(names)), widths, left=left, color=color, label=label)
        left = [one + width for one, width in zip(left, widths, strict=True)]
    panel.set_yticks(range(len(names)), names)
    panel.grid(visible=False, axis="y")
    panel.set_xlim(0, 100)
    panel.set_xlabel("% of the VMs with devices")
    legend_beside(figure, panel, columns=3)


def main() -> int:
    """Run all loads and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two seeds, few VMs, no plot")
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--vms", type=int, default=600)
    given = parser.parse_args()
    seeds, vms = (2, 150) if given.quick else (given.seeds, given.vms)
    trials = [
        Trial(layout, seed, vms, way)
        for layout in LAYOUTS
        for seed in range(seeds)
        for way in (*WAYS, *POLICIES)
    ]
    found: dict[Trial, Counts] = {}
    with ProcessPoolExecutor() as processes:
        for number, (trial, counts) in enumerate(
            zip(trials, processes.map(tried, trials), strict=True), start=1
        ):
            found[trial] = counts
            print(f"load {number} of {len(trials)}: {trial.layout.name}, {trial.way}", file=sys.stderr)
    report(found)
    if not given.quick:
        try:
            title = "VMs with devices on two-socket machines"
            print(write_plot("devices", partial(draw, found), title=title))
        except NotInstalled as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
