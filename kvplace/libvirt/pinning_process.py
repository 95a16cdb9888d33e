"""`python -m kvplace.libvirt.pinning_process`: sets pins for the agent, which kills it when it hangs.

One request a line on stdin, one answer a line on stdout, until stdin ends:

    {"pid": 4711, "socket": "run/libvirt/virtqemud-sock",
     "pins": {"vcpus": {"0": "4"}, "emulator": "2-3", "ioThreads": {}}}

    {"changed": 2}  or  {"error": "one sentence"}
"""

from __future__ import annotations

import json
import sys
from typing import Any, TextIO

from kvplace.core.errors import KvplaceError
from kvplace.libvirt.domain_pins import DomainPins
from kvplace.libvirt.live import pin_domain

_LONGEST_ERROR = 1000
"""Characters of an error: its words come from a libvirt in the pod of a VM."""


def serve(requests: TextIO, answers: TextIO) -> None:
    """Answer every request."""
    for line in requests:
        answers.write(json.dumps(_answer(json.loads(line))) + "\n")
        answers.flush()


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        pins = DomainPins.of_document(request["pins"])
        return {"changed": pin_domain(request["pid"], pins, socket=request["socket"])}
    except KvplaceError as error:
        return {"error": str(error)[:_LONGEST_ERROR]}


if __name__ == "__main__":
    serve(sys.stdin, sys.stdout)
