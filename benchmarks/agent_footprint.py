"""Cost of an agent on an idle node: memory, import by import, and CPU.

    python -m benchmarks.agent_footprint [--pods 110] [--seconds 60]

The agent runs as on a node: with a service account's token, against a real API server. It watches a node
with the given number of running pods of one container each, and it sets cpusets. The containers are cgroups
in a tree of their own, so that the agent changes nothing else on this machine; that needs root. Bytecode is
compiled, and the environment is that of its image. *anonymous* memory is the part of the resident memory
that a further process costs, since pages of files are shared. Imports are measured in one process, one after
the other. CPU is the time of the process over the idle period, as a share of one core. `node_agent` measures
the cost of VMs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks._tables import table
from harness.control_plane.cluster import ControlPlane, RequestRefused

MANIFESTS = Path(__file__).resolve().parent.parent / "manifests"
NODE = "worker"
IMPORTS = (
    "asyncio",
    "msgspec",
    "tenacity",
    "prometheus_client",
    "aiohttp",
    "aiohttp.web",
    "google.protobuf.message_factory",
    "kvplace.agent.process",
)
ENVIRONMENT = {"PYTHONMALLOC": "malloc", "MALLOC_ARENA_MAX": "1", "SSL_CERT_FILE": "/dev/null"}
"""As in images/agent/Containerfile."""
_MEASURE_IMPORTS = """
import sys
def size():
    fields = dict(line.split(":") for line in open("/proc/self/status") if line.startswith("Rss"))
    return [int(fields[name].split()[0]) for name in ("RssAnon", "RssFile")]
print("python", *size())
for name in sys.argv[1:]:
    __import__(name)
    print(name, *size())
"""
_START = """
import sys
from pathlib import Path
from kvplace.kube import credentials
credentials.SERVICE_ACCOUNT = Path(sys.argv[1])
from kvplace.agent.process import run
from kvplace.agent.this_machine import AgentSettings
from kvplace.core.node_topology import Enforcement
host, enforcement = Path(sys.argv[2]), Enforcement.CGROUP
run(AgentSettings("worker", Address("127.0.0.1", 18082), host=host, enforcement=enforcement))
"""


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pods", type=int, default=110)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as bytecode:
        environment = {**os.environ, **ENVIRONMENT, "PYTHONPYCACHEPREFIX": bytecode}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        measure_imports(environment)  # writes the bytecode
        imports = measure_imports(environment)
        print(table(("import", "resident MiB", "+", "anonymous MiB", "+"), imports))
        with ControlPlane() as plane, containers() as cgroups:
            for uid in node_with_pods(plane, options.pods):
                cgroups.add(uid)
            print(running(plane, environment, cgroups.host, options.pods, options.seconds))
    return 0


def measure_imports(environment: dict[str, str]) -> list[tuple[str, ...]]:
    """Measure each import of a new process."""
    answer = subprocess.run(
        [sys.executable, "-c", _MEASURE_IMPORTS, *IMPORTS],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    rows: list[tuple[str, ...]] = []
    last = (0, 0)
    for line in answer.stdout.splitlines():
        name, anonymous, of_files = line.split()
        now = (int(anonymous) + int(of_files), int(anonymous))
        grown = [f"{(new - old) / 1024:.1f}" for new, old in zip(now, last, strict=True)]
        rows.append((name, f"{now[0] / 1024:.1f}", grown[0], f"{now[1] / 1024:.1f}", grown[1]))
        last = now
    return rows


class Containers:
    """Cgroups of containers below one that stands in for the root of a host's."""

    def __init__(self, host: Path, root: Path) -> None:
        self.host = host
        self._root = root
        self._inherit(root)
        self._pods = self._make(root / "kubepods")

    def add(self, uid: str) -> None:
        """Make the cgroup of a pod with one container."""
        pod = self._make(self._pods / f"pod{uid}")
        self._make(pod / uid.replace("-", "").ljust(64, "0"))

    def remove(self) -> None:
        """Remove all of them."""
        for folder in sorted(self._root.rglob("*/"), reverse=True):
            folder.rmdir()
        self._root.rmdir()

    def _make(self, folder: Path) -> Path:
        folder.mkdir()
        self._inherit(folder)
        return folder

    def _inherit(self, folder: Path) -> None:
        for name in ("cpuset.mems", "cpuset.cpus"):
            (folder / name).write_text((folder.parent / name).read_text())


