"""The guest of the template latency-test prints what docs/measure.md shows."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.blocks import block
from tests.docs.reading import PROJECT

TEMPLATE = PROJECT / "vm-templates" / "latency-test.yaml"
HISTOGRAM = """\
# /dev/cpu_dma_latency set to 0us
# Histogram
{rows}
# Min Latencies: 00003 00004
# Avg Latencies: 00006 00006
# Max Latencies: {max}
# Histogram Overflows: {over}
"""
REDIS = """\
"test","rps","avg_latency_ms","min_latency_ms","p50_latency_ms","p95_latency_ms","p99_latency_ms","max_latency_ms"
"GET","172860.09","0.081","0.024","0.127","0.199","0.255","1.567"
"""


def _script() -> str:
    volumes = yaml.safe_load(TEMPLATE.read_text())["spec"]["template"]["spec"]["volumes"]
    (user_data,) = [one["cloudInitNoCloud"]["userData"] for one in volumes if "cloudInitNoCloud" in one]
    read: dict[str, Any] = yaml.safe_load(user_data)
    assert user_data.startswith("#cloud-config\n")
    (file,) = read["write_files"]
    assert file["path"].rpartition("/")[2] in read["runcmd"][0]
    return str(file["content"])


def _printed(folder: Path, rows: dict[int, tuple[int, int]], longest: str, over: str = "00000 00000") -> str:
    listed = [f"{us:06} {' '.join(f'{n:06}' for n in rows.get(us, (0, 0)))}" for us in range(100)]
    histogram = HISTOGRAM.format(rows="\n".join(listed), max=longest, over=over)
    for name, output in {"cyclictest": histogram, "redis-benchmark": REDIS}.items():
        program = folder / name
        program.write_text(f"#!/bin/sh\ncat <<'END'\n{output}END\n")
        program.chmod(0o755)
    done = subprocess.run(
        ["sh", "-c", _script()],
        env={"PATH": f"{folder}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize(
    ("rows", "over", "expected"),
    [
        ({4: (50, 50), 9: (50, 49), 30: (0, 1)}, "00000 00000", ("4", "9")),
        ({4: (49, 50), 9: (51, 50)}, "00000 00000", ("9", "9")),
        ({4: (96, 98)}, "00004 00002", ("4", "over 20000")),
    ],
)
def test_the_percentiles_are_those_of_all_vcpus_and_of_values_above_the_histogram(
    tmp_path: Path, rows: dict[int, tuple[int, int]], over: str, expected: tuple[str, str]
) -> None:
    printed = _printed(tmp_path, rows, "00009 00030", over)
    assert re.findall(r"p(?:50|99) ([\w ]+) us", printed) == list(expected)


def test_the_line_is_as_the_page_shows_it(tmp_path: Path) -> None:
    shape = re.compile(r"\d+(\.\d+)?")
    printed = _printed(tmp_path, {4: (50, 50), 9: (50, 50)}, "00009 00030")
    assert printed == (
        "latency-test: cyclictest p50 4 us, p99 9 us, max 30 us; "
        "redis p50 0.127 ms, p99 0.255 ms, max 1.567 ms\n"
    )
    shown = block("docs/measure.md", "latency-test: cyclictest")
    assert {shape.sub("N", line) for line in shown.splitlines()} == {shape.sub("N", printed.rstrip())}
