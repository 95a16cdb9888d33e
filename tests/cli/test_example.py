"""Every command that reads a document prints an example of it, which it accepts."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvplace.documents import SCHEMA_NAMES
from tests.cli.calls import Caller

READERS = {
    "cluster": (
        ("plan", "--example", "cluster"),
        ("plan", "--requests", "requests.yaml", "--cluster", "-"),
    ),
    "request": (("place", "--example"), ("place", "--topology", "2x-epyc-9354-nps2")),
    "requests": (("plan", "--example", "requests"), ("plan", "--requests", "-")),
    "scenario": (("simulate", "--example"), ("simulate", "--scenario", "-")),
    "serve": (("serve", "--example"), ("serve", "--config", "-", "--health-address", "nowhere")),
}
"""How a document is printed, and how it is read."""


@pytest.mark.parametrize("name", READERS)
def test_a_command_accepts_its_own_example(
    kvplace: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("requests.yaml").write_text(kvplace("plan", "--example", "requests").out)
    printing, reading = READERS[name]
    printed = kvplace(*printing)
    assert (printed.code, printed.err) == (0, "")
    assert printed.out == kvplace("schema", name, "--example").out
    text = printed.out.replace("requests: 2000", "requests: 20")
    called = kvplace(*reading, stdin=text)
    if name == "serve":  # all settings are read before the address of the command line
        assert "'nowhere' is not an address" in called.err
        misspelt = kvplace(*reading, stdin=text.replace("strategy", "strategie"))
        assert "'strategie' is not known; did you mean 'strategy'?" in misspelt.err
    else:
        assert (called.code, called.err) == (0, "")
        assert called.out


def test_every_document_has_an_example_that_some_command_reads(kvplace: Caller) -> None:
    assert set(READERS) | {"rollout"} == set(SCHEMA_NAMES)
    for name in SCHEMA_NAMES:
        assert kvplace("schema", name, "--example").out
    called = kvplace("schema", "--example")
    assert called.code == 2
    assert "--example needs the NAME of a document: cluster" in called.err


def test_of_several_examples_the_one_must_be_named(kvplace: Caller) -> None:
    called = kvplace("plan", "--example")
    assert (called.code, called.out) == (2, "")
    assert called.err == (
        "kvplace: --example needs a name; choose cluster or requests (see `kvplace plan --help`)\n"
    )
    assert "did you mean 'requests'?" in kvplace("plan", "--example", "request").err
