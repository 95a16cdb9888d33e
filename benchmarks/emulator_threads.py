"""Disk requests and packets of several VMs that have one CPU for all their QEMU threads.

    ./make bench emulator_threads, or .venv/bin/python -m benchmarks.emulator_threads [--rounds N]

With `emulator-threads: shared` the main loops of all VMs of a NUMA node run on its reserved CPUs. Here each
VM is a real QEMU process without a guest. Its main loop serves an empty disk (`null-co`, over NBD) and
forwards packets between two network backends. So the figures include no guest, no real disk and no vhost
threads. All QEMU processes run on one CPU. A program on another CPU sends reads of 4 KiB and packets of 1500
bytes, and never sleeps. As root, `./make bench` gives both the highest priority (nice -20) on the machine.

*busy*: every VM always has 16 reads, or 8 packets, in progress. *one by one*: one VM gets its next request
after the answer, beside VMs that get 1,000 requests per second each, or that are busy. One VM alone is a VM
with a CPU for its QEMU threads. There is only one CPU for QEMU, so this does not show several reserved CPUs.
The figures are medians of the rounds; ratios compare with one VM alone.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Protocol, Self

from benchmarks._processes import cpu_seconds
from benchmarks._tables import table

QEMU = "qemu-system-x86_64"
VMS = (1, 2, 4, 8)
SECONDS = 0.5
PATIENCE_S = 20.0
PER_SECOND = 1000
BLOCK, PACKET = 4096, 1500


class Vm:
    """A QEMU process on one CPU; its main loop serves a disk and forwards packets."""

    def __init__(self, folder: Path, cpu: int) -> None:
        self.folder = folder
        folder.mkdir()
        arguments = ["taskset", "-c", str(cpu), QEMU, "-machine", "none", "-nodefaults", "-nographic"]
        arguments += ["-qmp", "stdio", "-blockdev", f"null-co,node-name=disk,size={1 << 30},read-zeroes=on"]
        for name, remote in (("in", "unused"), ("out", "to")):
            unix = (
                f"local.type=unix,local.path={folder / name},remote.type=unix,remote.path={folder / remote}"
            )
            arguments += ["-netdev", f"dgram,id={name},{unix}"]
            arguments += ["-netdev", f"hubport,id=hub-{name},hubid=0,netdev={name}"]
        self.process = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        address = {"type": "unix", "data": {"path": str(folder / "disk")}}
        self._call("qmp_capabilities")
        self._call("nbd-server-start", addr=address)
        self._call("block-export-add", type="nbd", id="export", **{"node-name": "disk"})

    def _call(self, command: str, **arguments: object) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps({"execute": command, "arguments": arguments}), file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            if "error" in (answer := json.loads(line)):
                raise RuntimeError(f"QEMU refuses {command}: {answer}")
            if "return" in answer:
                return
        raise RuntimeError("QEMU has ended")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


class Requests(Protocol):
    """A connection to one VM. Each request holds the time when it was sent, and so does its answer."""

    def fileno(self) -> int:
        """Return the file that becomes readable with an answer."""

    def send(self, count: int) -> None:
        """Send so many requests."""

    def answered(self) -> Sequence[int]:
        """Return when the requests were sent that have an answer now, in nanoseconds."""


class Disk:
    """A client of the VM's disk, in NBD's simple form."""

    def __init__(self, vm: Vm) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(PATIENCE_S)
        self._socket.connect(str(vm.folder / "disk"))
        self._socket.recv(18, socket.MSG_WAITALL)
        self._socket.sendall(struct.pack(">I8sII4s", 3, b"IHAVEOPT", 1, 4, b"disk"))
        self._socket.recv(10, socket.MSG_WAITALL)
        self._received = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, count: int) -> None:
        request = struct.pack(">IHHQQI", 0x25609513, 0, 0, time.monotonic_ns(), 0, BLOCK)
        self._socket.sendall(request * count)

    def answered(self) -> Sequence[int]:
        self._received += self._socket.recv(1 << 20)
        size = 16 + BLOCK
        whole = len(self._received) // size * size
        sent = [int.from_bytes(self._received[at + 8 : at + 16], "big") for at in range(0, whole, size)]
        del self._received[:whole]
        return sent


class Network:
    """A sender on one side of the VM's hub, and a receiver on the other."""

    def __init__(self, vm: Vm) -> None:
        self._sender, self._receiver = (socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2))
        self._receiver.bind(str(vm.folder / "to"))
        self._receiver.setblocking(False)
        self._sender.connect(str(vm.folder / "in"))

    def fileno(self) -> int:
        return self._receiver.fileno()

    def send(self, count: int) -> None:
        for _ in range(count):
            self._sender.send(time.monotonic_ns().to_bytes(8, "big").ljust(PACKET, b"\0"))

    def answered(self) -> Sequence[int]:
        sent = []
        with suppress(BlockingIOError):
            while True:
                sent.append(int.from_bytes(self._receiver.recv(PACKET)[:8], "big"))
        return sent


KINDS: Mapping[str, tuple[Callable[[Vm], Requests], str, int]] = {
    "disk": (Disk, "reads", 16),
    "network": (Network, "packets", 8),
}


