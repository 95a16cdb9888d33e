"""The shell completes commands, documents, server types and files."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.cli.calls import COMMAND

CLAIM = {"namespace": "default", "policy": "share", "cpus": "2-3", "since": "2026-01-01T00:00:00Z"}


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("kvplace sch", ["plain,schema"]),
        ("kvplace schema re", ["plain,request", "plain,requests"]),
        ("kvplace topology epyc-75", ["plain,epyc-7502p", "file,epyc-75"]),
        ("kvplace map epyc-75", ["plain,epyc-7502p", "file,epyc-75"]),
        ("kvplace place --topology epyc-75", ["plain,epyc-7502p", "file,epyc-75"]),
        ("kvplace topology ./mach", ["file,./mach"]),
        ("kvplace map -o js", ["plain,json", "file,js"]),
        ("kvplace map -o core", ["file,core"]),
        ("kvplace plan --requests vm", ["file,vm"]),
        ("kvplace plan --strategy = pa", ["plain,pack"]),
        ("kvplace agent --log-level wa", ["plain,warning"]),
        ("kvplace completion z", ["plain,zsh"]),
        ("kvplace get vms -o js", ["plain,json"]),
        ("kvplace describe-node -o ya", ["plain,yaml"]),
        ("kvplace rollout status -o na", ["plain,name"]),
        ("kvplace help sim", ["plain,simulate"]),
        ("kvplace no-such --thing x", []),
    ],
)
def test_the_shell_completes_a_word(words: str, offered: list[str]) -> None:
    assert completed(words) == offered


def completed(words: str) -> list[str]:
    """Return what bash gets for the last word; nothing may be reported besides."""
    completion = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    done = subprocess.run(
        COMMAND,
        env={**os.environ, **completion, "_KVPLACE_COMPLETE": "bash_complete"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_nodes_and_vms_of_a_file_with_placements_are_offered(tmp_path: Path) -> None:
    file = tmp_path / "placements"
    ledgers = [
        {
            "kind": "NodeLedger",
            "metadata": {"name": node},
            "spec": {"owners": {}, "claims": {name: {**CLAIM, "pod": name} for name in names}},
        }
        for node, names in {"east": ["db", "dns"], "west": ["web"]}.items()
    ]
    file.write_text("\n".join(map(json.dumps, ledgers)))
    line = f"kvplace map epyc-7502p --placements {file}"
    assert completed(f"{line} --node w") == ["plain,west"]
    assert completed(f"{line} --node east --found d") == ["plain,db=", "plain,dns="]
    assert completed(f"{line} --node west --found d") == []
    assert completed(f"{line} --found d") == []  # the flag names no node
    assert completed("kvplace map epyc-7502p --placements - --node w") == []
    assert completed(f"kvplace map epyc-7502p --placements {tmp_path / 'none'} --found d") == []
