"""`kvplace-hook`: the sidecar's process, and the probe that asks whether it is ready.

kvplace-hook [serve]    answer KubeVirt until SIGTERM, or until it reports Shutdown where nothing else ends
                        this container
kvplace-hook ready      exit 0 as soon as the hook answers and this pod's placement is there and its CPUs
                        are protected, after 10 seconds 1 and why, or 0 where the VM may float;
                        with --once report it at once
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

_STDOUT, _STDERR = 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and give its exit code."""
    gc.disable()  # what is created at start stays, and collections would take a twelfth of the start
    words = list(sys.argv[1:] if argv is None else argv)
    if words in ([], ["serve"]):
        # Linux drops signals that the first process of a container does not handle, and the kubelet sends
        # this one once: a pod deleted during our start would end only after its whole grace period.
        signal.signal(signal.SIGTERM, _end)
    from kvplace.core.errors import ExitCode, KvplaceError
    from kvplace.hook.pod_environment import PodEnvironment

    try:
        match words:
            case [] | ["serve"]:
                from kvplace.hook.server import serve

                serve(PodEnvironment.of())
            case ["ready"]:
                from kvplace.hook.readiness import wait_until_ready

                wait_until_ready(PodEnvironment.of())
            case ["ready", "--once"]:
                from kvplace.hook.readiness import check_ready

                check_ready(PodEnvironment.of())
            case ["--version"]:
                from kvplace import __version__

                _say(_STDOUT, f"kvplace-hook {__version__}")
            case ["--help" | "-h"]:
                _say(_STDOUT, (__doc__ or "").strip())
            case _:
                _say(_STDERR, f"kvplace-hook: no command {' '.join(words)!r}; use serve, ready or --help")
                return ExitCode.USAGE
    except KvplaceError as error:
        _say(_STDERR, f"kvplace-hook: {error}")
        return ExitCode.FAILED
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    return ExitCode.DONE


def _end(_: int, __: FrameType | None) -> None:
    sys.exit()


def _say(stream: int, text: str) -> None:
    os.write(stream, text.encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
