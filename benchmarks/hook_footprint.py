"""Memory and time of the hook sidecar, compared with a bare Python process.

    ./make bench hook_footprint, or .venv/bin/python -m benchmarks.hook_footprint [--rounds N] [--calls N]

The hook is laid out as in its image: only its own modules and packages, bytecode compiled, page cache warm.
Memory is that of the server in /proc/PID/smaps_rollup. *private* is the cost of each further VM on a node,
since sidecars of one image share the pages of files. *ready* is the time from the start of the process to
its answer to Info, without a limit and at 200m CPU (20 ms of every 100 ms, KubeVirt's default for sidecars);
the limit needs root and a cgroup. Times depend on the machine: compare the ratios to a bare Python.
"""

from __future__ import annotations

import argparse
import compileall
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, StreamEnded

from kvplace.core.cpuset import format_cpu_list, mask_of
from kvplace.core.protobuf import bytes_field

PROJECT = Path(__file__).resolve().parent.parent
PERIOD_US, QUOTA_US = 100_000, 20_000
INFO = "/kubevirt.hooks.info.Info/Info"
DEFINE = "/kubevirt.hooks.v1alpha3.Callbacks/OnDefineDomain"


class Hook:
    """A hook process with a pod folder of its own, started in a CPU cgroup when one is given."""

    def __init__(self, root: Path, cgroup: Path | None) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=root))
        (self.folder / "pod").mkdir()
        (self.folder / "pod/uid").write_text("uid-1")
        (self.folder / "pod/placement").write_text(placement_here())
        self.socket = self.folder / "hooks/kvplace-hook-sidecar-0.sock"
        self.environ = {
            "KVPLACE_POD_FOLDER": str(self.folder / "pod"),
            "KVPLACE_HOOK_FOLDER": str(self.folder / "hooks"),
            "CONTAINER_NAME": "hook-sidecar-0",
            "NODE_NAME": "worker-1",
        }
        self.program = str(root / "kvplace-hook")
        self.cgroup = cgroup
        self.began = time.monotonic()
        self.process = spawn([self.program, "serve"], cgroup, self.environ)

    def wait_for_info(self) -> float:
        """Seconds from the start to the first answer."""
        while True:
            try:
                self.ask(INFO, b"")
            except (FileNotFoundError, ConnectionRefusedError):
                if self.process.poll() is not None:
                    sys.exit("the hook ended before it served")
                time.sleep(0.001)
                continue
            return time.monotonic() - self.began

    def ask(self, path: str, message: bytes) -> bytes:
        """One unary call on a connection of its own, as KubeVirt makes it."""
        http = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        http.initiate_connection()
        headers = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "localhost")]
        http.send_headers(1, [*headers, ("content-type", "application/grpc"), ("te", "trailers")])
        body = b"\0" + len(message).to_bytes(4, "big") + message
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self.socket))
            for start in range(0, len(body), http.max_outbound_frame_size):
                http.send_data(1, body[start : start + http.max_outbound_frame_size])
            http.end_stream(1)
            connection.sendall(http.data_to_send())
            answer = b""
            while True:
                for event in http.receive_data(connection.recv(1 << 16)):
                    if isinstance(event, DataReceived):
                        answer += event.data
                        http.acknowledge_received_data(event.flow_controlled_length, 1)
                    elif isinstance(event, StreamEnded):
                        return answer[5:]
                connection.sendall(http.data_to_send())

    def probe(self) -> float:
        """Seconds that one `kvplace-hook ready` takes."""
        began = time.monotonic()
        if spawn([self.program, "ready"], self.cgroup, self.environ).wait(timeout=30) != 0:
            sys.exit("the hook is not ready")
        return time.monotonic() - began

    def end(self) -> None:
        self.process.terminate()
        if self.process.wait(timeout=30) != 0:
            sys.exit("the hook did not end with 0")


