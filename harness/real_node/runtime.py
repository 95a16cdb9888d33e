"""containerd in a sandbox, with the container runtime interface and NRI on.

It runs without a kubelet, too: `crictl` makes pods and containers then.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.node_programs.image import archive
from harness.node_programs.programs import NodePrograms
from harness.node_programs.small_images import pause
from harness.real_node.sandbox import CommandFailed, Sandbox

CONTAINERD_SOCKET = "/run/containerd/containerd.sock"
NRI_SOCKET = "/run/nri/nri.sock"

# The images of the kubelet's pods; images of pods without a kubelet are found there, too.
_NAMESPACE = "k8s.io"

# The kubelet's choice; without it a container's first process is the pod's.
_OWN_PROCESSES = {"namespace_options": {"pid": 1}}

_CONFIGURATION = """\
version = 3
root = '/var/lib/containerd'
state = '/run/containerd'
disabled_plugins = [
  'io.containerd.internal.v1.opt', 'io.containerd.tracing.processor.v1.otlp',
  'io.containerd.snapshotter.v1.btrfs', 'io.containerd.snapshotter.v1.blockfile',
  'io.containerd.snapshotter.v1.erofs',
]
[grpc]
  address = '{socket}'
[plugins.'io.containerd.cri.v1.images']
  snapshotter = 'overlayfs'
  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = '{pause}'
