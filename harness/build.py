"""`python -m harness.build [control-plane] [node]` builds the programs for the tests, ahead of a test run."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from dev.step import in_ci
from harness.build_cache import BuildFailed, NotInstalled
from harness.control_plane.programs import ALERTS, HELM, KUBERNETES, KUBEVIRT, PUBLISHING
from harness.go_build import built
from harness.node_programs.programs import DRA_DRIVER_CPU, NODE_MODULES

CONTROL_PLANE, NODE = "control-plane", "node"
GROUPS = {
    **dict.fromkeys((KUBERNETES, KUBEVIRT), CONTROL_PLANE),
    **dict.fromkeys((*NODE_MODULES, DRA_DRIVER_CPU), NODE),
    **dict.fromkeys((HELM, ALERTS, PUBLISHING), CONTROL_PLANE),
}
"""The group of each module; modules of the tests come first."""


def main(names: Sequence[str]) -> int:
    """Build the Go modules of groups, all by default, and state the folder of each; returns the exit code.

    The programs of a real node may be missing outside CI: its tests are then skipped.
    """
    try:
        for module, group in GROUPS.items():
            if names and group not in names:
                continue
            try:
                print(built(module), file=sys.stderr)
            except NotInstalled as missing:
                if group != NODE or in_ci():
                    raise
                print(missing, file=sys.stderr)
    except BuildFailed as failed:
        print(failed, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
