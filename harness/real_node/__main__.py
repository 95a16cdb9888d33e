"""`./make node`: a cluster with real nodes and kvplace to try by hand, until Ctrl-C.

The same pieces as in the tests: `kubectl apply -f` of a VM that fits this machine makes a QEMU process; its
threads are pinned. `--without-kvplace` leaves its installation to a reader of docs/install.md. On PATH
there is also a command with the name of each node, which runs another one there. Needs root. Leaves nothing
behind.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import sys
import tempfile
from pathlib import Path

from harness.build_cache import BuildFailed
from harness.control_plane.kubevirt_parts import FEATURE_GATES
from harness.control_plane.programs import KUBERNETES, KUBEVIRT, folder_with_kubectl
from harness.go_build import built
from harness.node_programs.programs import node_programs
from harness.real_node.cluster import RealCluster
from harness.real_node.control_groups import NoControlGroups, hierarchies
from harness.real_node.images import node_image_archives
from harness.real_node.kvplace_pods import COMPONENT, install_kvplace, write_component
from harness.real_node.node import RealNode
from harness.real_node.options import parser

_BARE = """\
{nodes} real nodes and KubeVirt at {url}; logs in {logs}
follow docs/install.md, with {component} beside manifests/
and `components: [../{name}]` in my-cluster/kustomization.yaml
on a node: node-1 COMMAND
Ctrl-C ends everything"""
_EXAMPLE = """\
{nodes} real nodes, KubeVirt and kvplace at {url}; logs in {logs}
try: kubectl apply -f - <<'END'
apiVersion: kubevirt.io/v1
kind: VirtualMachineInstance
metadata: {{name: small, annotations: {{cpu-set: any}}}}
spec:
  terminationGracePeriodSeconds: 0
  domain:
    cpu: {{cores: 1}}
    memory: {{guest: 64Mi}}
    devices: {{}}
END
     kubectl get pods,vmi,nodeledgers -o wide
Ctrl-C ends everything"""


_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(arguments: list[str] | None = None) -> int:
    """Run the cluster until a signal ends it; returns the exit code."""
    options = parser().parse_args(arguments)
    if os.geteuid() != 0:
        print("./make node needs root: it makes namespaces, mounts and control groups", file=sys.stderr)
        return 1
    for number in _ENDING:
        signal.signal(number, _end)
    try:
        hierarchies(Path("/proc/self/mountinfo").read_text())
        built(KUBERNETES)
        with contextlib.ExitStack() as stack:
            _start(options, stack)
            while True:
                signal.pause()
    except KeyboardInterrupt:
        return 0
    except (BuildFailed, NoControlGroups) as failed:
        print(failed, file=sys.stderr)
        return 1


def _end(_number: int, _frame: object) -> None:
    """Unwind, also a start that is under way; a second signal does not disturb that."""
    for number in _ENDING:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _start(options: argparse.Namespace, stack: contextlib.ExitStack) -> None:
    logs = options.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvplace-logs-")))
    logs.mkdir(parents=True, exist_ok=True)
    names = [f"node-{number}" for number in range(1, options.nodes + 1)]
    cluster = stack.enter_context(
        RealCluster(
            node_programs(),
            built(KUBEVIRT),
            node_image_archives(kvplace=not options.without_kvplace),
            logs,
            kubelets={name: {"cpuManagerPolicy": "none"} for name in names},
            feature_gates=() if options.without_kvplace else FEATURE_GATES,
        )
    )
    plane, services = cluster.plane, next(iter(cluster.nodes.values())).sandbox.service_subnet
    replicas = min(2, len(names))
    if options.without_kvplace:
        write_component(plane.folder, services, replicas=replicas)
        example = _BARE
    else:
        install_kvplace(plane, services, replicas=replicas)
        example = _EXAMPLE
    folder = folder_with_kubectl(plane.programs, plane.folder)
    for node in cluster.nodes.values():
        _write_command(folder / node.name, node)
    print(f"export KUBECONFIG={shlex.quote(str(plane.kubeconfig))}")
    print(f"export PATH={shlex.quote(str(folder))}:$PATH", flush=True)
    component = plane.folder / COMPONENT
    said = example.format(nodes=len(names), url=plane.url, logs=logs, component=component, name=COMPONENT)
    print(said, file=sys.stderr)


def _write_command(path: Path, node: RealNode) -> None:
    """Write a script that runs its arguments on a node."""
    inside = node.sandbox.command([], {"PATH": node.runtime.programs.search_path})
    path.write_text(f'#!/bin/sh\nexec {shlex.join(inside)} "$@"\n')
    path.chmod(0o755)


if __name__ == "__main__":
    sys.exit(main())
