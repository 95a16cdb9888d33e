"""The option `--example` of every command that reads a document: print one, as a start for one's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from kvplace.cli.words import Words, either

_Function = TypeVar("_Function", bound=Callable[..., Any])
_NONE_NAMED = ""
"""The value of `--example` without one."""


def example_option(*names: str) -> Callable[[_Function], _Function]:
    """Add `--example` to a command that reads these documents; of several, its value names the one."""

    def show(context: click.Context, _option: click.Parameter, value: str | bool | None) -> None:
        if not value or context.resilient_parsing:
            return
        from kvplace.documents.schemas import example_of

        click.echo(example_of(names[0] if value is True else str(value)), nl=False)
        context.exit()

    def choose(context: click.Context, option: click.Parameter, value: str | None) -> None:
        if value == _NONE_NAMED and not context.resilient_parsing:
            raise click.UsageError(f"--example needs a name; choose {either(names)}", context)
        if value is not None and value not in names:
            option.type = Words(names)
            value = str(option.type.convert(value, option, context))
        show(context, option, value)

    if len(names) == 1:
        article = "an" if names[0][0] in "aeiou" else "a"
        return click.option(
            "--example",
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=show,
            help=f"Print {article} {names[0]} document as a start for your own, and exit.",
        )
    return click.option(
        "--example",
        is_flag=False,
        flag_value=_NONE_NAMED,
        metavar=f"[{'|'.join(names)}]",
        is_eager=True,
        expose_value=False,
        callback=choose,
        help="Print such a document as a start for your own, and exit.",
    )
