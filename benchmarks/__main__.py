"""Run the benchmarks, and print and keep what each of them found.

    python -m benchmarks [NAME ...]

A benchmark is a module here without an underscore. Its docstring describes the measurement, and its output is
its result. Both are kept in `benchmarks/results/NAME.md`, with the machine, the date and the load. A printed
line that shows a plot is left out there: docs/benchmarks.md has the plots, with a question and its answer for
each benchmark. Naming some benchmarks runs only those.
"""

from __future__ import annotations

import importlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "benchmarks.md"
RESULTS = HERE / "results"
TITLES: Mapping[str, str] = {
    "neighbours": "A job beside busy neighbours",
    "emulator_threads": "QEMU's own threads on one CPU",
    "fragmentation": "Fragmentation after long use",
    "moves_in_a_cluster": "Moves in a cluster",
    "migration": "A migration that makes room",
    "across_nodes": "Cluster utilisation",
    "devices": "Cores beside devices",
    "planning": "Many VMs at once",
    "preemption": "Preemption",
    "placement": "One placement",
    "decision": "One decision over many nodes",
    "joint_plan": "The first plan of a rollout",
    "first_bind": "From a VM to its bound pod",
    "bound_per_second": "Pods bound per second",
    "cost_per_vm": "Cost of a VM in the control plane",
    "cost_of_parts": "Cost of each part for a VM",
    "device_reads": "A VM with devices",
    "rollout": "A rollout of 500 VMs",
    "two_schedulers": "Two schedulers on the same nodes",
    "ledger_write": "One write to a ledger",
    "start_up": "Start of serve",
    "soak": "Memory of serve",
    "faults": "Recovery from faults",
    "live_commands": "Commands on a live cluster",
    "web_map": "The web map of a large cluster",
    "hook_footprint": "The hook sidecar",
    "container_creation": "Container creation with the agent",
    "agent_footprint": "An idle agent",
    "node_agent": "An agent with 100 VMs",
    "foreign_threads": "Other containers on a VM's cores",
}
"""The headings of the benchmarks on the page, in its order."""


def main(names: list[str]) -> int:
    """Run the named benchmarks, or all; returns the highest exit code."""
    known = sorted(path.stem for path in HERE.glob("[!_]*.py"))
    unknown = set(names) - set(known)
    if unknown:
        print(
            f"no such benchmark: {', '.join(sorted(unknown))}; there are: {', '.join(known)}", file=sys.stderr
        )
        return 2
    worst = 0
    for name in names or known:
        load = os.getloadavg()[0]
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", f"benchmarks.{name}"], stdout=subprocess.PIPE, text=True, check=False
        )
        print(done.stdout, flush=True)
        worst = max(worst, done.returncode)
        if done.returncode == 0:
            _keep(name, done.stdout.strip("\n"), load, time.monotonic() - began)
    return worst


def _keep(name: str, printed: str, load: float, took: float) -> None:
    """Put a result into its file, in the place of the older one."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(
        f"# {TITLES.get(name, name)}\n\n"
        f"Printed by `python -m benchmarks {name}`. All answers: "
        f"[docs/benchmarks.md](../../docs/benchmarks.md).\n\n"
        f"{printed_block(printed)}\n{method_of(name)}\n\n"
        f"Measured on {_machine()}; load before it began {load:.1f}, duration {took / 60:.1f} minutes.\n"
    )


def printed_block(printed: str) -> str:
    """Quote the output of a benchmark, without the lines that show its plots."""
    text = "\n".join(line for line in printed.splitlines() if not line.startswith("![")).strip("\n")
    return f"```\n{text}\n```\n"


def method_of(name: str) -> str:
    """Return how a benchmark measures: its docstring without the command lines."""
    docstring = importlib.import_module(f"benchmarks.{name}").__doc__ or ""
    return "\n\n".join(
        paragraph for paragraph in docstring.strip().split("\n\n") if not paragraph.startswith("    ")
    )


def _machine() -> str:
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30
    day = time.strftime("%Y-%m-%d")
    return (
        f"{day}: {model}, {len(os.sched_getaffinity(0))} CPUs, {memory} GiB, Linux {platform.release()}, "
        f"Python {platform.python_version()}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
