"""Run time and wake-up latency of a fixed job beside busy neighbours, in a VM and in a plain pod.

    ./make bench neighbours, or .venv/bin/python -m benchmarks.neighbours [--rounds N]

All of it runs on one real node on this machine, with kubelet, containerd, KubeVirt and kvplace. The job
computes for a fixed number of steps, and then sleeps until moments that are a fixed time apart. The latency
is the time from such a moment until the job runs, as cyclictest measures it, with the default scheduling
class. The VM has one vCPU. QEMU emulates it (TCG), so its figures are not those of a VM with KVM. The
neighbours are plain pods with an endless loop each, a request of 100m CPU and no limit.

*alone*: the neighbours are stopped. *without kvplace*: the job requests 100m CPU, as KubeVirt does for one
vCPU, and has not opted in. *1 CPU requested*: the same with a request of one CPU. *exclusive*: the first
manifest with `cpu-policy: exclusive` and, for QEMU, `emulator-threads: with-vcpus`; kvplace also raises the
request to one CPU. Every round measures each of them in a new pod and a new VM (*alone* in the first ones),
and every second round in the opposite order. Before the job runs, the benchmark checks the CPUs that the job
and its neighbours may use. The figures are medians of the rounds. Needs root.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from benchmarks._plots import Figure, legend_beside, print_plot
from benchmarks._tables import table
from benchmarks._timed_job import (
    EACH_LINE,
    INITRAMFS,
    KERNEL,
    PROGRAM,
    READY,
    REFERENCE,
    Size,
    Timing,
    image,
)
from harness.build_cache import BuildFailed
from harness.control_plane.programs import KUBEVIRT
from harness.control_plane.watching import condition, is_ready, wait_for
from harness.emulated_machine.kernels import FetchFailed, NoMachineHere
from harness.go_build import built
from harness.kvplace_cluster.vms import VMIS, vmi_manifest
from harness.node_programs.image import archive
from harness.node_programs.programs import node_programs
from harness.real_node.cluster import RealCluster
from harness.real_node.control_groups import NoControlGroups
from harness.real_node.images import node_image_archives
from harness.real_node.kernel_view import ContainerInKernel
from harness.real_node.kvplace_pods import install_kvplace
from kvplace.core.cpuset import format_cpu_list, mask_of

Json = dict[str, Any]

NODE, NAMESPACE = "node-1", "neighbours"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
NEIGHBOURS = 4
POD = Size(iterations=300_000_000, wake_ups=2000, interval_us=1000)
GUEST = Size(iterations=200_000_000, wake_ups=2000, interval_us=1000)
KINDS = ("plain pod", "VM")
PATIENCE_S = 120.0
PINNED = "kvplace.io/Pinned"
EXCLUSIVE = {"kvplace.io/cpu-policy": "exclusive"}
WITH_VCPUS = {"kvplace.io/emulator-threads": "with-vcpus"}
"""Also on a VM that is exclusive: QEMU's main loop delivers the timers of an emulated guest."""
ALONE = "alone"
COLORS = ["#5c6670", "#b0b7bf", "#b0b7bf", "#2a6f97"]


@dataclass(frozen=True, slots=True)
class Setting:
    """How the job is started beside neighbours."""

    title: str
    request: str
    annotations: Mapping[str, str]

    @property
    def titles(self) -> tuple[str, ...]:
        """Name what is measured in a pod or VM of this setting."""
        return (ALONE, self.title) if self is SETTINGS[0] else (self.title,)


SETTINGS = (
    Setting("without kvplace", "100m", {}),
    Setting("without kvplace, 1 CPU requested", "1", {}),
    Setting("exclusive", "100m", EXCLUSIVE),
)
TITLES = tuple(title for setting in SETTINGS for title in setting.titles)
Timings = Mapping[tuple[str, str], Sequence[Timing]]
"""Those of all rounds, by kind and title."""


