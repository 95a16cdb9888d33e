"""Run the benchmarks, show what they print, and write docs/benchmarks.md from it.

    python -m benchmarks [NAME ...]

A benchmark is a module here without an underscore; what it prints is its result, and its docstring says how
that was measured. A printed line that shows a picture stands in the page as one. Naming some runs only those
and leaves the page's other sections as they are.
"""

from __future__ import annotations

import importlib
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "benchmarks.md"
TITLES: Mapping[str, str] = {
    "fragmentation": "Fragmentation after long use",
    "across_nodes": "How full a cluster gets",
    "planning": "Many VMs at once",
    "placement": "One placement",
    "decision": "One decision over many nodes",
    "bound_per_second": "Pods bound per second",
    "first_bind": "From a VM to its bound pod",
    "hook_footprint": "The hook sidecar",
    "container_creation": "What the agent adds to a container's creation",
