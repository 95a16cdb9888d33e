"""`kubectl_complete-kvplace`: the words that kubectl offers after `kubectl kvplace`.

kubectl calls the program of this name on PATH with the words after `kvplace`; the last one is incomplete. The
answer has a word per line, a tab before its description, and at the end what the shell may offer besides.
"""

from __future__ import annotations

import os
import sys

from click.shell_completion import ShellComplete

from kvplace.cli.completion import completions
from kvplace.cli.main import cli

_ALSO_FILES, _NO_FILES, _WORD_GOES_ON = ":0", ":4", ":6"
"""Directives of cobra for kubectl's completion; after the last one no blank follows a word."""


def main() -> None:
    """Print the completions of the last argument."""
    *words, begun = sys.argv[1:] or [""]
    found = completions(ShellComplete(cli, {}, "kubectl kvplace", ""), words, begun)
    option, equals, _ = begun.partition("=")
    before = f"{option}=" if equals and option.startswith("--") else ""
    lines = [
        f"{before}{item.value}\t{' '.join(item.help.split())}" if item.help else f"{before}{item.value}"
        for item in found
        if item.type == "plain"
    ]
    directive = _NO_FILES
    if any(item.type != "plain" for item in found):
        directive = _ALSO_FILES
    elif lines and all(line.endswith("=") for line in lines):
        directive = _WORD_GOES_ON
    sys.stdout.write("\n".join([*lines, directive]) + "\n")
    sys.stdout.flush()
    # Nothing is left to be done, and a shell waits: leave without tearing down what was imported.
    os._exit(0)
