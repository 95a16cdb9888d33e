"""The time that another container may use an owned core, on a node without NRI.

    ./make bench foreign_threads, or .venv/bin/python -m benchmarks.foreign_threads [--rounds N]

Real cgroups of this machine, laid out as a kubelet's, with real processes in them; two of these are busy.
The enforcement runs in a process of its own, as in the agent, and competes for CPUs with the busy processes
and with the measuring one.

* *a claim*: from the event of the watch until no process of another container may use the VM's core.
* *a new container*: from the moment when its cgroup appears until it has the shared pool. A runtime makes
  the cgroup tens of milliseconds before it starts a program there.
* *drift*: from the write of another program, such as systemd's on daemon-reload, until it is undone.
* *idle*: CPU time of the enforcement's process without events; its periodic sweeps are included.

Needs root and a cpuset hierarchy.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks._tables import table
from harness.pod_cgroups import PodCgroups, container_id, pod_cgroups, pod_uid
from kvplace.agent.cgroup_source import CgroupSource
from kvplace.agent.cpuset_keeper import CpusetKeeper
from kvplace.agent.node_objects import NodeObjects
from kvplace.agent.node_report import NodeReport
from kvplace.core.cpuset import format_cpu_list, lowest, mask_of
from kvplace.core.ledger import Ledger, LedgerChange, claim_of
from kvplace.core.placement import Placement
from kvplace.core.request import Policy
from kvplace.core.scalars import CpuMask, NodeName
from kvplace.kube.object_records import LedgerRecord
from kvplace.kube.watches import Apply, Init, InitDone
from kvplace.linux.cgroups import CpusetFile, CpusetHierarchy
from kvplace.linux.kernel_files import write_text
from kvplace.linux.sysfs import discover
from kvplace.linux.tree import FolderTree

NODE = NodeName("worker-1")
VM = pod_uid(0xF)
IDLE_S = 60.0
SIZES = (10, 50, 200)


def enforce(hierarchy: CpusetHierarchy, owned: CpuMask, commands: Connection) -> None:
    """The agent's part: enforces, takes and gives back the claim on demand, answers with the time of it."""
    asyncio.run(_enforce(hierarchy, owned, commands))


async def _enforce(hierarchy: CpusetHierarchy, owned: CpuMask, commands: Connection) -> None:
    logging.disable()  # drift is what is wanted here
    topology = discover(FolderTree(Path("/"))).topology
    own, report = NodeObjects(NODE, topology), NodeReport()
    for store in own.stores:
        store.apply(Init())
        store.apply(InitDone())
    claim = claim_of(VM, Placement(Policy.EXCLUSIVE, (), owned, owned=owned))
    claimed, free = Ledger().after(LedgerChange((claim,))), Ledger()
    done = asyncio.Event()

    def told() -> None:
        match commands.recv():
            case "claim":
                own.ledgers.apply(Apply(LedgerRecord(NODE, claimed, "2")))
            case "release":
                own.ledgers.apply(Apply(LedgerRecord(NODE, free, "1")))
            case "cpu":
                pass
            case _:
                done.set()
        commands.send((time.monotonic(), time.process_time()))

    asyncio.get_running_loop().add_reader(commands.fileno(), told)
    enforces = asyncio.Event()
    report.subscribe(enforces.set)
    keeper = CpusetKeeper(own, report, hierarchy)
    running = asyncio.create_task(keeper.run(CgroupSource(keeper, own, hierarchy.root)))
    await enforces.wait()
    commands.send("ready")
    await done.wait()
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


@contextlib.contextmanager
def agent_of(pods: PodCgroups, owned: CpuMask) -> Iterator[Agent]:
    """Run the process that enforces while the block runs."""
    agent = Agent(pods, owned)
    try:
        yield agent
    finally:
        agent.stop()


class Agent:
    """The process that enforces."""

    def __init__(self, pods: PodCgroups, owned: CpuMask) -> None:
        self._commands, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=enforce, args=(pods.own, owned, theirs), daemon=True)
        self._process.start()
        self._commands.recv()

    def tell(self, command: str) -> tuple[float, float]:
        """Give a command; the times of the clock and of the agent's CPU when it was taken."""
        self._commands.send(command)
        clock, cpu = self._commands.recv()
        return float(clock), float(cpu)

    def stop(self) -> None:
        self.tell("stop")
        self._process.join()


