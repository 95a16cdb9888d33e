"""Runs the hook's answer to one domain as the sidecar of a pod would: same user, cpuset and seccomp filter.

A program of its own, started as root: `hook_in_pod POD VMI DOMAIN`, then as `hooks/onDefineDomain` behaves.
"""

import ctypes
import locale
import shutil
import sys
from pathlib import Path

import lxml.etree

import kvplace.domainxml
from harness.libvirt_session.pod import Pod
from kvplace.hook import shim

# The pod's user cannot read the developer's home, so everything is loaded before it is entered.
LOADED_BEFOREHAND = (ctypes, locale, shutil, lxml.etree, kvplace.domainxml)


def main(pod_json: str, vmi: str, domain: str) -> int:
    """Enters the pod and answers."""
    document = Path(domain).read_text()
    Pod.from_json(pod_json).enter()
    return shim.main(["--vmi", vmi, "--domain", document])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
