"""The shell completes commands, documents, server types and files."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.cli.calls import COMMAND


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
        ("kvplace help sim", ["plain,simulate"]),
        ("kvplace no-such --thing x", []),
    ],
)
def test_the_shell_completes_a_word(words: str, offered: list[str]) -> None:
    completion = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    done = subprocess.run(
        COMMAND,
        env={**os.environ, **completion, "_KVPLACE_COMPLETE": "bash_complete"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == offered
    assert done.stderr == ""
