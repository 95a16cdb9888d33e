"""Help while typing: `kvplace completion` for shells and kubectl, `kvplace schema` for editors.

A shell calls `kvplace` itself for every Tab, so an answer must be quick, and errors are not printed: a
message would land in the middle of the line that a user types. Click knows commands and options; fish has
its script, and zsh has it with one more case. The one of bash is our own: bash splits words at `=`, and
offers names beside files.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    add_completion_class,
)

from kvplace.cli.output import Output, print_document, print_lines, table_lines
from kvplace.cli.parameters import Answer, Words, output_option
from kvplace.core.errors import BadBody

VARIABLE = "_KVPLACE_COMPLETE"
"""The variable that a shell sets to ask; click derives its name from the program's."""

_BASH = """\
# Completion of %(prog_name)s for bash 4.4 or newer.
%(complete_func)s() {
    local IFS=$'\\n' type value files= cur=${COMP_WORDS[COMP_CWORD]}
    [[ $cur == = ]] && cur=
    COMPREPLY=()
    while IFS=, read -r type value; do
        case $type in
            plain) COMPREPLY+=("$value"); [[ $value == *= ]] && compopt -o nospace ;;
            file) files=yes ;;
        esac
    done < <(COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD=$COMP_CWORD \\
        %(complete_var)s=bash_complete "$1" 2>/dev/null)
    [[ $files ]] || return 0
    if ((${#COMPREPLY[@]})); then
        compopt -o filenames
        COMPREPLY+=($(compgen -f -- "$cur"))
    else
        compopt -o default
    fi
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""
_ZSH_OFFERS = "compadd -U -V unsorted -a completions"
"""How the script of click offers words that have no description; a blank follows each."""
_ZSH_GOES_ON = """\
local -a unfinished=(${(M)completions:#*=}) finished=(${completions:#*=})
        (( $#unfinished )) && compadd -U -S '' -V unsorted -a unfinished
        (( $#finished )) && compadd -U -V unsorted -a finished"""
"""After `NAME=` the word continues."""


def completions(shell: ShellComplete, args: list[str], incomplete: str) -> list[CompletionItem]:
    """Return the completions of a word; nothing when the line is not a command."""
    try:
        return ShellComplete.get_completions(shell, args, incomplete)
    except Exception:  # nothing may be printed here, also after an error
        return []


class _Bash(BashComplete):
    source_template = _BASH
    get_completions = completions

    def source(self) -> str:
        return self.source_template % self.source_vars()

    def get_completion_args(self) -> tuple[list[str], str]:
        arguments, begun = super().get_completion_args()
        words: list[str] = []
        for word in [*arguments, begun]:
            if words and words[-1].startswith("--") and (word == "=" or words[-1].endswith("=")):
                words[-1] += word
            else:
                words.append(word)
        return words[:-1], words[-1]


def _with_option(shell: ShellComplete, args: list[str], incomplete: str) -> list[CompletionItem]:
    """Offer whole words to a shell or kubectl, which do not split `--option=value`."""
    option, equals, _ = incomplete.partition("=")
    found = completions(shell, args, incomplete)
    if equals and option.startswith("--"):
        for item in found:
            item.value = f"{option}={item.value}" if item.type == "plain" else item.value
    return found


class _Zsh(ZshComplete):
    source_template = ZshComplete.source_template.replace(_ZSH_OFFERS, _ZSH_GOES_ON)
    get_completions = _with_option


class _Fish(FishComplete):
    get_completions = _with_option


_SHELLS: dict[str, type[ShellComplete]] = {"bash": _Bash, "zsh": _Zsh, "fish": _Fish}


def answer_shells() -> None:
    """Have click answer a shell that asks by the environment as described here."""
    for shell in _SHELLS.values():
        add_completion_class(shell)


_ALSO_FILES, _NO_FILES, _WORD_GOES_ON = ":0", ":4", ":6"
"""Directives of cobra for kubectl's completion; after the last one no blank follows a word."""


@click.command("completion", short_help="Print the completion script of a shell.")
@click.argument("shell", type=Words(_SHELLS), metavar="SHELL")
@click.pass_context
def command(context: click.Context, shell: str) -> None:
    """Print the script that makes a shell complete commands, options, server types and files.

    \b
    bash   echo 'source <(kvplace completion bash)' >> ~/.bashrc
    zsh    echo 'source <(kvplace completion zsh)' >> ~/.zshrc      after compinit
    fish   kvplace completion fish > ~/.config/fish/completions/kvplace.fish

    `kubectl kvplace` needs no script: kubectl's own completion finds kubectl_complete-kvplace on PATH.
    """  # noqa: D301 - click needs the literal backslash
    click.echo(_SHELLS[shell](context.find_root().command, {}, "kvplace", VARIABLE).source(), nl=False)


def print_for_kubectl(program: click.Command) -> NoReturn:
    """Answer kubectl: print the completions of the last argument.

    kubectl calls the program `kubectl_complete-kvplace` on PATH with the words after `kvplace`; the last one
    is incomplete. The answer has a word per line, a tab before its description, and at the end a directive.
    """
    *words, begun = sys.argv[1:] or [""]
    found = _with_option(ShellComplete(program, {}, "kubectl kvplace", ""), words, begun)
    lines = [
        f"{item.value}\t{' '.join(item.help.split())}" if item.help else item.value
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
    # Nothing is left to be done, and a shell waits: leave without tearing down the imported modules.
    os._exit(0)


def _complete_schema(_context: click.Context, _argument: click.Parameter, begun: str) -> list[CompletionItem]:
    from kvplace.documents import SCHEMA_NAMES

    return [CompletionItem(name) for name in SCHEMA_NAMES if name.startswith(begun)]


@click.command("schema", short_help="Print the JSON Schema of a document that you write.")
@click.argument("name", required=False, shell_complete=_complete_schema)
@click.option("--example", is_flag=True, help="Print an example of the document instead.")
@output_option(Answer.DOCUMENT)
def schema(name: str | None, example: bool, output: Output) -> None:
    """Print the JSON Schema of a document that you write; without NAME, list the documents.

    An editor with a YAML or JSON language server completes and checks a document with its schema.
    """
    from kvplace.documents import SCHEMA_NAMES, example_of, schema_of

    if name is None and example:
        raise click.UsageError(f"--example needs the NAME of a document: {', '.join(SCHEMA_NAMES)}")
    try:
        if name is None and output is Output.NAME:
            click.echo("\n".join(SCHEMA_NAMES))
        elif name is None:
            print_lines(table_lines([(each, schema_of(each)["description"]) for each in SCHEMA_NAMES]))
        elif example:
            click.echo(example_of(name), nl=False)
        elif output is Output.NAME:
            click.echo(schema_of(name)["title"])
        else:
            print_document(schema_of(name), output)
    except BadBody as error:
        raise BadBody(f"schema {error}") from None
