"""`python -m harness.build` builds everything that the tests run against, ahead of a test run."""

from __future__ import annotations

import sys

from harness.build_cache import BuildFailed
from harness.control_plane.programs import KUBERNETES, KUBEVIRT
from harness.go_build import built
from harness.node_programs.programs import NODE_MODULES


def main() -> int:
    """Build all Go modules, and print the folder of each; returns the exit code."""
    try:
        for module in (KUBERNETES, KUBEVIRT, *NODE_MODULES):
            print(built(module), flush=True)
    except BuildFailed as failed:
        print(failed, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
