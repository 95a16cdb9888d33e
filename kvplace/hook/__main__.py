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
    gc.disable()  # objects of the start stay, and collections would take a twelfth of the start
    words = list(sys.argv[1:] if argv is None else argv)
    if words in ([], ["serve"]):
        # Linux drops signals that the first process of a container does not handle, and the kubelet sends
        # this one once: a pod deleted during our start would end only after its whole grace period.
        signal.signal(signal.SIGTERM, _end)
    from kvplace.core.errors import ExitCode, KvplaceError
    from kvplace.hook.process import PodEnvironment

    try:
        match words:
            case [] | ["serve"]:
                from kvplace.hook.server import serve

                serve(PodEnvironment.of())
            case ["ready"]:
                from kvplace.hook.pod import wait_until_ready

                wait_until_ready(PodEnvironment.of())
            case ["ready", "--once"]:
                from kvplace.hook.pod import check_ready

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


def on_define_domain(argv: Sequence[str] | None = None) -> int:
    """Pin the domain of one call of KubeVirt's sidecar-shim and give the exit code.

    The shim runs `onDefineDomain --vmi JSON --domain XML`. It reads the new domain from stdout and log lines
    from stderr; a non-zero exit code is a failed call. It passes both documents as arguments, which cannot be
    128 KiB or longer; the gRPC server has no such limit.
    """
    import argparse

    from kvplace.core.errors import ExitCode, KvplaceError
    from kvplace.hook.define_domain import define_domain
    from kvplace.hook.process import PodEnvironment

    parser = argparse.ArgumentParser(
        prog="onDefineDomain", description="Pin a libvirt domain according to the placement of this pod."
    )
    parser.add_argument("--vmi", required=True, metavar="JSON", help="the VirtualMachineInstance")
    parser.add_argument("--domain", required=True, metavar="XML", help="the domain from KubeVirt")
    parser.add_argument("--version", metavar="VERSION", help="hook version of the shim; ignored")
    given = parser.parse_args(argv)
    # The bytes of the arguments as the shim passed them, in any locale.
    domain, vmi = (text.encode("utf-8", "surrogateescape") for text in (given.domain, given.vmi))
    try:
        answer = define_domain(domain, vmi, PodEnvironment.of())
    except KvplaceError as error:
        sys.stderr.write(f"onDefineDomain: {error}\n")
        return ExitCode.FAILED
    sys.stdout.buffer.write(answer)
    sys.stdout.buffer.flush()
    return ExitCode.DONE


def _end(_: int, __: FrameType | None) -> None:
    sys.exit()


def _say(stream: int, text: str) -> None:
    os.write(stream, text.encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
