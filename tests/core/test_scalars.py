"""mypy distinguishes ids, indexes, masks, amounts and names; at run time all are plain numbers and texts."""

from __future__ import annotations

import re
from pathlib import Path

from mypy import api

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"

MIXED = """
from kvplace.core.scalars import Bytes, CpuId, CpuMask, NodeName, NumaId, NumaIndex, PackageId, PodUid

def cpu(value: CpuId) -> None: ...
def mask(value: CpuMask) -> None: ...
def numa(value: NumaId) -> None: ...
def index(value: NumaIndex) -> None: ...
def package(value: PackageId) -> None: ...
def amount(value: Bytes) -> None: ...
def node(value: NodeName) -> None: ...
def pod(value: PodUid) -> None: ...
"""
WRONG = (
    "numa(CpuId(1))",
    "numa(NumaIndex(1))",
    "index(NumaId(1))",
    "package(NumaId(1))",
    "cpu(PackageId(1))",
    "cpu(CpuMask(1))",
    "mask(CpuId(1))",
    "mask(CpuMask(1) + 1)",
    "mask(1)",
    "amount(1 << 30)",
    "amount(Bytes(8) // Bytes(2))",
    "node(PodUid('uid'))",
    "pod(NodeName('worker-1'))",
    "pod('uid')",
)
RIGHT = (
    "mask(CpuMask(1) & ~CpuMask(2) | CpuMask(4))",
    "amount(2 * Bytes(1 << 30) - Bytes(1))",
    "cpu(CpuId(1))",
    "node(NodeName('worker-1'))",
)


def test_mypy_refuses_each_type_for_another_and_accepts_its_own_values(tmp_path: Path) -> None:
    snippet = tmp_path / "snippet.py"
    snippet.write_text(MIXED + "\n".join((*WRONG, *RIGHT)) + "\n")
    cache = f"--cache-dir={tmp_path / 'cache'}"
    out, errors, _ = api.run(
        [f"--config-file={PYPROJECT}", "--follow-imports=silent", cache, "--no-pretty", str(snippet)]
    )
    assert not errors
    lines = snippet.read_text().splitlines()
    refused = [lines[int(number) - 1] for number in re.findall(r"snippet\.py:(\d+): error: Argument 1", out)]
    assert refused == list(WRONG), out
