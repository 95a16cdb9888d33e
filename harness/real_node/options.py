"""The options of `./make node`, readable before anything is installed: the standard library only."""

from __future__ import annotations

import argparse
from pathlib import Path


def parser() -> argparse.ArgumentParser:
    """Make the parser of the target's options."""
    made = argparse.ArgumentParser(
        prog="./make node",
        description="Run real nodes with KubeVirt and kvplace in sandboxes on this machine until Ctrl-C.",
    )
    made.add_argument("--nodes", type=int, default=1, choices=range(1, 9), help="default: 1")
    made.add_argument(
        "--without-kvplace", action="store_true", help="to install it as docs/install.md states"
    )
    made.add_argument("--logs", type=Path, help="folder that keeps the logs of all servers")
    return made