def until(holds: Callable[[], bool]) -> float:
    """The time when something holds, checked without a pause."""
    while not holds():
        pass
    return time.monotonic()


def becomes(pods: PodCgroups, folder: Path, cpus: CpuMask) -> float:
    """The time when a cgroup is set to these CPUs."""
    return until(lambda: pods.hierarchy.configured(folder) == cpus)


def a_new_container(pods: PodCgroups, agent: Agent, pool: CpuMask) -> float:
    pod = pods.pod(pod_uid(0x100))
    began = time.monotonic()
    folder = pods.make(pod / container_id(0x1000))
    took = becomes(pods, folder, pool) - began
    pods.remove(pod)
    return took


def a_claim(agent: Agent, processes: list[int], pool: set[int], everything: set[int]) -> float:
    until(lambda: all(os.sched_getaffinity(pid) == everything for pid in processes))
    began, _cpu = agent.tell("claim")
    took = until(lambda: all(os.sched_getaffinity(pid) == pool for pid in processes)) - began
    agent.tell("release")
    return took


def drift(pods: PodCgroups, folder: Path, pool: CpuMask, everything: CpuMask) -> float:
    becomes(pods, folder, pool)
    began = time.monotonic()
    write_text(folder / CpusetFile.CPUS.value, format_cpu_list(everything))
    return becomes(pods, folder, pool) - began


def row(name: str, times: list[float]) -> list[str]:
    ordered = sorted(times)
    shown = (statistics.median(ordered), ordered[int(len(ordered) * 0.99)], ordered[-1])
    return [name, str(len(times)), *(f"{value * 1000:.2f}" for value in shown)]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=50)
    rounds = parser.parse_args().rounds
    online = mask_of(os.sched_getaffinity(0))
    pool = lowest(online, online.bit_count() - 1)
    allowed, everything = (
        set(os.sched_getaffinity(0)) - {online.bit_length() - 1},
        set(os.sched_getaffinity(0)),
    )
    rows, costs = [], []
    with pod_cgroups() as pods:
        for containers in SIZES:
            while len(pods.processes) < containers:
                number = len(pods.processes) + 1
                command = ["sh", "-c", "while :; do :; done"] if number <= 2 else ["sleep", "3600"]
                pods.process(pods.container(pod_uid(number), container_id(number)), *command)
            with agent_of(pods, CpuMask(online & ~pool)) as agent:
                pids = [process.pid for process in pods.processes]
                _clock, before = agent.tell("cpu")
                times = [a_claim(agent, pids, allowed, everything) for _ in range(rounds)]
                cpu_ms = (agent.tell("cpu")[1] - before) / rounds * 1000
                rows.append(row(f"a claim, {containers} containers", times))
                costs.append(f"a claim and its release, {containers} containers: {cpu_ms:.1f} ms of CPU time")
                agent.tell("claim")
                times = [a_new_container(pods, agent, pool) for _ in range(rounds)]
                rows.append(row(f"a new container beside {containers}", times))
                # A container is repaired five times a minute, so each is used once.
                folders = [pods.container(pod_uid(n), container_id(n)) for n in range(1, containers + 1)]
                times = [drift(pods, folder, pool, online) for folder in folders[:rounds]]
                rows.append(row(f"drift beside {containers}", times))
        with agent_of(pods, CpuMask(online & ~pool)) as agent:
            clock, cpu = agent.tell("cpu")
            time.sleep(IDLE_S)
            later, used = agent.tell("cpu")
    print(
        table(["a foreign thread may use the core for", "times", "median ms", "99 % ms", "longest ms"], rows)
    )
    print("\n" + "\n".join(costs))
    print(f"idle with {SIZES[-1]} containers: {(used - cpu) / (later - clock) * 100:.3f} % of a CPU")
    return 0


if __name__ == "__main__":
    sys.exit(main())
