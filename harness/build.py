"""`python -m harness.build [control-plane] [node]` builds what the tests run against, ahead of a test run."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from dev.step import in_ci
from harness.build_cache import BuildFailed, NotInstalled
from harness.control_plane.programs import ALERTS, HELM, KUBERNETES, KUBEVIRT, PUBLISHING
from harness.go_build import built
from harness.node_programs.programs import NODE_MODULES

GROUPS = {"control-plane": (KUBERNETES, KUBEVIRT, HELM, ALERTS, PUBLISHING), "node": NODE_MODULES}


def main(names: Sequence[str]) -> int:
    """Build the Go modules of groups, all by default, and say the folder of each; returns the exit code.

    What a real node needs may be missing outside CI: its tests are then skipped.
    """
    try:
        for name in names or GROUPS:
            for module in GROUPS[name]:
                try:
                    print(built(module), file=sys.stderr)
                except NotInstalled as missing:
                    if name != "node" or in_ci():
                        raise
                    print(missing, file=sys.stderr)
    except BuildFailed as failed:
        print(failed, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