@dataclass(frozen=True, slots=True)
class Load:
    """Requests to one VM: so many in progress, or with 0 PER_SECOND."""

    requests: Requests
    in_progress: int


def answers(loads: Sequence[Load]) -> list[list[float]]:
    """Send requests for a while, and return how long the answers of each load took, in microseconds."""
    by_file = {load.requests.fileno(): (load, list[float]()) for load in loads}
    waiting = select.epoll()
    for file in by_file:
        waiting.register(file, select.EPOLLIN)
    start = time.monotonic_ns()
    end = start + int(SECONDS * 1e9)
    due = {load: start for load in loads if not load.in_progress}
    unanswered = sum(load.in_progress for load in loads)
    for load in loads:
        load.requests.send(load.in_progress)
    while (now := time.monotonic_ns()) < end or unanswered:
        for file, _ in waiting.poll(0 if now < end else PATIENCE_S):
            load, took = by_file[file]
            sent = load.requests.answered()
            unanswered -= len(sent)
            if (now := time.monotonic_ns()) < end:
                took.extend((now - one) / 1000 for one in sent)
                if load.in_progress and sent:
                    load.requests.send(len(sent))
                    unanswered += len(sent)
        for load, when in due.items():
            if when <= time.monotonic_ns() < end:
                load.requests.send(1)
                unanswered += 1
                due[load] = when + 10**9 // PER_SECOND
    waiting.close()
    return [took for _, took in by_file.values()]


Figures = Mapping[tuple[str, int], Mapping[str, Sequence[float]]]
"""Those of all rounds, by kind and number of VMs, and by name."""


def measure(rounds: int, cpu: int) -> Figures:
    """Measure all cases in each round, with every QEMU process on one CPU."""
    found: dict[tuple[str, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        vms = [stack.enter_context(Vm(folder / str(number), cpu)) for number in range(max(VMS))]
        clients = {kind: [client(vm) for vm in vms] for kind, (client, _, _) in KINDS.items()}
        for kind, count in [(kind, count) for _ in range(rounds) for kind in KINDS for count in VMS]:
            first, *others = clients[kind][:count]
            busy = KINDS[kind][2]
            before = sum(cpu_seconds(vm.process.pid) for vm in vms)
            total = sum(len(took) for took in answers([Load(one, busy) for one in (first, *others)]))
            used = sum(cpu_seconds(vm.process.pid) for vm in vms) - before
            figures = found[kind, count]
            figures["total"].append(total / SECONDS)
            figures["cost"].append(used / total * 1e6)
            figures["use"].append(used / SECONDS * 100)
            for name, in_progress in (("paced", 0), ("busy", busy)):
                times = sorted(answers([Load(first, 1), *(Load(one, in_progress) for one in others)])[0])
                figures[f"{name} p50"].append(times[len(times) // 2])
                figures[f"{name} p99"].append(times[len(times) * 99 // 100])
    return found


def report(found: Figures) -> str:
    """Write the medians of each kind."""
    parts = []
    for kind, (_, noun, _) in KINDS.items():
        rows, times = [], []
        alone = {name: median(values) for name, values in found[kind, 1].items()}
        for count in VMS:
            now = {name: median(values) for name, values in found[kind, count].items()}
            each = now["total"] / count
            ratios = [f"{one / alone['total']:.2f}" for one in (now["total"], each)]
            rows.append([str(count), f"{now['total']:,.0f}", ratios[0], f"{each:,.0f}", ratios[1]])
            rows[-1] += [f"{now['cost']:.1f}", f"{now['use']:.0f} %"]
            beside = [("paced", f", {PER_SECOND:,} per s each"), ("busy", ", busy")]
            for name, text in beside if count > 1 else beside[:1]:
                label = f"{count - 1} beside{text}" if count > 1 else "alone"
                times.append([label, *_times(now, alone, name)])
        heads = [f"{noun}/s", "ratio", "of each VM", "ratio", "CPU µs of one", "CPU of QEMU"]
        parts.append(table([f"{kind}, busy VMs", *heads], rows))
        parts.append(table([f"{kind}, one by one", "p50 µs", "ratio", "p99 µs", "ratio"], times))
    return "\n\n".join(parts)


def _times(now: Mapping[str, float], alone: Mapping[str, float], name: str) -> Iterable[str]:
    for percentile in ("p50", "p99"):
        value = now[f"{name} {percentile}"]
        yield from (f"{value:,.0f}", f"{value / alone[f'paced {percentile}']:.1f}")


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=9)
    given = arguments.parse_args()
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2 or shutil.which(QEMU) is None:
        sys.exit(f"the benchmark needs two CPUs and {QEMU} (Debian: qemu-system-x86)")
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -20)
        os.setsid()  # for an autogroup of its own: where the kernel has autogroups, their priority counts
        Path("/proc/self/autogroup").write_text("-20")
    os.sched_setaffinity(0, {cpus[-1]})
    print(f"QEMU on CPU {cpus[0]}, requests from CPU {cpus[-1]}, {given.rounds} rounds of {SECONDS} s\n")
    print(report(measure(given.rounds, cpus[0])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
