"""Options: each stands on a page, and pages name none that a command does not take."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click

from kvplace.cli import main
from tests.docs.blocks import PAGES, blocks, command_lines
from tests.docs.reading import PROJECT, in_code_marks

_CALL = re.compile(r"(?:^|kubectl |\| *)kvplace ((?:[a-z][a-z-]* ?)+)([^|>]*)")


def options(command: click.Command) -> set[str]:
    return {name for one in command.params if isinstance(one, click.Option) for name in _spellings(one)}


def _spellings(option: click.Option) -> tuple[str, ...]:
    return (*option.opts, *option.secondary_opts)


def _all_commands(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    yield name, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for inner in command.list_commands(context):
            found = command.get_command(context, inner)
            assert found is not None
            yield from _all_commands(found, f"{name} {inner}")


COMMANDS = dict(_all_commands(main.cli, "kvplace"))
TEXTS = {page: (PROJECT / page).read_text(encoding="utf-8") for page in PAGES}
WRITTEN = {line for page in PAGES for one in blocks(page) for line in command_lines(one.text)} | {
    mark for text in TEXTS.values() for mark in in_code_marks(re.sub(r"```.*?```", "", text, flags=re.DOTALL))
}

MESSAGES = {"kvplace has not read the cluster yet"}
"""No commands, although they begin so."""


def calls() -> Iterator[tuple[str, str, set[str]]]:
    """The written text, the command that it calls and the options that it gives."""
    for written in WRITTEN - MESSAGES:
        for match in _CALL.finditer(written):
            words = match[1].split()
            names = [" ".join(("kvplace", *words[:count])) for count in range(len(words), 0, -1)]
            name = next((name for name in names if name in COMMANDS), f"kvplace {words[0]}")
            yield written, name, set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", match[2]))


def test_every_option_stands_on_a_page() -> None:
    named = {word for text in TEXTS.values() for word in re.findall(r"(?<![\w-])--?[a-zA-Z][a-z-]*", text)}
    missing = [
        f"{name} {option.opts[-1]}"
        for name, command in COMMANDS.items()
        for option in command.params
        if isinstance(option, click.Option) and not option.hidden and not named & set(_spellings(option))
    ]
    assert missing == []


def test_commands_on_the_pages_exist_and_take_their_options() -> None:
    found = list(calls())
    assert len(found) > 60
    unknown = [
        f"{written}: {name} {given}"
        for written, name, given in found
        if name not in COMMANDS or not given <= options(COMMANDS[name]) | {"--help"}
    ]
    assert unknown == []