@contextlib.contextmanager
def containers() -> Iterator[Containers]:
    """Make a host with cgroups of its own and with this machine's other files."""
    mounted = Path("/sys/fs/cgroup/cpuset")
    if os.geteuid() != 0 or not mounted.is_dir():
        sys.exit("this benchmark needs root and cpusets of version 1 in /sys/fs/cgroup/cpuset")
    root = mounted / f"kvplace-benchmark-{os.getpid()}"
    root.mkdir()
    with tempfile.TemporaryDirectory() as folder:
        host = Path(folder)
        (host / "sys/fs/cgroup").mkdir(parents=True)
        (host / "sys/fs/cgroup/cpuset").symlink_to(root)
        for name in ("proc", "sys/devices", "sys/kernel"):
            (host / name).symlink_to(Path("/") / name)
        made = Containers(host, root)
        try:
            yield made
        finally:
            made.remove()


def node_with_pods(plane: ControlPlane, pods: int) -> list[str]:
    """Install the rights of an agent, and make a node with running pods; returns their UIDs."""
    for folder in ("crd", "agent", "node-resource-topology"):
        plane.kubectl("apply", "--server-side", "-k", str(MANIFESTS / folder))
    plane.wait_for_crds()
    plane.request("POST", "/api/v1/nodes", {"metadata": {"name": NODE, "labels": {"a": "b"}}})
    path = "/api/v1/namespaces/default/pods"
    uids = []
    for number in range(pods):
        name = f"pod-{number}"
        spec = {"nodeName": NODE, "containers": [{"name": "main", "image": "example.test/main"}]}
        made = plane.request("POST", path, {"metadata": {"name": name}, "spec": spec})
        uids.append(made["metadata"]["uid"])
        plane.request(
            "PATCH",
            f"{path}/{name}/status",
            {"status": {"phase": "Running"}},
            content_type="application/merge-patch+json",
        )
    return uids


def running(plane: ControlPlane, environment: dict[str, str], host: Path, pods: int, seconds: float) -> str:
    """Run an agent and measure it when it has settled."""
    pod = plane.request(
        "POST",
        "/api/v1/namespaces/kvplace-agent/pods",
        {
            "metadata": {"name": "agent"},
            "spec": {
                "nodeName": NODE,
                "serviceAccountName": "kvplace-agent",
                "containers": [{"name": "agent", "image": "example.test/agent"}],
            },
        },
    )["metadata"]
    reference = {"kind": "Pod", "apiVersion": "v1", "name": pod["name"], "uid": pod["uid"]}
    token = plane.request(
        "POST",
        "/api/v1/namespaces/kvplace-agent/serviceaccounts/kvplace-agent/token",
        {"spec": {"boundObjectRef": reference}},
    )["status"]["token"]
    account = plane.folder / "account"
    account.mkdir()
    (account / "token").write_text(token)
    (account / "ca.crt").write_bytes(plane.ca_file.read_bytes())
    address = urlsplit(plane.url)
    environment = {
        **environment,
        "KUBERNETES_SERVICE_HOST": str(address.hostname),
        "KUBERNETES_SERVICE_PORT": str(address.port),
        "HOME": str(account),
    }
    environment.pop("KUBECONFIG", None)
    process = subprocess.Popen([sys.executable, "-c", _START, str(account), str(host)], env=environment)
    try:
        wait_until_published(plane)
        time.sleep(10)  # what the start has left to do
        before, began = cpu_seconds(process.pid), time.monotonic()
        time.sleep(seconds)
        used = cpu_seconds(process.pid) - before
        share = used / (time.monotonic() - began)
        memory = memory_of(process.pid)
        with urllib.request.urlopen("http://127.0.0.1:18082/metrics") as answer:
            writes = [
                line
                for line in answer.read().decode().splitlines()
                if line.startswith("kvplace_agent_writes_total")
            ]
    finally:
        process.terminate()
        process.wait()
    rows = [
        ("resident", f"{memory['Rss'] / 1024:.1f} MiB"),
        ("anonymous", f"{memory['Anonymous'] / 1024:.1f} MiB"),
        ("CPU, idle", f"{share:.2%} of a core"),
        ("CPU until ready", f"{before:.2f} s"),
        ("writes to the API server", str(sum(int(float(line.rpartition(" ")[2])) for line in writes))),
    ]
    return "\n" + table((f"running, {pods} pods", ""), rows)


def wait_until_published(plane: ControlPlane) -> None:
    """Wait for the status of the node's NodeTopology."""
    path = "/apis/kvplace.io/v1alpha1/nodetopologies"
    for _ in range(600):
        with contextlib.suppress(RequestRefused):  # while the API server takes the new kind into use
            if any("conditions" in item.get("status", {}) for item in plane.request("GET", path)["items"]):
                return
        time.sleep(0.1)
    raise TimeoutError("the agent has published nothing in a minute")


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(fields[index]) for index in (11, 12, 13, 14)) / os.sysconf("SC_CLK_TCK")


def memory_of(pid: int) -> dict[str, int]:
    """Return the sums of a process's mappings in KiB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {line.partition(":")[0]: int(line.split()[1]) for line in lines if line.endswith("kB")}


if __name__ == "__main__":
    sys.exit(main())