class Node:
    """The node with the busy pods, which are stopped except while a job runs beside them."""

    def __init__(self, cluster: RealCluster) -> None:
        self.cluster = cluster
        self._neighbours = [self._busy_pod(f"neighbour-{number}") for number in range(NEIGHBOURS)]
        self._signal(signal.SIGSTOP)

    def container(self, pod: Json, name: str) -> ContainerInKernel:
        return ContainerInKernel.of_pod(self.cluster.nodes[NODE].sandbox, pod, name)

    def start_pod(self, name: str, container: Json, annotations: Mapping[str, str] | None = None) -> Json:
        """Start a pod of one container and return it when it is ready."""
        spec = {"terminationGracePeriodSeconds": 0, "containers": [container]}
        metadata = {"name": name, "annotations": dict(annotations or {})}
        self.cluster.plane.request("POST", PODS, {"metadata": metadata, "spec": spec})
        return wait_for(self.cluster.plane, PODS, name, is_ready)

    def wait_until_no_cpu_is_owned(self) -> None:
        """Wait until the neighbours may use all CPUs again."""
        deadline = time.monotonic() + PATIENCE_S
        while (cpus := self._cpus()) != {mask_of(os.sched_getaffinity(0))}:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the neighbours may use only {sorted(map(format_cpu_list, cpus))}")
            time.sleep(0.1)

    def wait_until_pinned(self, pod: Json, setting: Setting) -> None:
        """Wait until the agent has read back the CPUs of a pod, if kvplace placed it."""
        if setting.annotations:
            wait_for(
                self.cluster.plane,
                PODS,
                pod["metadata"]["name"],
                lambda seen: condition(seen, PINNED) == "True",
            )

    def check(self, setting: Setting, job: int) -> None:
        """Raise an error when job and neighbours may not use the CPUs that the setting gives them."""
        apart = all(not job & others for others in self._cpus())
        same = self._cpus() == {job}
        if not (apart if setting.annotations else same):
            others = sorted(map(format_cpu_list, self._cpus()))
            raise AssertionError(f"{setting.title}: job on {format_cpu_list(job)}, neighbours on {others}")

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Let the neighbours run."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _busy_pod(self, name: str) -> ContainerInKernel:
        loop = ["sh", "-c", "while :; do :; done"]
        resources = {"requests": {"cpu": "100m"}}
        container = {"name": "busy", "image": "busybox:1", "command": loop, "resources": resources}
        return self.container(self.start_pod(name, container), "busy")

    def _cpus(self) -> set[int]:
        return {container.cpus() for container in self._neighbours}

    def _signal(self, number: signal.Signals) -> None:
        for container in self._neighbours:
            for pid in container.pids():
                os.kill(pid, number)


def in_pod(node: Node, name: str, setting: Setting) -> list[Timing]:
    """Run the job once for each title of a setting, in a new pod."""
    resources = {"requests": {"cpu": setting.request}, "limits": {"cpu": "1"}}
    container = {"name": "job", "image": REFERENCE, "resources": resources}
    pod = node.start_pod(name, container, setting.annotations)
    node.wait_until_pinned(pod, setting)
    job = node.container(pod, "job")

    def run() -> Timing:
        node.check(setting, job.cpus())
        return Timing.read(
            node.cluster.plane.kubectl("exec", "-n", NAMESPACE, name, "--", PROGRAM, *POD.arguments())
        )

    timings = _run(node, setting, run)
    node.cluster.plane.kubectl("delete", "pod", "-n", NAMESPACE, name)
    return timings


