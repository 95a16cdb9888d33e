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
        ("kvplace topology epyc-75", ["plain,epyc-7502p"]),
        ("kvplace map epyc-75", ["plain,epyc-7502p"]),
        ("kvplace place --topology epyc-75", ["plain,epyc-7502p"]),
        ("kvplace topology ./mach", ["file,./mach"]),
        ("kvplace map -o js", ["plain,json"]),
        ("kvplace map -o core", ["file,core"]),
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
    assert done.stdout.splitlines() == offered
    assert done.stderr == ""
