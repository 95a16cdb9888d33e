"""`python -m harness.control_plane`: a cluster to try things on by hand, until Ctrl-C.

It is put together from the same pieces as the tests' cluster and leaves nothing behind, however it ends.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shlex
import signal
import sys
from pathlib import Path

from harness.build_cache import BuildFailed
from harness.control_plane.cluster import ControlPlane
from harness.control_plane.hollow_node import HollowNodes, NodeShape


def main(arguments: list[str] | None = None) -> int:
    """Run a cluster until a signal ends it; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        asyncio.run(_run(options))
    except BuildFailed as failed:
        print(failed, file=sys.stderr)
        return 1
    return 0


async def _run(options: argparse.Namespace) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with contextlib.AsyncExitStack() as cluster:
        plane = cluster.enter_context(ControlPlane(controller_manager=options.controller_manager))
        if options.scheduler:
            plane.add_scheduler()
        shapes = [
            NodeShape(f"node-{number}", cpus=options.cpus, memory=options.memory)
            for number in range(options.nodes)
        ]
        await cluster.enter_async_context(HollowNodes(plane, shapes))
        print(f"export KUBECONFIG={shlex.quote(str(plane.kubeconfig))}")
        print(f"export PATH={shlex.quote(str(kubectl_folder(plane)))}:$PATH", flush=True)
        print(f"{len(shapes)} hollow nodes at {plane.url}; Ctrl-C ends everything", file=sys.stderr)
        await ended.wait()


def kubectl_folder(plane: ControlPlane) -> Path:
    """Make a folder in which the program is called kubectl, which is all it needs to be kubectl."""
    folder = plane.folder / "bin"
    folder.mkdir()
    (folder / "kubectl").symlink_to(plane.programs / "kubernetes")
    return folder


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m harness.control_plane",
        description="Run a Kubernetes control plane with hollow nodes on loopback until Ctrl-C.",
    )
    parser.add_argument("--nodes", type=int, default=3, help="hollow nodes (default: 3)")
    parser.add_argument("--cpus", type=int, default=16, help="CPUs of each (default: 16)")
    parser.add_argument("--memory", default="64Gi", help="memory of each (default: 64Gi)")
    parser.add_argument(
        "--no-scheduler", dest="scheduler", action="store_false", help="start no default-scheduler"
    )
    parser.add_argument(
        "--controller-manager", action="store_true", help="also deployments, garbage collection and the like"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
