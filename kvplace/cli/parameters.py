"""Parameters and options of several commands: words, numbers, files, machines, examples.

Only click is imported here; a command that does not use a parameter loads nothing for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import click
from click.shell_completion import CompletionItem

from kvplace.cli.output import Output, say
from kvplace.core.strict_json import did_you_mean

if TYPE_CHECKING:
    from kvplace.core.scalars import CpuMask
    from kvplace.machines.machine import Machine
    from kvplace.service.connections import Address

_LOG_LEVELS = ("debug", "info", "warning", "error")


def names_and_files(names: list[str], begun: str) -> list[CompletionItem]:
    """Offer the names that begin so, and files."""
    found = [CompletionItem(name) for name in names if name.startswith(begun)]
    return [*found, CompletionItem(begun, type="file")]


class Words(click.Choice[str]):
    """A choice of words."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        """Name the words, and the likely correction of a typo."""
        known = super().get_invalid_choice_message(value, ctx).removesuffix(".")
        return f"{known}{did_you_mean(value, self.choices)}"

    def get_missing_message(self, param: click.Parameter, ctx: click.Context | None) -> str:
        """Name the words in one line."""
        return f"choose {either(self.choices)}"


class Commands(click.Group):
    """A group of commands that suggests a command for a misspelt one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Suggest a command for a misspelt one, as click does for options."""
        known = self.list_commands(ctx)
        if args[0] not in known:
            ctx.fail(f"no such command {args[0]!r}{did_you_mean(args[0], known)}")
        return super().resolve_command(ctx, args)


def either(words: Sequence[str]) -> str:
    """Write a choice: `a`, `a or b`, `a, b or c`."""
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


_STDIN = "kvplace.stdin"
"""Key in the context for the option that reads stdin."""


class InputFile(click.ParamType[str]):
    """A file or folder that is read, by its name; `-` is stdin. Its reader checks whether it can be read."""

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
    """Read stdin for an option, by its name; raises UsageError where another option reads it, too.

    On a terminal it names the expected input and its `form`, since the program seems to hang.
    """
    other = context.meta.setdefault(_STDIN, what)
    if other != what:
        raise click.UsageError(f"{other} and {what} cannot both be stdin", context)
    if sys.stdin.isatty():
        say(f"reading {what} from the terminal{form}; Ctrl-D ends it")


_Function = TypeVar("_Function", bound=Callable[..., Any])
_NONE_NAMED = ""
"""The value of `--example` without one."""


def example_option(*names: str) -> Callable[[_Function], _Function]:
    """Add `--example` to a command that reads these documents; its value chooses one of several."""
    is_one = len(names) == 1
    article = "an" if names[0][0] in "aeiou" else "a"
    what = f"{article} {names[0]}" if is_one else "such a"

    def show(context: click.Context, option: click.Parameter, value: str | None) -> None:
        if value is None or context.resilient_parsing:
            return
        if value == _NONE_NAMED:
            raise click.UsageError(f"--example needs a name; choose {either(names)}", context)
        from kvplace.documents import example_of

        click.echo(example_of(Words(names).convert(value, option, context)), nl=False)
        context.exit()

    return click.option(
        "--example",
        is_flag=is_one,
        flag_value=names[0] if is_one else _NONE_NAMED,
        metavar=None if is_one else f"[{'|'.join(names)}]",
        is_eager=True,
        expose_value=False,
        callback=show,
        help=f"Print {what} document as a start for your own, and exit.",
    )


_Completer: TypeAlias = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def cpu_manager_state_option(function: _Function) -> _Function:
    """Add `--cpu-manager-state FILE` to a command, as its argument `cpu_manager_state`."""
    option = click.option(
        "--cpu-manager-state",
        type=InputFile(),
        metavar="FILE",
        help="The kubelet's cpu_manager_state: CPUs that its static policy holds are not free.",
    )
    return option(function)


def complete_machine(_context: click.Context, _argument: click.Parameter, begun: str) -> list[CompletionItem]:
    """Complete the name of a server type, or else of a file."""
    from kvplace.machines.server_types import machine_names

    return names_and_files(list(machine_names()), begun)


def topology_option(help: str, *, required: bool = False) -> Callable[[_Function], _Function]:  # noqa: A002
    """Add `--topology`, in the forms of `machine_argument`, to a command; the argument is `machine`."""
    return click.option(
        "--topology",
        "machine",
        type=InputFile(),
        required=required,
        metavar="FILE",
        shell_complete=complete_machine,
        help=help,
    )


def machine_argument(complete: _Completer = complete_machine) -> Callable[[_Function], _Function]:
    """Add the machine to a command, as its argument `machine`; None is this machine."""
    return click.argument(
        "machine", type=InputFile(), metavar="[FILE]", required=False, shell_complete=complete
    )


def chosen_machine(name: str | None, *, reserved: str | None = None, state: str | None = None) -> Machine:
    """Find a machine, set its reserved CPUs and the CPUs of the kubelet's `state`, and report its notes."""
    from kvplace.documents.reading import read_source, source_name
    from kvplace.machines.machine import find_machine

    machine = find_machine(name)
    if reserved is not None:
        machine = machine.with_reserved(reserved, "--reserved")
    if state is not None:
        what = source_name(state)
        machine = machine.with_kubelet_cpus(read_source(state, f"--cpu-manager-state {what}"), what)
    say(*machine.notes)
    return machine


