"""`kvplace help`: the same as `--help`, where people type it."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem


def _complete(context: click.Context, _argument: click.Parameter, begun: str) -> list[CompletionItem]:
    about = _context_of(context.find_root(), context.params["words"] or ())
    return about.command.shell_complete(about, begun) if isinstance(about.command, click.Group) else []


@click.command("help", short_help="Explain a command.")
@click.argument("words", nargs=-1, metavar="[COMMAND]...", shell_complete=_complete)
@click.pass_context
def command(context: click.Context, words: tuple[str, ...]) -> None:
    """Explain a command, or list all of them."""
    click.echo(_context_of(context.find_root(), words).get_help())


def _context_of(root: click.Context, words: tuple[str, ...]) -> click.Context:
    """Go down to the command that the words name; raises UsageError for a word that names none."""
    context = root
    for word in words:
        group = context.command
        if not isinstance(group, click.Group):
            raise click.UsageError(f"{context.command_path} has no command {word!r}", context)
        _, found, _ = group.resolve_command(context, [word])
        if found is None:  # only while a shell completes
            break
        context = click.Context(found, info_name=word, parent=context)
    return context
