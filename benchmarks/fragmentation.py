"""Fragmentation after a machine has run for long: kvplace compared with other allocators at equal load.

    python -m benchmarks.fragmentation [--quick] [--seeds 20] [--vms 500]

VMs arrive at one machine and end; every allocator gets the same loads. VMs take whole cores, their lifetimes
are exponential, and about 85 % of the machine is in use. There are two mixes of sizes: `even` (2, 4, 4, 8,
8, 16, 16 or 32 CPUs, equally likely) and `small and large` (of 20 VMs 12 have 2 CPUs, 5 have 4, and one each
has 8, 32 and 64). VMs of more than half the machine are left out. The first fifth of the VMs fills the
machine and is not counted. Memory and reserved CPUs are not part of this benchmark. The other allocators are
re-implementations from their descriptions (benchmarks/peers); the kubelet's chooses what the kubelet's own
tests expect.

Columns are percentages of VMs: the mean over machines, then mean and standard deviation over seeds.

* *avoidable*: the free CPUs allowed fewer sockets; fewer *NUMA* nodes in as few sockets; fewer *L3* groups
  in as few sockets and NUMA nodes.
* *forced*: the free CPUs required more NUMA nodes than the empty machine does. This is the fragmentation
  that the allocator has caused.
* *refused*: the same loads with a scope that allows no more NUMA nodes than the empty machine needs. A VM
  that would be forced is refused although enough CPUs are free. The next VM of the seed replaces it, so the
  use stays equal.
* *moves*: running VMs moved inside the machine for every 100 VMs placed. VMs move only when the new one
  would be forced.

Machines of one NUMA node and one L3 group (Graviton-like, hybrid) are run too. They have nothing to split
and are not part of the means. The last table compares with perfect foresight: the fewest VMs split over
several NUMA nodes if all arrivals and departures are known beforehand and no VM moves. It is found by
mixed-integer programming, for loads that are small enough to be solved.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

from benchmarks._foresight import fewest_split
from benchmarks._load import EVEN, MIXES, ConstantLoad, Sizes
from benchmarks._machines import FORESEEN, SHAPES
from benchmarks._plots import Figure, NotInstalled, write_plot
from benchmarks._tables import table
from benchmarks._traces import Machine, PeerMachine, RoomMakingMachine, Tally, kvplace, run
from benchmarks.peers import PEERS
from kvplace.core.topology import Topology

WAYS: Mapping[str, Callable[[Topology], Machine]] = {
    **{name: partial(PeerMachine, choose=choose) for name, choose in PEERS.items()},
    "kvplace": partial(PeerMachine, choose=kvplace),
    **{
        f"kvplace, {moves} move{'s' * (moves > 1)}": partial(RoomMakingMachine, most_moves=moves)
        for moves in (1, 2)
    },
}
"""Every way to choose CPUs, by the name that tables give it."""
COLUMNS = ("sockets", "numa", "l3", "forced", "refused", "moves")
HEADS = ("avoidable: sockets", "NUMA", "L3", "forced", "refused", "moves")
DIVIDED = tuple(name for name, shape in SHAPES.items() if len(shape.numa_nodes) > 1)
FORESEEN_MOST = 16
FORESEEN_VMS = 60
FORESEEN_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Trial:
    """One load on one machine."""

    shape: str
    mix: Sizes
    seed: int
    vms: int


Found = Mapping[Trial, Mapping[str, Tally]]
"""What became of the VMs of every load, by the way that CPUs were chosen."""


def tried(trial: Trial) -> dict[str, Tally]:
    """Run one load under every way to choose; `refused` comes from a run of its own."""
    topology = SHAPES[trial.shape]
    found = {}
    for name, begin in WAYS.items():
        every, strict = (
            run(
                topology,
                begin(topology),
                trial.mix,
                trial.seed,
                count=trial.vms,
                uncounted=trial.vms // 5,
                strict=strict,
            )
            for strict in (False, True)
        )
        found[name] = every.with_refusals_of(strict)
    return found


def by_seed(found: Found, mix: Sizes, way: str, column: str, shapes: Iterable[str] = DIVIDED) -> list[float]:
    """A column in percent, mean over the machines, one number for each seed."""
    seeds: dict[int, list[float]] = {}
    for trial, tallies in found.items():
        if trial.mix == mix and trial.shape in shapes:
            seeds.setdefault(trial.seed, []).append(tallies[way].percent(column))
    return [statistics.mean(numbers) for numbers in seeds.values()]


def mean_and_deviation(numbers: Sequence[float]) -> str:
    """Write numbers as mean and standard deviation; nothing at all is a dash."""
    if not any(numbers):
        return "0"
    return f"{statistics.mean(numbers):.1f} ± {statistics.stdev(numbers) if len(numbers) > 1 else 0:.1f}"


def report(found: Found) -> None:
    """Print the tables."""
    for mix in MIXES:
        print(f"\nVMs of the mix '{mix.name}', percent, mean over {len(DIVIDED)} machines ± over seeds")
        rows = [
            [way, *(mean_and_deviation(by_seed(found, mix, way, column)) for column in COLUMNS)]
            for way in WAYS
        ]
        print(table(["", *HEADS], rows))
        print("\nof these forced, machine by machine")
        rows = [
            [way, *(mean_and_deviation(by_seed(found, mix, way, "forced", (shape,))) for shape in DIVIDED)]
            for way in WAYS
        ]
        print(table(["", *DIVIDED], rows))
        print("\n" + compared(found, mix))
    others = [
        sum(tally.numa + tally.l3 + tally.forced + tally.in_use for tally in tallies.values())
        for trial, tallies in found.items()
        if trial.shape not in DIVIDED
    ]
    print(f"\nmachines of one NUMA node and one L3 group: {len(others)} loads, {sum(others)} VMs split")


def compared(found: Found, mix: Sizes) -> str:
    """State how many fewer VMs kvplace forces than each peer, and with how many seeds it does."""
    lines = []
    for way in ("kvplace", "kvplace, 2 moves"):
        own = by_seed(found, mix, way, "forced")
        for name in PEERS:
            others = by_seed(found, mix, name, "forced")
            better = sum(1 for a, b in zip(own, others, strict=True) if a < b)
            change = 100 * (statistics.mean(own) / statistics.mean(others) - 1) if any(others) else 0.0
            lines.append([f"{way} / {name}", f"{change:+.0f} %", f"{better} of {len(own)}"])
    return table(["forced, against", "difference", "seeds with fewer"], lines)


def forced(found: Found) -> dict[str, dict[str, tuple[float, float]]]:
    """Collect mean and standard deviation of the forced VMs over the seeds, by mix and way."""
    shares: dict[str, dict[str, tuple[float, float]]] = {}
    for mix in MIXES:
        for way in WAYS:
            numbers = by_seed(found, mix, way, "forced")
            deviation = statistics.stdev(numbers) if len(numbers) > 1 else 0.0
            shares.setdefault(mix.name, {})[way] = statistics.mean(numbers), deviation
    return shares


def draw(shares: Mapping[str, Mapping[str, tuple[float, float]]], figure: Figure) -> None:
    """Draw the share of forced VMs, one panel for each mix."""
    panels = figure.subplots(1, len(shares), sharey=True)
    for panel, (mix, by_way) in zip(panels, shares.items(), strict=True):
        names = list(by_way)[::-1]
        panel.barh(
            range(len(names)),
            [by_way[way][0] for way in names],
            xerr=[by_way[way][1] for way in names],
            color=["#2a6f97" if way.startswith("kvplace") else "#b0b7bf" for way in names],
            error_kw={"linewidth": 0.8},
        )
        panel.set_yticks(range(len(names)), names)
        panel.grid(visible=False, axis="y")
        panel.set_title(f"mix '{mix}'")
        panel.set_xlabel("forced over more NUMA nodes, % of VMs")


def foreseen(seed: int) -> dict[str, int]:
    """Count the VMs of one small load that are split: with all knowledge, and with none."""
    sizes = [node.cpus.bit_count() for node in FORESEEN.numa_nodes]
    mix = EVEN.up_to(FORESEEN_MOST)
    events = list(ConstantLoad(mix, seed, cpus=sum(sizes), count=FORESEEN_VMS))
    best = fewest_split(events, sizes, seconds=FORESEEN_SECONDS)
    found = {"foresight, at least": best.at_least, "foresight": best.split}
    for way in ("best fit", *(way for way in WAYS if way.startswith("kvplace"))):
        tally = run(FORESEEN, WAYS[way](FORESEEN), mix, seed, count=FORESEEN_VMS)
        found[way] = tally.numa + tally.forced
    return found


def report_foresight(loads: Sequence[Mapping[str, int]]) -> None:
    """Print how many VMs are split in all small loads together."""
    size = FORESEEN.cpus.bit_count()
    print(f"\nVMs split in {len(loads)} loads of {FORESEEN_VMS} VMs (mix 'even' up to {FORESEEN_MOST} CPUs)")
    print(f"on {size} CPUs in {len(FORESEEN.numa_nodes)} NUMA nodes, counted from the first VM on")
    rows = [[way, str(sum(load[way] for load in loads))] for way in loads[0]]
    print(table(["", "VMs split"], rows))


def main() -> int:
    """Run all loads and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two seeds, few VMs, no plot")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--vms", type=int, default=500)
    given = parser.parse_args()
    seeds, vms = (2, 100) if given.quick else (given.seeds, given.vms)
    trials = [Trial(shape, mix, seed, vms) for shape in SHAPES for mix in MIXES for seed in range(seeds)]
    found: dict[Trial, dict[str, Tally]] = {}
    with ProcessPoolExecutor() as processes:
        for number, (trial, tallies) in enumerate(
            zip(trials, processes.map(tried, trials), strict=True), start=1
        ):
            found[trial] = tallies
            print(f"load {number} of {len(trials)}: {trial.shape}, {trial.mix.name}", file=sys.stderr)
        report(found)
        try:
            report_foresight(list(processes.map(foreseen, range(1 if given.quick else seeds))))
            if not given.quick:
                title = "VMs forced over more NUMA nodes"
                print(write_plot("fragmentation", partial(draw, forced(found)), title=title))
        except NotInstalled as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
