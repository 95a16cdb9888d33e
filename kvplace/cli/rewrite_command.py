"""`kvplace rewrite`: a libvirt domain, pinned as the hook pins it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping

import click

from kvplace.cli.output import say
from kvplace.cli.parameters import InputFile, topology_option
from kvplace.core.cpuset import cpus_of
from kvplace.core.errors import BadAnnotation, BadBody, BadDomainXml, Misconfigured
from kvplace.core.placement import PodPlacement
from kvplace.core.scalars import CpuId, NumaId
from kvplace.core.strict_json import json_object, shown

_VMI = "VirtualMachineInstance"
_MAX_PLACEMENT_BYTES = 1024 * 1024


@click.command("rewrite", short_help="Pin the threads of a libvirt domain by a placement.")
@click.option("--domain", type=InputFile(), required=True, help="The domain XML; - is stdin.")
@click.option(
    "--placement",
    type=InputFile(),
    help="A pod's annotation kvplace.io/placement, or an answer of `kvplace place -o json`; - is stdin.",
)
@click.option("--cpu-map", metavar="JSON", help='A bare cpu-map, for example {"socket0": ["2", "34"]}.')
@topology_option(
    "The machine; needed only to bind the memory of guest NUMA cells.",
)
@click.option(
    "--vmi",
    type=InputFile(),
    help="The VirtualMachineInstance that the hook gets with the domain; - is stdin. It does not change the "
    "answer; a note about it goes to stderr.",
)
def command(
    domain: str, placement: str | None, cpu_map: str | None, machine: str | None, vmi: str | None
) -> None:
    """Print a libvirt domain with its threads pinned and its memory bound by a placement."""
    from kvplace.documents.reading import read_content
    from kvplace.domainxml import MAX_DOMAIN_BYTES, rewrite

    if (placement is None) == (cpu_map is None):
        raise click.UsageError("give either --placement or --cpu-map", click.get_current_context())
    xml = read_content(domain, _called("--domain", domain), MAX_DOMAIN_BYTES)
    chosen = _of_cpu_map(cpu_map or "") if placement is None else _placement(placement)
    if chosen.placement.floats:
        raise Misconfigured("by this placement the VM runs unpinned: the hook does not change its domain")
    notes = () if vmi is None else _notes_about(vmi)
    nodes = _nodes(machine)
    try:
        rewritten = rewrite(xml, chosen.placement, nodes, say)
    except BadDomainXml as error:
        raise BadDomainXml(f"{_called('--domain', domain)}: {error}") from None
    say(*notes)
    sys.stdout.buffer.write(rewritten)
    sys.stdout.buffer.flush()


def _of_cpu_map(text: str) -> PodPlacement:
    try:
        return PodPlacement.of_cpu_map(text)
    except BadAnnotation as error:
        raise BadBody(f"--cpu-map {shown(text)} {error.fix}") from None


def _placement(path: str) -> PodPlacement:
    """Read an annotation, or one answer of `kvplace place` that holds one."""
    from kvplace.documents.reading import read_source

    what = _called("--placement", path)
    text = read_source(path, what, _MAX_PLACEMENT_BYTES)
    lines = text.strip().splitlines()
    if not lines:
        raise BadBody(f"{what} is empty; give one answer of `kvplace place -o json`")
    if len(lines) > 1 and all(line.startswith("{") and line.endswith("}") for line in lines):
        raise BadBody(f"{what} contains {len(lines)} answers; give the answer for this VM only")
    document = json_object(text, what=what)
    if "refusal" in document:
        raise BadBody(f"{what} contains a refusal: there are no CPUs to pin the VM to")
    if "placement" not in document and "version" not in document:
        raise BadBody(f"{what} contains no placement; give one answer of `kvplace place -o json`")
    try:
        return PodPlacement.from_json(json.dumps(document.get("placement", document)))
    except BadAnnotation as error:
        raise BadBody(f"{what}: the placement {error.fix}") from None


def _notes_about(path: str) -> tuple[str, ...]:
    """Return the fields of a VMI that matter for the domain; raises BadBody when it is not a VMI."""
    from kvplace.documents.reading import read_document, read_source
    from kvplace.hook.define_domain import MIGRATION_TARGET, is_migration_target

    what = _called("--vmi", path)
    vmi = read_document(read_source(path, what), what)
    if vmi.get("kind", _VMI) != _VMI or "metadata" not in vmi:
        raise BadBody(f"{what} is not a {_VMI}; give the output of `kubectl get vmi NAME -o json`")
    try:
        return (MIGRATION_TARGET,) if is_migration_target(vmi) else ()
    except AttributeError:
        raise BadBody(f"{what}: status.migrationState must be a mapping") from None


def _called(option: str, path: str) -> str:
    return option if path == "-" else f"{option} {path}"


def _nodes(machine: str | None) -> Mapping[CpuId, NumaId]:
    """Map CPUs to NUMA nodes."""
    if machine is None:
        return {}
    from kvplace.machines.machine import find_machine

    nodes = find_machine(machine).topology.numa_nodes
    return {CpuId(cpu): NumaId(node.id) for node in nodes for cpu in cpus_of(node.cpus)}