[plugins.'io.containerd.cri.v1.runtime']
  # Lowering a process's oom_score_adj needs CAP_SYS_RESOURCE, which test machines may lack.
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins.'io.containerd.cri.v1.runtime'.containerd]
    default_runtime_name = 'runc'
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
      runtime_type = 'io.containerd.runc.v2'
      [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
        BinaryName = '{runc}'
        SystemdCgroup = false
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ['{cni}']
    conf_dir = '/etc/cni/net.d'
{more}"""


class ContainerRuntime:
    """containerd running in a sandbox."""

    def __init__(self, sandbox: Sandbox, programs: NodePrograms, *, more_configuration: str = "") -> None:
        """Configure and start it; `more_configuration` is TOML put behind ours."""
        self.sandbox = sandbox
        self.programs = programs
        sandbox.write(
            "/etc/containerd/config.toml",
            _CONFIGURATION.format(
                socket=CONTAINERD_SOCKET,
                pause=pause().reference,
                runc=programs.runc,
                cni=programs.cni_folder,
                more=more_configuration,
            ),
        )
        sandbox.write("/etc/cni/net.d/10-kvplace.conflist", json.dumps(self._network()))
        sandbox.write("/etc/crictl.yaml", f"runtime-endpoint: unix://{CONTAINERD_SOCKET}\n")
        self.start()
        self.import_image(archive(pause()))

    @property
    def nri_socket(self) -> Path:
        """Where NRI plugins connect, as this machine reaches it."""
        return self.sandbox.path(NRI_SOCKET)

    @property
    def containerd_socket(self) -> Path:
        """Its own socket, as this machine reaches it."""
        return self.sandbox.path(CONTAINERD_SOCKET)

    def start(self) -> None:
        """Start it (again, after `server.kill()`) and wait until it answers."""
        self.server = self.sandbox.start(
            "containerd",
            self.programs.containerd,
            "--config=/etc/containerd/config.toml",
            environment=self._environment(),
        )
        self.server.wait_until(self._answers, "answer")

    def import_image(self, archive: Path) -> None:
        """Add an image from an archive in the OCI layout."""
        self.ctr("images", "import", archive)

    def ctr(self, *arguments: str | Path) -> str:
        """Run containerd's own client in the namespace of the kubelet's containers."""
        return self._client(self.programs.ctr, f"--namespace={_NAMESPACE}", *arguments)

    def crictl(self, *arguments: str | Path) -> str:
        """Run a command of the container runtime interface; it may take longer than the usual 2 s."""
        return self._client(self.programs.crictl, "--timeout=60s", *arguments)

    # Pods without a kubelet

    def run_pod(
        self,
        name: str,
        *,
        namespace: str = "default",
        annotations: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        cgroup_parent: str | None = None,
    ) -> Pod:
        """Start a pod's sandbox as the kubelet does, with its labels, annotations and parent group."""
        uid = f"uid-of-{namespace}-{name}"
        configuration = {
            "metadata": {"name": name, "namespace": namespace, "uid": uid, "attempt": 0},
            "hostname": name,
            "labels": {
                "io.kubernetes.pod.name": name,
                "io.kubernetes.pod.namespace": namespace,
                "io.kubernetes.pod.uid": uid,
                **(labels or {}),
            },
            "annotations": dict(annotations or {}),
            "log_directory": f"/var/log/pods/{namespace}_{name}_{uid}",
            "linux": {
                "cgroup_parent": cgroup_parent or f"/kubepods/pod{uid}",
                "security_context": _OWN_PROCESSES,
            },
        }
        file = f"/run/kvplace-tests/{uid}.json"
        self.sandbox.write(file, json.dumps(configuration))
        return Pod(self, self.crictl("runp", file).strip(), uid, file)

    def _client(self, program: Path, *arguments: str | Path) -> str:
        return self.sandbox.run(program, *arguments, environment=self._environment())

    def _environment(self) -> dict[str, str]:
        return {"PATH": self.programs.search_path}

    def _answers(self) -> bool:
        with contextlib.suppress(CommandFailed):
            self.crictl("version")
            return self.nri_socket.exists()
        return False

    def _network(self) -> dict[str, Any]:
        addresses = {
            "type": "host-local",
            "ranges": [[{"subnet": self.sandbox.pod_subnet}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        }
        plugin = {"type": "ptp", "ipMasq": False, "ipam": addresses}
        return {"cniVersion": "1.0.0", "name": "kvplace", "plugins": [plugin]}


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod made without a kubelet."""

    runtime: ContainerRuntime
    sandbox_id: str
    uid: str
    configuration: str

    def create_container(
        self,
        name: str,
        command: Sequence[str],
        *,
        image: str,
        cpuset_cpus: str = "",
        annotations: Mapping[str, str] | None = None,
    ) -> Container:
        """Create a container without starting it."""
        described = {
            "metadata": {"name": name, "attempt": 0},
            "image": {"image": image},
            "command": list(command),
            "labels": {"io.kubernetes.container.name": name, "io.kubernetes.pod.uid": self.uid},
            "annotations": dict(annotations or {}),
            "log_path": f"{name}.log",
            "linux": {
                "resources": {"cpu_shares": 2, "cpuset_cpus": cpuset_cpus},
                "security_context": _OWN_PROCESSES,
            },
        }
        file = f"/run/kvplace-tests/{self.uid}-{name}.json"
        self.runtime.sandbox.write(file, json.dumps(described))
        created = self.runtime.crictl("create", self.sandbox_id, file, self.configuration)
        return Container(self.runtime, created.strip())

    def run_container(
        self, name: str, command: Sequence[str], *, image: str, cpuset_cpus: str = ""
    ) -> Container:
        """Create a container and start it."""
        container = self.create_container(name, command, image=image, cpuset_cpus=cpuset_cpus)
        container.start()
        return container

    def remove(self) -> None:
        """Stop and remove the pod with its containers."""
        self.runtime.crictl("rmp", "--force", self.sandbox_id)


@dataclass(frozen=True, slots=True)
class Container:
    """A container made without a kubelet."""

    runtime: ContainerRuntime
    id: str

    def start(self) -> None:
        self.runtime.crictl("start", self.id)

    def stop(self) -> None:
        """Stop it at once."""
        self.runtime.crictl("stop", "--timeout=0", self.id)

    def remove(self) -> None:
        self.runtime.crictl("rm", "--force", self.id)

    def update(self, *flags: str) -> None:
        """Change its resources as the kubelet does; `flags` are flags of `crictl update`."""
        self.runtime.crictl("update", *flags, self.id)

    def run(self, *command: str) -> str:
        """Run a command in it."""
        return self.runtime.crictl("exec", self.id, *command)

    @property
    def pid(self) -> int:
        """Its first process, as the sandbox counts."""
        return int(json.loads(self.runtime.crictl("inspect", self.id))["info"]["pid"])

    def cpuset(self) -> str:
        """Read the CPUs that the kernel lets it use, from its control group."""
        return self.runtime.sandbox.cpuset(self.pid)
