"""Files that a user names on the command line; `-` is stdin, which only one of them can be."""

from __future__ import annotations

import sys

import click
from click.shell_completion import CompletionItem

from kvplace.cli.output import say

_STDIN = "kvplace.stdin"
"""Key in the context for the option that reads stdin."""


class InputFile(click.ParamType[str]):
    """A file or folder that is read, by its name; `-` is stdin. Whether it can be read, its reader states."""

    name = "file"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name; raises UsageError for the second option that is to read stdin."""
        if value == "-" and ctx is not None and param is not None and not ctx.resilient_parsing:
            take_stdin(ctx, param.opts[0] if isinstance(param, click.Option) else param.human_readable_name)
        return value

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Let the shell complete the name of a file."""
        return [CompletionItem(incomplete, type="file")]


def take_stdin(context: click.Context, what: str, form: str = "") -> None:
    """Read stdin for an option, by its name; raises UsageError when another one does, too.

    Prints on a terminal what is waited for and its `form`, since the program seems to hang.
    """
    other = context.meta.setdefault(_STDIN, what)
    if other != what:
        raise click.UsageError(f"{other} and {what} cannot both be stdin", context)
    if sys.stdin.isatty():
        say(f"reading {what} from the terminal{form}; Ctrl-D ends it")