@contextmanager
def serial_console(path: str) -> Iterator[TextIO]:
    """Connect to a guest and wait until the job in it answers."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.settimeout(0.5)
        seen, deadline = b"", time.monotonic() + PATIENCE_S
        while READY.encode() not in seen:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the guest does not run the job: {seen[-2000:]!r}")
            connection.sendall(b"\n")
            with suppress(TimeoutError):
                seen += connection.recv(4096)
        connection.settimeout(PATIENCE_S)
        with connection.makefile("rw", encoding="ascii", errors="replace") as console:
            yield console


def in_vm(node: Node, name: str, setting: Setting) -> list[Timing]:
    """Run the job once for each title of a setting, in a new VM."""
    virt = node.cluster.kubevirt
    virt.create(VMIS, NAMESPACE, _vmi(name, setting))
    vmi = virt.vmi_in_phase(NAMESPACE, name, "Running")
    pod = virt.launcher_pod(NAMESPACE, name)
    node.wait_until_pinned(pod, setting)
    compute = node.container(pod, "compute")
    path = f"/proc/{compute.qemu()}/root/run/kubevirt-private/{vmi['metadata']['uid']}/virt-serial0"
    with serial_console(path) as console:

        def run() -> Timing:
            (vcpu,) = compute.qemu_threads().vcpus().values()
            for cpus in (vcpu, compute.cpus()):
                node.check(setting, cpus)
            console.write("run\n")
            console.flush()
            return Timing.read(next(line for line in console if line.startswith("{")))

        timings = _run(node, setting, run)
    node.cluster.plane.request("DELETE", f"/apis/kubevirt.io/v1/namespaces/{NAMESPACE}/{VMIS}/{name}")
    virt.gone(VMIS, NAMESPACE, name)
    return timings


def _vmi(name: str, setting: Setting) -> Json:
    arguments = ["console=ttyS0", "quiet", "panic=-1", "--", *GUEST.arguments(), EACH_LINE]
    files = {
        "image": REFERENCE,
        "imagePullPolicy": "IfNotPresent",
        "kernelPath": KERNEL,
        "initrdPath": INITRAMFS,
    }
    domain = {
        "memory": {"guest": "128Mi"},
        "devices": {"autoattachGraphicsDevice": False},
        "firmware": {"kernelBoot": {"container": files, "kernelArgs": " ".join(arguments)}},
        "resources": {"requests": {"cpu": setting.request}},
    }
    annotations = setting.annotations and {**setting.annotations, **WITH_VCPUS}
    return vmi_manifest(name, cores=1, annotations=annotations, domain=domain)


def _run(node: Node, setting: Setting, run: Callable[[], Timing]) -> list[Timing]:
    """Run the job for each title of a setting: alone where that is one, and beside the neighbours."""
    timings = []
    for title in setting.titles:
        with nullcontext() if title == ALONE else node.busy():
            timings.append(run())
    return timings


def measure(rounds: int) -> Timings:
    """Start the node and measure all settings, every second round in the opposite order."""
    found: dict[tuple[str, str], list[Timing]] = defaultdict(list)
    images = [*node_image_archives(), archive(image())]
    with (
        tempfile.TemporaryDirectory() as logs,
        RealCluster(
            node_programs(),
            built(KUBEVIRT),
            images,
            Path(logs),
            kubelets={NODE: {"cpuManagerPolicy": "none"}},
        ) as cluster,
    ):
        install_kvplace(cluster.plane, cluster.nodes[NODE].sandbox.service_subnet, replicas=1)
        cluster.plane.create_namespace(NAMESPACE)
        node = Node(cluster)
        for number in range(rounds):
            for setting in SETTINGS[:: -1 if number % 2 else 1]:
                for kind, run_job in zip(KINDS, (in_pod, in_vm), strict=True):
                    node.wait_until_no_cpu_is_owned()
                    name = f"job-{len(found[kind, setting.title])}-{SETTINGS.index(setting)}"
                    for title, timing in zip(setting.titles, run_job(node, name, setting), strict=True):
                        found[kind, title].append(timing)
    return found


def report(found: Timings) -> str:
    """Write the medians, and the lowest and highest latency of the rounds."""
    heads = ["run time, s", "p50, µs", "p99, µs", "max, µs", "p99 of the rounds", "max of the rounds"]
    parts = []
    for kind in KINDS:
        rows = []
        for title in TITLES:
            timings = found[kind, title]
            median = Timing.median(timings)
            rows.append(
                [
                    title,
                    f"{median.run_s:.2f}",
                    *(f"{value:,.0f}" for value in (median.p50_us, median.p99_us, median.max_us)),
                    _range(one.p99_us for one in timings),
                    _range(one.max_us for one in timings),
                ]
            )
        parts.append(table([kind, *heads], rows))
    return "\n\n".join(parts)


def _range(values: Iterable[float]) -> str:
    in_order = sorted(values)
    return f"{in_order[0]:,.0f} to {in_order[-1]:,.0f}"


def draw(found: Timings, figure: Figure) -> None:
    """Draw run times as bars and latencies as points; only those span powers of ten."""
    panels = figure.subplots(2, 2, width_ratios=(1, 2))
    places = list(reversed(range(len(TITLES))))
    labels = [title.replace(", ", ",\n") for title in TITLES]
    for kind, (times, latencies) in zip(KINDS, panels, strict=True):
        medians = [Timing.median(found[kind, title]) for title in TITLES]
        times.barh(places, [median.run_s for median in medians], height=0.6, color=COLORS)
        times.set_yticks(places, labels)
        times.set_title(f"{kind}: run time")
        times.set_xlabel("seconds")
        times.grid(visible=False, axis="y")
        for name, marker in (("p50", "o"), ("p99", "D"), ("max", ">")):
            values = [getattr(median, f"{name}_us") / 1000 for median in medians]
            latencies.scatter(values, places, marker=marker, label=name, c=COLORS, clip_on=False, zorder=3)
        latencies.set_xscale("log")
        latencies.xaxis.set_major_formatter("{x:g}")
        latencies.set_yticks(places, [""] * len(TITLES))
        latencies.set_ylim(-0.5, len(TITLES) - 0.5)
        latencies.set_title(f"{kind}: wake-up latency")
        latencies.set_xlabel("milliseconds, logarithmic")
    legend_beside(figure, panels[0][1], columns=3)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=3)
    given = arguments.parse_args()
    if os.geteuid() != 0:
        print("a real node needs root", file=sys.stderr)
        return 1
    try:
        found = measure(given.rounds)
    except (BuildFailed, FetchFailed, NoControlGroups, NoMachineHere) as missing:
        sys.exit(str(missing))
    for kind, size in zip(KINDS, (POD, GUEST), strict=True):
        print(
            f"{kind}: {size.iterations / 1e6:.0f} million steps, then {size.wake_ups} wake-ups, one every "
            f"{size.interval_us} µs"
        )
    print(f"{len(os.sched_getaffinity(0))} CPUs, {NEIGHBOURS} busy neighbours, {given.rounds} rounds\n")
    print(report(found))
    print_plot("neighbours", partial(draw, found), title="The same job alone and beside busy neighbours")
    return 0


if __name__ == "__main__":
    sys.exit(main())