class Answer(Enum):
    """The kind of a command's answer, and so the forms of `-o`; the first one is the default."""

    LIST = (Output.TABLE, Output.WIDE, Output.JSON, Output.YAML, Output.NAME)
    """Objects that have names."""
    REPORT = (Output.TABLE, Output.WIDE, Output.JSON, Output.YAML)
    """Findings. Where there is nothing more to show, `wide` is the same as `table`."""
    DOCUMENT = (Output.JSON, Output.YAML, Output.NAME)
    """One document for other programs."""


def output_option(answer: Answer) -> Callable[[_Function], _Function]:
    """Add `-o` with the forms of an answer to a command, as its argument `output`."""
    return click.option(
        "-o",
        "--output",
        type=Words([output.value for output in answer.value]),
        default=answer.value[0].value,
        show_default=True,
        callback=lambda _context, _option, value: Output(value),
        help="How to print the answer.",
    )


def filename_option(argument: str, help: str) -> Callable[[_Function], _Function]:  # noqa: A002
    """Add `-f`, which may be given several times, to a command."""
    return click.option(
        "-f", "--filename", argument, type=InputFile(), multiple=True, metavar="FILE", help=help
    )


def strategy_option(help: str) -> Callable[[_Function], _Function]:  # noqa: A002
    """Add `--strategy` to a command, as its argument `strategy`."""
    from kvplace.core.cluster.node_choice import Strategy

    return click.option(
        "--strategy",
        type=Words([strategy.value for strategy in Strategy]),
        default=Strategy.PACK.value,
        show_default=True,
        callback=lambda _context, _option, value: Strategy(value),
        help=help,
    )


yes_option = click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")


def read_cpus(text: str, what: str) -> CpuMask:
    """Read a CPU list; raises BadBody, which calls it `what`."""
    from kvplace.core.cpuset import parse_cpu_list
    from kvplace.core.errors import BadBody

    try:
        return parse_cpu_list(text, what=what)
    except ValueError as error:
        raise BadBody(str(error)) from None


def check_confirmation(confirmed: bool) -> None:
    """Raise UsageError where the user has not confirmed and there is no terminal to ask on."""
    if not confirmed and not sys.stdin.isatty():
        raise click.UsageError("there is no terminal to ask on; give --yes")


def address_option(name: str, default: str) -> Callable[[_Function], _Function]:
    """Add the address of a listener to a command."""

    def read(_context: click.Context, _option: click.Parameter, text: str) -> Address:
        from kvplace.service.connections import Address

        return Address.parse(text)

    return click.option(name, default=default, show_default=True, metavar="HOST:PORT", callback=read)


def process_options(*, health_address: str) -> Callable[[_Function], _Function]:
    """Add the options of every long-running process to a command; `health_address` is a default."""

    def add(command: _Function) -> _Function:
        for option in (
            click.option("--log-level", type=Words(_LOG_LEVELS), default="info", show_default=True),
            address_option("--health-address", health_address),
            click.option(
                "--kubeconfig",
                type=click.Path(path_type=Path, dir_okay=False),
                help="Default: the pod's service account, else the user's kubeconfig.",
            ),
        ):
            command = option(command)
        return command

    return add
