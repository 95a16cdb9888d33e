"""The command `kvplace`, also installed as `kubectl kvplace`.

Answers go to stdout, messages to stderr. A user's mistake is reported in one sentence; `core.errors` gives
its exit code. A command's module is imported when the command is called, and imports other packages when it
runs: help and completion stay quick, and a command that needs no cluster never loads a Kubernetes client.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import click
from click.shell_completion import CompletionItem

from kvplace import __version__
from kvplace.cli.completion_command import VARIABLE, answer_shells, print_for_kubectl
from kvplace.cli.output import print_message, say
from kvplace.cli.parameters import Commands
from kvplace.core.errors import ExitCode, KvplaceError, exit_code_of

COMMANDS = (
    "completion",
    "defragment",
    "demo",
    "describe-node",
    "doctor",
    "evacuate",
    "explain",
    "get",
    "help",
    "map",
    "place",
    "plan",
    "rewrite",
    "rollout",
    "schema",
    "simulate",
    "top",
    "topology",
    "version",
    "web",
)
"""Commands for people and scripts. Each has a module of its name, or `_BESIDE` names its module."""
PROCESSES = ("agent", "certificates", "serve")
"""Long-running processes, started by the manifests."""
_BESIDE = {
    "certificates": "serve",
    "demo": "simulate",
    "describe-node": "topology",
    "evacuate": "plan",
    "schema": "completion",
    "top": "get",
    "version": "doctor",
}
"""The command that has a command in its module."""

EXIT_CODES = """\b
Exit codes:
  0  done             3  does not fit (not an error)
  1  failed           4  partly done
  2  invalid input    5  timed out
                      130  interrupted
"""


class _LazyCommands(Commands):
    """Commands that are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS, *PROCESSES]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in (*COMMANDS, *PROCESSES) or cmd_name in self.commands:
            return self.commands.get(cmd_name)
        module = importlib.import_module(f"kvplace.cli.{_BESIDE.get(cmd_name, cmd_name)}_command")
        command: click.Command = getattr(
            module, cmd_name.replace("-", "_") if cmd_name in _BESIDE else "command"
        )
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, names in (("Commands", COMMANDS), ("Processes of an installation", PROCESSES)):
            commands = [(name, self.get_command(ctx, name)) for name in names]
            with formatter.section(title):
                formatter.write_dl(
                    [(name, command.get_short_help_str(limit=80)) for name, command in commands if command]
                )


@click.group(
    cls=_LazyCommands,
    epilog=EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, "--version", message="kvplace %(version)s")
def cli() -> None:
    """Give KubeVirt VMs the right physical CPU cores, and show the cores of each VM."""


def _complete_words(context: click.Context, _argument: click.Parameter, begun: str) -> list[CompletionItem]:
    about = _context_of(context.find_root(), context.params["words"] or ())
    return about.command.shell_complete(about, begun) if isinstance(about.command, click.Group) else []


@cli.command("help", short_help="Explain a command.")
@click.argument("words", nargs=-1, metavar="[COMMAND]...", shell_complete=_complete_words)
@click.pass_context
def show_help(context: click.Context, words: tuple[str, ...]) -> None:
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


def answer_kubectl() -> NoReturn:
    """Complete the last argument of `kubectl_complete-kvplace`, a program of its own."""
    print_for_kubectl(cli)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command line and end the process with its exit code."""
    if sys.stdin is None:  # closed by the caller, as stdout may be
        sys.stdin = io.TextIOWrapper(io.BytesIO())
    if sys.stdout is None:
        sys.exit(_failed("stdout is closed: the answer cannot be printed", ExitCode.FAILED))
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name that the terminal cannot write is not an error
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = _run(sys.argv[1:] if arguments is None else list(arguments))
        sys.stdout.flush()
    except OSError as error:
        # A reader such as `head` that has seen enough is not an error worth a message.
        if not isinstance(error, BrokenPipeError):
            where = error.filename or "stdin or stdout"
            _failed(f"{where} cannot be read or written: {error.strerror or error}", ExitCode.FAILED)
        # The rest of the buffer must not make the interpreter complain when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = ExitCode.FAILED
    sys.exit(code)


def _run(arguments: list[str]) -> int:
    if VARIABLE in os.environ:
        answer_shells()
    try:
        answer: Any = cli.main(arguments, prog_name=_program(), standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        print_message(error.format_message())
        return ExitCode.USAGE
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx is not None else _program()
        return _failed(f"{_sentence(error)} (see `{where} --help`)", ExitCode.USAGE)
    except click.ClickException as error:
        return _failed(error.format_message(), ExitCode.FAILED)
    except (click.Abort, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    except KvplaceError as error:
        return _failed(str(error), exit_code_of(error))
    return int(answer) if isinstance(answer, int) else ExitCode.DONE


def _sentence(error: click.UsageError) -> str:
    """Write click's messages like our own: one sentence without a capital and a full stop."""
    if isinstance(error, click.MissingParameter) and error.param is not None:
        what = error.param.get_error_hint(error.ctx).replace("'", "")
        extra = error.param.type.get_missing_message(error.param, error.ctx)
        return f"{what} is missing{f'; {extra}' if extra else ''}"
    if isinstance(error, click.NoSuchOption):
        near = f"; did you mean {error.possibilities[0]!r}?" if error.possibilities else ""
        return f"no such option {error.option_name!r}{near}"
    said = error.format_message().removesuffix(".")
    if said.startswith("Got unexpected extra argument") and _reads_manifests(error.ctx):
        said += "; name a manifest with -f"
    return said[:1].lower() + said[1:] if said[1:2].islower() else said


def _reads_manifests(context: click.Context | None) -> bool:
    return context is not None and any("-f" in parameter.opts for parameter in context.command.params)


def _failed(sentence: str, code: ExitCode) -> int:
    say(sentence)
    return code


def _program() -> str:
    """Return the name that the user called the program by."""
    return "kubectl kvplace" if Path(sys.argv[0]).name.startswith("kubectl-") else "kvplace"
