"""Runs the hook's answer to one domain as the sidecar of a pod would: same user, cpuset and seccomp filter.

A program of its own, started as root: `hook_in_pod POD VMI DOMAIN`, then as `hooks/onDefineDomain` behaves.
"""

import argparse
import ctypes
import locale
import mmap
import shutil
import sys
from pathlib import Path

import lxml.etree

import kvplace.domainxml
import kvplace.hook.define_domain
from harness.libvirt_session.pod import Pod
from kvplace.hook.__main__ import on_define_domain

# The pod's user cannot read the developer's home, so everything is loaded before it is entered.
LOADED_BEFOREHAND = (
    *(argparse, ctypes, locale, mmap, shutil, lxml.etree),
    *(kvplace.domainxml, kvplace.hook.define_domain),
)


def main(pod_json: str, vmi: str, domain: str) -> int:
    """Enters the pod and answers."""
    document = Path(domain).read_text()
    Pod.from_json(pod_json).enter()
    return on_define_domain(["--vmi", vmi, "--domain", document])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
