"""`kvplace-hook`: the sidecar's process, and the probe that asks whether it is ready.

kvplace-hook [serve]    answer KubeVirt until it says Shutdown
kvplace-hook ready      exit 0 when the hook answers and this pod's placement is there, else 1 and why
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvplace.core.errors import ExitCode, KvplaceError
from kvplace.hook.surroundings import Surroundings


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and give its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        match words:
            case [] | ["serve"]:
                from kvplace.hook.server import serve

                serve(Surroundings.of())
            case ["ready"]:
                from kvplace.hook.readiness import check_ready

                check_ready(Surroundings.of())
            case ["--version"]:
                from kvplace import __version__

                _say(sys.stdout.fileno(), f"kvplace-hook {__version__}")
            case ["--help" | "-h"]:
                _say(1, (__doc__ or "").strip())
            case _:
                _say(2, f"kvplace-hook: {' '.join(words)!r} is no command; use serve, ready or --help")
                return ExitCode.USAGE
    except KvplaceError as error:
        _say(2, f"kvplace-hook: {error}")
        return ExitCode.FAILED
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    return ExitCode.DONE


def _say(stream: int, text: str) -> None:
    import os

    os.write(stream, text.encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
