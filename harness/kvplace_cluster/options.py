"""The options of `./make cluster`, readable before anything is installed: the standard library only."""

from __future__ import annotations

import argparse

from kvplace.machines.server_types import machine_names


def parser() -> argparse.ArgumentParser:
    """Make the parser of the target's options."""
    made = argparse.ArgumentParser(
        prog="./make cluster",
        description="Run a cluster with KubeVirt, kvplace and hollow nodes on loopback until Ctrl-C.",
    )
    made.add_argument("--nodes", type=int, default=3, help="hollow nodes (default: 3)")
    made.add_argument("--replicas", type=int, default=2, help="replicas of kvplace serve (default: 2)")
    made.add_argument(
        "--machine",
        default="2x-epyc-7763-nps4",
        choices=machine_names(),
        help="what every node is made of",
    )
    return made
