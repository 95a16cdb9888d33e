"""`kvplace explain`: why a VM fits nowhere, and how one that runs sits on its machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kvplace.cli.cluster_flags import ClusterFlags, cluster_flags
from kvplace.cli.cluster_names import complete_target
from kvplace.cli.files import InputFile
from kvplace.cli.output import Answer, Output, output_option, print_document, print_line, print_table
from kvplace.cli.words import Words
from kvplace.core.cluster.node_choice import Strategy
from kvplace.core.errors import ExitCode

if TYPE_CHECKING:
    from kvplace.core.request_document import PodRequest
    from kvplace.explain.explanation import Explanation
    from kvplace.kube.object_reader import Document

_NAMED = 3
"""Nodes that a line names; `wide` names more."""
_NAMED_WIDE = 20
_TYPE_AND_NAME = 2


@click.command("explain", short_help="Say why a VM fits nowhere, or how it sits on its machine.")
@click.argument("words", nargs=-1, metavar="[vm/NAME|vmi/NAME|pod/NAME]", shell_complete=complete_target)
@click.option(
    "-f",
    "--filename",
    type=InputFile(),
    metavar="FILE",
    help="A VM, VMI or pod that need not exist, - for stdin; as `kubectl apply` takes it. "
    "Name one where the file has several.",
)
@click.option(
    "--strategy",
    type=Words([strategy.value for strategy in Strategy]),
    default=Strategy.PACK.value,
    show_default=True,
    help="The order of the nodes that fit; give the one that `serve` runs with.",
)
@cluster_flags(everywhere=False, selector=False)
@output_option(Answer.REPORT)
def command(
    *, flags: ClusterFlags, words: tuple[str, ...], filename: str | None, strategy: str, output: Output
) -> int:
    """Explain a VM.

    One that has no node: what keeps it from every node, with the shortfall, grouped and counted; which
    changes would make it fit; what kube-scheduler and KubeVirt say. Nodes are asked as the scheduler asks.

    One that runs: its cores, whether its threads were measured there, who uses the same cores, caches and
    NUMA nodes, and what happened to it.

    Exit code 3 when it waits and fits nowhere.
    """
    if len(words) > _TYPE_AND_NAME or not (words or filename):
        raise click.UsageError("name one VM as vm/NAME, vmi/NAME or pod/NAME, or give a file with -f")
    target = "/".join(words)  # kubectl's `vm NAME` is `vm/NAME`
    from kvplace.admission.stated_request import stated_request
    from kvplace.cli.live_cluster import LiveCluster, run_with_cluster
    from kvplace.explain.reading import explain_document, explain_target, read_target
    from kvplace.kube.object_reader import ObjectReader

    given = None if filename is None else _read_file(filename, target)

    def stated(document: Document, namespace: str) -> PodRequest | None:
        return stated_request(document, namespace=namespace)

    async def body(cluster: LiveCluster) -> Explanation:
        reader, chosen = ObjectReader(cluster.session), Strategy(strategy)
        if given is not None:
            return await explain_document(reader, cluster.api, given, cluster.namespace, stated, chosen)
        found = read_target(target, cluster.namespace)
        return await explain_target(reader, cluster.api, found, stated, chosen)

    found = run_with_cluster(flags, body)
    if output.is_document:
        from kvplace.explain.report import explanation_document

        print_document(explanation_document(found), output)
    else:
        _print(found, wide=output is Output.WIDE)
    return ExitCode.DOES_NOT_FIT if found.fits_nowhere else ExitCode.DONE


def _read_file(filename: str, target: str) -> Document:
    from kvplace.admission.instancetype import expanded
    from kvplace.documents.manifests import read_manifests
    from kvplace.documents.reading import source_name
    from kvplace.explain.reading import choose_document

    contents = [content for _, content in read_manifests(filename)]
    chosen = choose_document(contents, target, source_name(filename))
    has_size = any("instancetype" in str(content.get("kind")).lower() for content in contents)
    return expanded(chosen, contents) if has_size else chosen


def _print(found: Explanation, *, wide: bool) -> None:
    from kvplace.cli.explain_lines import event_rows, fitting_lines, head_lines, neighbour_rows, seat_lines

    named = _NAMED_WIDE if wide else _NAMED
    for line in head_lines(found):
        print_line(line)
    if found.fitting is not None:
        print_line()
        for line in fitting_lines(found.fitting, named):
            print_line(line)
    for seat in found.seats:
        print_line()
        for line in seat_lines(seat):
            print_line(line)
        if rows := list(neighbour_rows(seat, wide=wide)):
            print_line()
            print_table(rows)
    if rows := list(event_rows(found)):
        print_line()
        print_table(rows)
