"""The hook as an executable for KubeVirt's own sidecar-shim: `onDefineDomain --vmi JSON --domain XML`.

The shim reads the new domain from stdout and log lines from stderr; a non-zero exit code is a failed call. It
passes both documents as arguments, which cannot be 128 KiB or longer; the gRPC server has no such limit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from kvplace.core.errors import ExitCode, KvplaceError
from kvplace.hook.define_domain import define_domain
from kvplace.hook.pod_environment import PodEnvironment


def main(argv: Sequence[str] | None = None) -> int:
    """Pin the domain of one call and give the exit code."""
    parser = argparse.ArgumentParser(
        prog="onDefineDomain", description="Pin a libvirt domain according to the placement of this pod."
    )
    parser.add_argument("--vmi", required=True, metavar="JSON", help="the VirtualMachineInstance")
    parser.add_argument("--domain", required=True, metavar="XML", help="the domain from KubeVirt")
    parser.add_argument("--version", metavar="VERSION", help="hook version of the shim; ignored")
    given = parser.parse_args(argv)
    try:
        answer = define_domain(_raw(given.domain), _raw(given.vmi), PodEnvironment.of())
    except KvplaceError as error:
        sys.stderr.write(f"onDefineDomain: {error}\n")
        return ExitCode.FAILED
    sys.stdout.buffer.write(answer)
    sys.stdout.buffer.flush()
    return ExitCode.DONE


def _raw(argument: str) -> bytes:
    """Return the bytes of an argument as the shim passed them, in any locale."""
    return argument.encode("utf-8", "surrogateescape")