def placement_here() -> str:
    """A placement on the CPUs that this process may use."""
    cpus = format_cpu_list(mask_of(os.sched_getaffinity(0)))
    return (
        '{"version":1,"podUid":"uid-1","node":"worker-1","policy":"numa","vcpus":[],'
        f'"cpus":"{cpus}","emulatorCpus":"{cpus}","numaNodes":[0],"numaMemory":"preferred"}}'
    )


def reference_domain() -> bytes:
    """A domain of 32 vCPUs as large as KubeVirt's usually are."""
    disks = "".join(
        f'\t\t<disk device="disk" type="file"><target bus="virtio" dev="vd{letter}"></target>'
        f'<driver error_policy="stop" name="qemu" type="raw" discard="unmap"></driver></disk>\n'
        for letter in "abcdefghijklmnopqrst"
    )
    return f'<domain type="kvm">\n\t<devices>\n{disks}\t</devices>\n\t<vcpu>32</vcpu>\n</domain>'.encode()


def spawn(command: list[str], cgroup: Path | None, environ: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a command that is inside the cgroup from its first instruction."""
    if cgroup is not None:
        join = f"echo $$ >{cgroup}/cgroup.procs && exec {' '.join(command)}"
        command = ["/bin/sh", "-c", join]
    return subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL, cwd="/")


@contextmanager
def cpu_limit() -> Iterator[Path | None]:
    """A cgroup of 200m CPU, v2 or v1; None where we may not make one."""
    root = Path("/sys/fs/cgroup")
    v2 = (root / "cgroup.controllers").exists()
    folder = (root if v2 else root / "cpu") / f"kvplace-benchmark-{os.getpid()}"
    try:
        folder.mkdir()
        if v2:
            (folder / "cpu.max").write_text(f"{QUOTA_US} {PERIOD_US}")
        else:
            (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (folder / "cpu.cfs_quota_us").write_text(str(QUOTA_US))
    except OSError as error:
        print(f"no CPU limit can be set here: {error}", file=sys.stderr)
        yield None
        return
    try:
        yield folder
    finally:
        folder.rmdir()


def image_root(root: Path) -> None:
    """Lay the hook out as its image does, with compiled bytecode and this Python."""
    for name in ("__init__.py", "core", "domainxml", "hook", "linux"):
        source = PROJECT / "kvplace" / name
        target = root / "kvplace" / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            target.parent.mkdir()
            shutil.copy(source, target)
    for name in ("h2", "hpack", "hyperframe", "lxml"):
        package = __import__(name)
        shutil.copytree(Path(package.__file__ or "").parent, root / name)
    compileall.compile_dir(root, quiet=1)
    text = (PROJECT / "hooks/kvplace-hook").read_text().partition("\n")[2].replace("/opt/kvplace", str(root))
    (root / "kvplace-hook").write_text(f"#!{sys.executable} -ISB\n{text}")
    (root / "kvplace-hook").chmod(0o755)


def memory_kib(pid: int) -> tuple[int, int]:
    """Resident and private KiB."""
    fields = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, amount, *_ = line.split()
        fields[name.rstrip(":")] = int(amount)
    return fields["Rss"], fields["Private_Clean"] + fields["Private_Dirty"]


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has used, which a busy machine blurs less than the time on the clock."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def bare_python(root: Path, cgroup: Path | None) -> tuple[float, float, tuple[int, int]]:
    """Seconds until a Python that does nothing has reported it, its CPU time and its memory."""
    script = root / "bare.py"
    script.write_text("import os\nos.write(1, b'x')\nos.read(0, 1)\n")
    began = time.monotonic()
    command = [sys.executable, "-ISB", str(script)]
    if cgroup is not None:
        command = ["/bin/sh", "-c", f"echo $$ >{cgroup}/cgroup.procs && exec {' '.join(command)}"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    if process.stdout is None or process.stdin is None:
        raise AssertionError
    process.stdout.read(1)
    took = time.monotonic() - began
    memory, cpu = memory_kib(process.pid), cpu_seconds(process.pid)
    process.stdin.write(b"x")
    process.communicate()
    return took, cpu, memory


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=11, help="starts of each kind; the table has medians")
    parser.add_argument("--calls", type=int, default=30, help="OnDefineDomain calls of each round")
    given = parser.parse_args()
    starts: dict[str, list[float]] = {
        f"{kind}{suffix}": [] for kind in ("bare", "hook") for suffix in ("", " CPU", " 200m")
    }
    sizes: dict[str, list[tuple[int, int]]] = {"bare": [], "idle": [], "after": []}
    calls: dict[str, list[float]] = {"hook": [], "hook 200m": []}
    probes: dict[str, list[float]] = {"hook": [], "hook 200m": []}
    root = Path(tempfile.mkdtemp(prefix="hook-footprint-"))
    try:
        image_root(root)
        message = bytes_field(1, reference_domain()) + bytes_field(2, b'{"metadata":{}}' + b" " * 24_000)
        with cpu_limit() as cgroup:
            limits: list[tuple[str, Path | None]] = [("", None)]
            limits += [(" 200m", cgroup)] if cgroup is not None else []
            for number in range(given.rounds + 1):
                for suffix, limit in limits:
                    took, cpu, size = bare_python(root, limit)
                    hook = Hook(root, limit)
                    ready = hook.wait_for_info()
                    hook_cpu = cpu_seconds(hook.process.pid)
                    idle = memory_kib(hook.process.pid)
                    times = []
                    for _ in range(given.calls if limit is None else 3):
                        began = time.monotonic()
                        if b"vcpupin" not in hook.ask(DEFINE, message):
                            sys.exit("the hook did not pin the domain")
                        times.append(time.monotonic() - began)
                    after = memory_kib(hook.process.pid)
                    probe = hook.probe()
                    hook.end()
                    if number == 0:
                        continue  # warms the page cache
                    starts[f"bare{suffix}"].append(took)
                    starts[f"hook{suffix}"].append(ready)
                    calls[f"hook{suffix}"].append(statistics.median(times))
                    probes[f"hook{suffix}"].append(probe)
                    if limit is None:
                        starts["bare CPU"].append(cpu)
                        starts["hook CPU"].append(hook_cpu)
                        sizes["bare"].append(size)
                        sizes["idle"].append(idle)
                        sizes["after"].append(after)
    finally:
        shutil.rmtree(root)
    report(starts, sizes, {"one OnDefineDomain": calls, "one readiness probe": probes})


def report(
    starts: dict[str, list[float]],
    sizes: dict[str, list[tuple[int, int]]],
    others: dict[str, dict[str, list[float]]],
) -> None:
    """Print medians, and their ratio to a bare Python's."""
    resident, private = (
        {name: statistics.median(pair[index] for pair in pairs) / 1024 for name, pairs in sizes.items()}
        for index in (0, 1)
    )
    print(f"{'':34}{'hook':>10}{'Python':>10}{'ratio':>8}")
    for label, by_name, name in (
        ("resident, idle (MiB)", resident, "idle"),
        ("resident, after calls (MiB)", resident, "after"),
        ("private, idle (MiB)", private, "idle"),
        ("private, after calls (MiB)", private, "after"),
    ):
        row(label, by_name[name], by_name["bare"], 1)
    cpu_ms = [statistics.median(starts[f"{kind} CPU"]) * 1000 for kind in ("hook", "bare")]
    row("CPU time until ready (ms)", cpu_ms[0], cpu_ms[1], 0)
    for suffix, label in (("", "no limit"), (" 200m", "200m CPU")):
        if starts[f"hook{suffix}"]:
            medians = [statistics.median(starts[f"{kind}{suffix}"]) * 1000 for kind in ("hook", "bare")]
            row(f"ready, {label} (ms)", medians[0], medians[1], 0)
            for name, times in others.items():
                print(
                    f"{f'{name}, {label} (ms)':34}{statistics.median(times[f'hook{suffix}']) * 1000:>10.0f}"
                )


def row(label: str, hook: float, bare: float, digits: int) -> None:
    """Print one line of the table."""
    print(f"{label:34}{hook:>10.{digits}f}{bare:>10.{digits}f}{hook / bare:>8.2f}")


if __name__ == "__main__":
    main()
