"""Runs the hook sidecar's process in a pod: same user, cpuset and seccomp filter as its libvirt.

A program of its own, started as root: `sidecar_in_pod POD`, then as `kvplace-hook serve` behaves.
"""

import ctypes
import locale
import sys

import lxml.etree

import kvplace.domainxml
from harness.libvirt_session.pod import Pod
from kvplace.hook import arrivals, define_domain, server
from kvplace.hook.__main__ import main

# The pod's user cannot read the developer's home, so everything is loaded before it is entered.
LOADED_BEFOREHAND = (ctypes, locale, lxml.etree, kvplace.domainxml, arrivals, define_domain, server)

if __name__ == "__main__":
    Pod.from_json(sys.argv[1]).enter()
    sys.exit(main(["serve"]))
