"""Run the benchmarks, show what they print, and write docs/benchmarks.md from it.

    python -m benchmarks [NAME ...]

A benchmark is a module here without an underscore; what it prints is its result, and its docstring says how
that was measured. A printed line that shows a picture stands in the page as one. Naming some runs only those
and leaves the page's other sections as they are.
"""

from __future__ import annotations

import importlib
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "benchmarks.md"
TITLES: Mapping[str, str] = {
    "fragmentation": "Fragmentation after long use",
    "across_nodes": "How full a cluster gets",
    "planning": "Many VMs at once",
    "placement": "One placement",
    "decision": "One decision over many nodes",
    "joint_plan": "The first plan of a rollout",
    "start_up": "How long serve takes to start",
    "batches": "A rollout in a nearly full cluster",
    "rollout": "A rollout of 500 VMs",
    "preemption": "Whose eviction makes a VM fit",
    "live_commands": "Commands on a live cluster",
    "soak": "A long life of serve",
    "bound_per_second": "Pods bound per second",
    "cost_per_vm": "What a VM costs",
    "cost_of_parts": "What each part costs a VM",
    "two_schedulers": "Two schedulers on the same nodes",
    "faults": "Going on after faults",
    "first_bind": "From a VM to its bound pod",
    "ledger_write": "One write to a ledger",
    "hook_footprint": "The hook sidecar",
    "container_creation": "What the agent adds to a container's creation",
    "agent_footprint": "An idle agent",
    "foreign_threads": "Other containers on a VM's cores",
    "node_agent": "The node agent",
    "web_map": "The web map of a large cluster",
}
INTRODUCTION = """# Benchmarks

What kvplace costs and how fast it is. All figures are measured by `./make bench`, and none is a promise. Use
the ratios: they compare with the same thing without kvplace, in the same run on the same machine. Measure
again on your machines. All servers, kvplace and the measuring program share the machine's cores, so CPU that
any of them uses costs throughput.
"""


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
    """Put a section into the page, in the place of its older one."""
    sections = page_sections()
    sections[name] = (
        f"{printed_block(printed)}\n{method_of(name)}\n\n"
        f"Measured on {_machine()}; load before it began {load:.1f}, duration {took / 60:.1f} minutes.\n"
    )
    text = INTRODUCTION
    for one in sorted(sections, key=lambda name: (list(TITLES).index(name) if name in TITLES else 99, name)):
        text += f"\n## {TITLES.get(one, one)}\n<!-- {one} -->\n\n{sections[one]}"
    PAGE.write_text(text)


def page_sections() -> dict[str, str]:
    """Read the sections that the page has already, by benchmark."""
    if not PAGE.exists():
        return {}
    parts = re.split(r"\n## [^\n]*\n<!-- (\w+) -->\n\n", PAGE.read_text())
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def printed_block(printed: str) -> str:
    """Quote what a benchmark printed, with its pictures after that."""
    lines = printed.splitlines()
    text = "\n".join(line for line in lines if not line.startswith("![")).strip("\n")
    pictures = "".join(f"\n{line}\n" for line in lines if line.startswith("!["))
    return f"```\n{text}\n```\n{pictures}"


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
