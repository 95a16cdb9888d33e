"""`python -m harness.kvplace_cluster`: a cluster with KubeVirt and kvplace to try by hand, until Ctrl-C.

The same pieces as in the tests of the whole way: `kubectl apply -f vm-templates/web-server.yaml` makes a
VM that is admitted, placed, bound and Scheduled; only QEMU is missing. Leaves
nothing behind.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shlex
import signal
import sys
import tempfile
from pathlib import Path

from harness.build_cache import BuildFailed
from harness.control_plane.cluster import ControlPlane, RequestRefused
from harness.control_plane.containers import Image, ProcessRunner, python_image
from harness.control_plane.hollow_node import HollowNodes
from harness.control_plane.kubevirt_parts import KubeVirt
from harness.control_plane.programs import KUBERNETES, KUBEVIRT, folder_with_kubectl
from harness.go_build import built
from harness.kvplace_cluster.installation import SIDECAR_IMAGE, Installation
from harness.kvplace_cluster.machines import node_shape, write_machine
from harness.kvplace_cluster.options import parser
from kvplace.core.topology import Topology
from kvplace.machines.server_types import read_machine


def main(arguments: list[str] | None = None) -> int:
    """Run the cluster until a signal ends it; returns the exit code."""
    options = parser().parse_args(arguments)
    try:
        topology = read_machine(options.machine)
        built(KUBERNETES)
        asyncio.run(_run(options, topology, built(KUBEVIRT)))
    except (BuildFailed, FileNotFoundError) as failed:
        print(failed, file=sys.stderr)
        return 1
    return 0


async def _run(options: argparse.Namespace, topology: Topology, kubevirt: Path) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with contextlib.AsyncExitStack() as cluster:
        plane = cluster.enter_context(ControlPlane())
        with contextlib.suppress(RequestRefused):  # Some API servers make it themselves.
            plane.create_service_account("default", "default")
        plane.add_scheduler()
        cluster.enter_context(KubeVirt(plane, kubevirt))
        installation = cluster.enter_context(Installation(plane, replicas=options.replicas))
        installation.add_scheduler(installation.replicas[0])
        folder = Path(cluster.enter_context(tempfile.TemporaryDirectory()))
        os.chmod(folder, 0o755)  # noqa: PTH101 - not worth a thread

        image = python_image("kvplace.hook")
        seen = write_machine(folder, topology)
        runner = ProcessRunner(
            {SIDECAR_IMAGE: Image(image.entrypoint, image.command, {**image.environment, **seen})}
        )
        names = [f"node-{number}" for number in range(options.nodes)]
        await cluster.enter_async_context(
            HollowNodes(plane, [node_shape(name, topology) for name in names], runner=runner)
        )
        for name in names:
            installation.describe(name, topology, writer="kubectl")  # no agent runs there
        print(f"export KUBECONFIG={shlex.quote(str(plane.kubeconfig))}")
        print(f"export PATH={shlex.quote(str(_commands(plane)))}:$PATH", flush=True)
        print(
            f"{len(names)} hollow nodes ({options.machine}), KubeVirt and kvplace at {plane.url}\n"
            "try: kubectl apply -f vm-templates/web-server.yaml; kubectl kvplace get vms\n"
            "the web map: kubectl kvplace web\n"
            "`kubectl kvplace doctor` misses serve, scheduler and agent: here they are not pods\n"
            "Ctrl-C ends everything",
            file=sys.stderr,
        )
        await ended.wait()


def _commands(plane: ControlPlane) -> Path:
    """Make a folder with kubectl and the commands of kvplace, as plugins and by themselves."""
    folder = folder_with_kubectl(plane.programs, plane.folder)
    for command in sorted(Path(sys.executable).parent.glob("*kvplace")):
        (folder / command.name).symlink_to(command)
    return folder


if __name__ == "__main__":
    sys.exit(main())
