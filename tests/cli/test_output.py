"""Printing that all commands share."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from kvplace.cli.output import Column, Listing, Output, cpu_lines, print_lines, say, table_lines
from kvplace.core.cpuset import format_cpu_list, mask_of
from tests.cli.calls import Caller

HOSTILE = "db\x1b]0;mine\x07\x9b2J\u202egpj.exe"
SHOWN = r"db\x1b]0;mine\x07\x9b2J\u202egpj.exe"


@given(st.sets(st.integers(0, 300), max_size=60), st.integers(1, 40))
def test_a_cpu_list_is_broken_only_between_its_entries(cpus: set[int], width: int) -> None:
    mask = mask_of(cpus)
    lines = cpu_lines(mask, width).split("\n")
    assert "".join(lines) == format_cpu_list(mask)
    assert all(line.endswith(",") for line in lines[:-1])
    assert all(len(line) <= width or line.count(",") <= 1 for line in lines)


def test_words_of_others_are_shown_and_do_not_act_on_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    listing = Listing("Vm", (Column("NAME", str),), lambda name: {"name": name}, str, Output.TABLE)
    print_lines([HOSTILE])
    print_lines(table_lines([("NAME", "CPUS"), (HOSTILE, "0-3")]))
    listing.print_all([HOSTILE])
    say(HOSTILE)
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        SHOWN,
        f"{'NAME':<{len(SHOWN)}}   CPUS",
        f"{SHOWN}   0-3",
        "NAME",
        SHOWN,
    ]
    assert err == f"kvplace: {SHOWN}\n"


def test_an_error_shows_the_name_that_it_was_given_and_does_not_act_it_out(kvplace: Caller) -> None:
    called = kvplace("plan", "--requests", HOSTILE)
    assert SHOWN in called.err
    assert "\x1b" not in called.err


def test_names_in_other_writings_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    print_lines(["Größe 漢字 \N{ROCKET}"])
    assert capsys.readouterr().out == "Größe 漢字 \N{ROCKET}\n"


def test_words_of_others_cannot_begin_a_line_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    listing = Listing("Vm", (Column("SAID", str),), lambda said: {"said": said}, str, Output.TABLE)
    print_lines(["VM db: it reports\r\nall is well\n"])
    listing.print_all(["it reports\n\tall is well"])
    say("it reports\nkvplace: all is well")
    out, err = capsys.readouterr()
    assert out.splitlines() == ["VM db: it reports all is well ", "SAID", "it reports all is well"]
    assert err == "kvplace: it reports kvplace: all is well\n"


def test_columns_stand_below_each_other_whatever_the_width_of_their_letters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    listing = Listing(
        "Vm",
        (Column("VM", str), Column("CPUS", lambda _: "0-3")),
        lambda name: {"name": name},
        str,
        Output.TABLE,
    )
    names = ["数据库", "web", "e\N{COMBINING ACUTE ACCENT}te\N{COMBINING ACUTE ACCENT}"]
    print_lines(table_lines([("VM", "CPUS"), *((name, "0-3") for name in names)]))
    listing.print_all(names)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8
    assert {cell_len(line.rpartition(" ")[0]) for line in lines} == {8}


def test_a_cell_of_ours_has_the_lines_that_we_gave_it(capsys: pytest.CaptureFixture[str]) -> None:
    print_lines(table_lines([("0-3,\n8-11", "db")]))
    assert capsys.readouterr().out == "0-3,   db\n8-11\n"
