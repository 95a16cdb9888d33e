"""`kvplace completion`: the script that teaches a shell to complete the words of `kvplace`."""

from __future__ import annotations

import click

from kvplace.cli.completion import SHELLS, completion_script
from kvplace.cli.parameters import Words


@click.command("completion", short_help="Print the completion script of a shell.")
@click.argument("shell", type=Words(SHELLS), metavar="SHELL")
@click.pass_context
def command(context: click.Context, shell: str) -> None:
    """Print the script that makes a shell complete commands, options, server types and files.

    \b
    bash   echo 'source <(kvplace completion bash)' >> ~/.bashrc
    zsh    echo 'source <(kvplace completion zsh)' >> ~/.zshrc      after compinit
    fish   kvplace completion fish > ~/.config/fish/completions/kvplace.fish

    `kubectl kvplace` needs no script: kubectl's own completion finds kubectl_complete-kvplace on PATH.
    """  # noqa: D301 - click needs the literal backslash
    click.echo(completion_script(context.find_root().command, shell), nl=False)
