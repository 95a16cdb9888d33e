"""Log lines of the hook: one JSON object each on stderr, which virt-launcher's pod log collects."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress

_STDERR = 2


def log(level: str, msg: str, about: Mapping[str, str] | None = None) -> None:
    """Write one line; `about` has the VM and the node. A closed stderr is not an error."""
    now = time.time()
    line = {
        "ts": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(now))}.{int(now % 1 * 1000):03d}Z",
        "level": level,
        "msg": msg,
        "component": "hook",
        **(about or {}),
    }
    with suppress(OSError):
        os.write(_STDERR, json.dumps(line).encode() + b"\n")
