"""An explanation as lines and rows for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvplace.cli.output import Column, table_of
from kvplace.cli.place_session import domain_phrases
from kvplace.cli.view_tables import measured
from kvplace.core.cpuset import cpus_of, format_cpu_list
from kvplace.core.occupant import Nearness, Neighbour
from kvplace.core.placement import Placement, Reason
from kvplace.core.quantity import about_bytes, counted, first_of
from kvplace.core.request import DeviceNuma, EmulatorThreads, GuestNuma, NumaMemory, Request, Smt
from kvplace.explain.explanation import Explanation, Fitting, Seat, VmEvent
from kvplace.nodes.cluster_view import agreement_needed
from kvplace.nodes.node_machine import NodeMachine

_CHANGES = 4
"""Changes that are shown for one node, the smallest first."""
_NAMED, _NAMED_WIDE = 3, 20
"""Nodes that one line names."""
_WIDTH = 12


def _titled(title: str, sentence: str) -> str:
    return f"{title:<{_WIDTH}}{sentence}"


def _section(title: str, sentences: Iterable[str]) -> Iterator[str]:
    """Write the title before the first of the sentences."""
    for sentence in sentences:
        yield _titled(title, sentence)
        title = ""


def explanation_lines(found: Explanation, *, wide: bool) -> Iterator[str]:
    """Write an explanation: its parts with a blank line between them."""
    yield from head_lines(found)
    if found.fitting is not None:
        yield ""
        yield from fitting_lines(found.fitting, _NAMED_WIDE if wide else _NAMED)
    for seat in found.seats:
        yield ""
        yield from seat_lines(seat)
        # VMs that share only the socket are many.
        near = [one for one in seat.neighbours if wide or one.nearness is not Nearness.SOCKET]
        if near:
            yield from ("", *table_of(_NEIGHBOUR_COLUMNS, near))
    if found.events:
        yield from ("", *table_of(_EVENT_COLUMNS, found.events))


def head_lines(found: Explanation) -> Iterator[str]:
    """Write the kind and name of the VM, its request, and its state."""
    yield _titled("name", f"{found.kind} {found.namespace}/{found.name}")
    if found.request is not None:
        yield _titled("requests", asked(found.request.request, has_qemu=found.kind != "Pod"))
    yield _titled("state", found.state)
    for note in found.notes:
        yield _titled("", note)


def asked(request: Request, *, has_qemu: bool) -> str:
    """Write a request in the words of its annotations, without defaults."""
    options = request.options
    words = [counted(request.vcpus, "vCPU"), options.scope.value, options.policy.value]
    if request.memory:
        words.append(f"{about_bytes(request.memory)} of memory")
    words += [
        f"{counted(count, 'huge page')} of {about_bytes(size)}" for size, count in request.huge_pages.items()
    ]
    words += [f"{count} {resource}" for resource, count in sorted(request.devices.items())]
    words += [
        f"{key} {word.value}"
        for key, word, usual in (
            ("smt", options.smt, Smt.PREFER),
            ("emulator-threads", options.emulator_threads, EmulatorThreads.SHARED),
            ("numa-memory", options.numa_memory, NumaMemory.PREFERRED),
            ("guest-numa", options.guest_numa, GuestNuma.OFF),
            ("device-numa", options.device_numa, DeviceNuma.PREFERRED),
        )
        if word is not usual and (has_qemu or word is not EmulatorThreads.WITH_VCPUS)
    ]
    return ", ".join(words)


def fitting_lines(fitting: Fitting, named: int) -> Iterator[str]:
    """Write the nodes that can hold the VM, the reasons of the others, and changes that help."""
    if fitting.candidates:
        best = fitting.candidates[0]
        yield _titled("fits", f"on {len(fitting.candidates)} of {counted(fitting.nodes, 'node')}")
        yield _titled("best", f"{best.node}: {placed(best.placement)}")
        if others := [one.node for one in fitting.candidates[1:]]:
            yield _titled("then", first_of(others, named))
    else:
        yield _titled("fits", f"on none of {counted(fitting.nodes, 'node')}")
    yield from _section("not on", _reasons(fitting, named))
    yield from _section("would fit", _helping_changes(fitting))
    if not fitting.candidates and not fitting.suggestions and not any(o.would_fit for o in fitting.obstacles):
        yield _titled("would fit", "no single change makes it fit")


def _reasons(fitting: Fitting, named: int) -> Iterator[str]:
    for obstacle in fitting.obstacles:
        would = f"; {first_of(obstacle.would_fit, named)} would hold it" if obstacle.would_fit else ""
        yield f"{counted(len(obstacle.nodes), 'node')}: {obstacle.sentence}{would}"
    for group in fitting.refusals.groups:
        is_too_small = group.refusal.never and group.refusal.reason is not Reason.NO_TOPOLOGY
        never = " (an empty machine would not hold it, either)" if is_too_small else ""
        yield f"{counted(len(group.nodes), 'node')}: {group.text}{never}"


def _helping_changes(fitting: Fitting) -> Iterator[str]:
    for node in fitting.suggestions:
        for suggestion in node.suggestions.found[:_CHANGES]:
            needs_agreement = suggestion.moves and node.need_movable
            needs = f"; {agreement_needed(node.need_movable)}" if needs_agreement else ""
            yield f"{node.node}: {suggestion.sentence}{needs}"


def seat_lines(seat: Seat) -> Iterator[str]:
    """Write where a bound VM sits and whether that was measured."""
    vm, node = seat.vm, seat.node
    yield _titled("node", f"{vm.node} (pod {vm.pod.name}, {vm.state.value})")
    if not node.exists:
        yield _titled(
            "", "the API server has no such node any more; Kubernetes deletes the pod in a minute or two"
        )
    elif not seat.is_ready:
        yield _titled("", "the node is not Ready: the lines below may be out of date;")
        yield _titled(
            "", f"`kubectl describe node {vm.node}` shows since when, and the last report of its kubelet"
        )
    if vm.placement is None:
        yield _titled("cores", "the pod has no placement of kvplace's; another scheduler may have bound it")
    elif vm.placement.placement.floats:
        yield _titled("cores", "none of its own: it floats in the shared pool")
    else:
        placement = vm.placement.placement
        yield _titled("cores", placed(placement))
        if placement.emulator_cpus and vm.is_vmi:
            yield _titled("", f"QEMU's own threads on {format_cpu_list(placement.emulator_cpus)}")
        if seat.unclaimed:
            yield _titled("", _unclaimed(seat))
        yield _titled("revision", _revision(seat))
        machine = node.machine
        if isinstance(machine, NodeMachine) and vm.placement.topology not in (
            "",
            machine.topology.fingerprint,
        ):
            yield _titled("", "the machine has another topology now than when the cores were chosen")
    title = "devices"
    for one in vm.devices or ():
        address = f" {one.device.address}" if one.device.address else ""
        claim = f" of ResourceClaim {one.device.claim}" if one.device.claim else ""
        yield _titled(title, f"{one.device.resource}{address}{claim} {one.place}")
        title = ""
    yield _titled("pinned", _pinned(seat))
    if seat.report is not None and seat.report.drift:
        yield _titled("", f"the agent measures: {seat.report.drift}")


def placed(placement: Placement) -> str:
    """Write the CPUs of a placement with their sockets, NUMA nodes and L3 caches."""
    parts = [f"CPUs {format_cpu_list(placement.cpus)}"]
    if idle := placement.owned & ~placement.cpus:
        parts.append(f"owned beside them {format_cpu_list(idle)}")
    parts += domain_phrases(placement)
    if placement.memory:
        memory = ", ".join(f"{about_bytes(count)} on {node}" for node, count in placement.memory.items())
        parts.append(f"memory {memory}")
    return "; ".join(parts)


_NEIGHBOUR_COLUMNS: tuple[Column[Neighbour], ...] = (
    Column("NEIGHBOUR", lambda one: one.claim.vm_name),
    Column("POLICY", lambda one: one.claim.policy.value),
    Column("SHARES", lambda one: one.nearness.value),
    Column("ITS CPUS THERE", lambda one: format_cpu_list(one.shared)),
)
_EVENT_COLUMNS: tuple[Column[VmEvent], ...] = (
    Column("LAST SEEN", lambda one: one.when),
    Column("COUNT", lambda one: str(one.count)),
    Column("OBJECT", lambda one: one.about),
    Column("REASON", lambda one: one.reason),
    Column("MESSAGE", lambda one: one.note),
)


def _unclaimed(seat: Seat) -> str:
    ledger = seat.node.ledger
    others = {ledger.owners[cpu] for cpu in cpus_of(seat.unclaimed) if cpu in ledger.owners}
    claims = (ledger.claims.get(uid) for uid in sorted(others))
    names = [claim.vm_name for claim in claims if claim is not None]
    ownership = f"belong to {', '.join(names) or 'another pod'}" if others else "have no owner"
    return (
        f"CPUs {format_cpu_list(seat.unclaimed)} of these {ownership} in the ledger of the node; "
        "`kubectl kvplace doctor` reports more"
    )


def _revision(seat: Seat) -> str:
    assert seat.vm.placement is not None
    number = seat.vm.placement.revision
    text = (
        "1, as it was bound" if number == 1 else f"{number}: it got other cores {counted(number - 1, 'time')}"
    )
    if seat.is_relocating:
        text += "; it is getting other cores now, and holds both until its agent confirms"
    report = seat.report
    if report is not None and report.failed_revision:
        text += f"; revision {report.failed_revision} could not be carried out"
    return text


def _pinned(seat: Seat) -> str:
    if seat.vm.is_over:
        return "not measured any more: its QEMU has ended"
    condition = seat.vm.pinned
    if condition is None:
        if seat.node.described is None or not seat.node.described.by_agent:
            return "not measured: no agent describes this node"
        return "not measured yet"
    word = {True: "yes", False: "no", None: "unknown"}[condition.status]
    since = f", since {seat.measured_since}" if seat.measured_since else ""
    return f"{word}{since}: {measured(condition)}"
