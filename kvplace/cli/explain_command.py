"""`kvplace explain`: why a VM fits nowhere, and how one that runs sits on its machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from kvplace.cli.cluster_flags import ClusterFlags, cluster_flags, complete_target
from kvplace.cli.output import Output, print_answer
from kvplace.cli.parameters import (
    Answer,
    filename_option,
    output_option,
    strategy_option,
    topology_option,
)
from kvplace.core.cluster.node_choice import Strategy
from kvplace.core.errors import Absent, ExitCode

if TYPE_CHECKING:
    from kvplace.core.request_json import PodRequest
    from kvplace.explain.explanation import Explanation
    from kvplace.kube.object_client import Document

_TYPE_AND_NAME = 2


@click.command("explain", short_help="Explain why a VM fits on no node, or show its cores and neighbours.")
@click.argument("words", nargs=-1, metavar="[vm/NAME|vmi/NAME|pod/NAME]", shell_complete=complete_target)
@filename_option(
    "filenames",
    "A VM, VMI or pod that need not exist, with the instancetype that it names; - for stdin. Name one VM if "
    "the files have several.",
)
@topology_option(
    "Explain a VM of -f on this machine, without a cluster; in any form that `kvplace topology` reads.",
)
@strategy_option("The order of the nodes that fit; give the strategy that `serve` runs with.")
@cluster_flags(everywhere=False, selector=False)
@output_option(Answer.REPORT)
def command(
    *,
    flags: ClusterFlags,
    words: tuple[str, ...],
    filenames: tuple[str, ...],
    machine: str | None,
    strategy: Strategy,
    output: Output,
) -> int:
    """Explain a VM.

    A VM without a node: the reasons of all nodes with the shortfall, grouped and counted; the changes that
    would make it fit; the reports of kube-scheduler and KubeVirt. Each node is tried as in scheduling.

    A running VM: its cores, whether its threads were measured there, the VMs that use the same cores, caches
    and NUMA nodes, and its events.

    \b
    kvplace explain -f vm.yaml --topology 2x-epyc-9354

    With --topology, no cluster is needed: the VM is explained as if it were alone on this machine, with all
    changes that would make it fit. `kvplace place` takes several VMs side by side.

    Exit code 3 when it waits and fits on no node.
    """  # noqa: D301 - click needs the literal backslash
    if len(words) > _TYPE_AND_NAME or not (words or filenames):
        raise click.UsageError("name one VM as vm/NAME, vmi/NAME or pod/NAME, or give a file with -f")
    if machine is not None and (not filenames or flags.are_given):
        raise click.UsageError(
            "--topology explains a VM of -f without a cluster; leave out the cluster's flags"
        )
    target = "/".join(words)  # kubectl's `vm NAME` is `vm/NAME`
    from kvplace.admission.stated_request import stated_request
    from kvplace.cli.live_cluster import LiveCluster
    from kvplace.explain.reading import explain_document, explain_target, read_target
    from kvplace.kube.kubeconfig import kubeconfig_files

    given = _read_files(filenames, target) if filenames else None
    if machine is not None and given is not None:
        return _explain_on_machine(given, machine, output)

    def stated(document: Document, namespace: str) -> PodRequest | None:
        return stated_request(document, namespace=namespace)

    async def body(cluster: LiveCluster) -> Explanation:
        if given is not None:
            return await explain_document(
                cluster.objects, cluster.api, given, cluster.namespace, stated, strategy
            )
        found = read_target(target, cluster.namespace)
        return await explain_target(cluster.objects, cluster.api, found, stated, strategy)

    try:
        found = flags.run(body)
    except Absent as error:
        if given is None or kubeconfig_files(flags.kubeconfig) is not None:
            raise
        raise Absent(f"{error}, or a machine with --topology") from None
    from kvplace.cli.explain_lines import explanation_lines
    from kvplace.explain.report import explanation_document

    lines = explanation_lines(found, wide=output is Output.WIDE)
    print_answer(output, lambda: explanation_document(found), lines)
    return ExitCode.DOES_NOT_FIT if found.fits_nowhere else ExitCode.DONE


def _read_files(filenames: Sequence[str], target: str) -> Document:
    from kvplace.admission.stated_request import expanded
    from kvplace.documents.reading import read_manifests, source_name
    from kvplace.explain.reading import choose_document

    contents = [content for file in filenames for _, content in read_manifests(file)]
    chosen = choose_document(contents, target, ", ".join(map(source_name, filenames)))
    has_size = any("instancetype" in str(content.get("kind")).lower() for content in contents)
    return expanded(chosen, contents) if has_size else chosen


def _explain_on_machine(document: Document, machine: str, output: Output) -> int:
    """Explain a VM on one machine that has no other VM."""
    from kvplace.cli.manifest_vms import decision_lines, stated_vm
    from kvplace.cli.parameters import chosen_machine
    from kvplace.cli.place_session import AnswerKind, PlaceSession
    from kvplace.explain.notes import notes_on_document

    vm = stated_vm(document)
    if vm is None:
        notes = list(notes_on_document(document, asks=False))
        print_answer(output, lambda: {"notes": notes}, notes)
        return ExitCode.DONE
    known = chosen_machine(machine)
    answer = PlaceSession(known).place(vm.name, vm.request)
    assert answer.decision is not None
    lines = decision_lines(vm, known, answer.decision, changes=None)
    print_answer(output, lambda: answer.document, lines)
    return ExitCode.DONE if answer.kind is AnswerKind.PLACED else ExitCode.DOES_NOT_FIT
