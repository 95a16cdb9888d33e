"""`kvplace schema`: the JSON Schemas of the documents that people write, for editors and checks."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem

from kvplace.cli.output import Output, print_document, print_table
from kvplace.cli.parameters import Answer, output_option
from kvplace.core.errors import BadBody


def _complete(_context: click.Context, _argument: click.Parameter, begun: str) -> list[CompletionItem]:
    from kvplace.documents import SCHEMA_NAMES

    return [CompletionItem(name) for name in SCHEMA_NAMES if name.startswith(begun)]


@click.command("schema", short_help="Print the JSON Schema of a document that you write.")
@click.argument("name", required=False, shell_complete=_complete)
@click.option("--example", is_flag=True, help="Print an example of the document instead.")
@output_option(Answer.DOCUMENT)
def command(name: str | None, example: bool, output: Output) -> None:
    """Print the JSON Schema of a document that you write; without NAME, list the documents.

    An editor with a YAML or JSON language server completes and checks a document with its schema.
    """
    from kvplace.documents import SCHEMA_NAMES, example_of, schema_of

    if name is None and example:
        raise click.UsageError(f"--example needs the NAME of a document: {', '.join(SCHEMA_NAMES)}")
    if name is None:
        if output is Output.NAME:
            click.echo("\n".join(SCHEMA_NAMES))
        else:
            print_table([(each, schema_of(each)["description"]) for each in SCHEMA_NAMES])
        return
    try:
        if example:
            click.echo(example_of(name), nl=False)
        elif output is Output.NAME:
            click.echo(schema_of(name)["title"])
        else:
            print_document(schema_of(name), output)
    except BadBody as error:
        raise BadBody(f"schema {error}") from None
