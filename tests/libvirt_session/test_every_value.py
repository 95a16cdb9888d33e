"""Every value of an annotation on real threads: annotations, allocator, the hook in its pod, libvirt, QEMU.

The machine that runs the tests gives the two CPUs of `tests/core/option_values.py`, called a and b there; the
allocator is informed that they are the threads of one core, or that each is a socket, or that the host keeps
a for itself.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from harness.libvirt_session.daemon import LibvirtSession
from harness.libvirt_session.documents import minimal_domain
from kvplace.core.allocator.allocate import place
from kvplace.core.annotations import read_options
from kvplace.core.cpuset import cpus_of
from kvplace.core.free_resources import free_of
from kvplace.core.ledger import Ledger
from kvplace.core.placement import Placement
from kvplace.core.request import Request
from kvplace.core.scalars import Bytes, CpuMask
from kvplace.core.topology import Topology
from tests.core.option_values import PINNED_IDS, PINNED_VALUES, OptionValue, Threads
from tests.libvirt_session.guest_memory import policies_of_guest_memory
from tests.libvirt_session.hook_sidecar import Sidecar

pytestmark = pytest.mark.libvirt_session

MEGABYTES = 64
# As in the kernel's /proc/PID/numa_maps of the guest's memory.
MEMORY = {"preferred": "prefer:0", "strict": "bind:0", "interleave": "interleave:0", "off": "default"}


def pod_placement(topology: Topology, annotations: Mapping[str, str], vcpus: int) -> Placement:
    options = read_options(annotations)
    assert options is not None
    request = Request(vcpus, options, memory=Bytes(MEGABYTES << 20))
    placement = place(topology, free_of(topology, Ledger()), request)
    assert isinstance(placement, Placement), placement
    return placement


@pytest.fixture
def sidecar(libvirt_session: LibvirtSession, request: pytest.FixtureRequest) -> Sidecar:
    folder = libvirt_session.folder / f"value-{abs(hash(request.node.nodeid))}"
    folder.mkdir()
    return Sidecar(libvirt_session, folder)


@pytest.mark.parametrize(("row", "threads"), PINNED_VALUES, ids=PINNED_IDS)
def test_every_thread_runs_and_memory_is_bound_where_the_value_states(
    row: OptionValue, threads: Threads, libvirt_session: LibvirtSession, sidecar: Sidecar
) -> None:
    a, b = (1 << cpu for cpu in list(cpus_of(CpuMask(libvirt_session.group.effective())))[:2])
    names = {"a": a, "b": b, "ab": a | b}
    wanted = [names[text] for text in threads.vcpus.split()]
    annotations = {**row.annotations, **threads.beside}
    placement = pod_placement(threads.on(a, b), annotations, len(wanted))
    document = minimal_domain("value", vcpus=len(wanted), inside="<iothreads>2</iothreads>")
    answer = sidecar.answer(document, placement)
    assert answer.returncode == 0, answer.stderr
    with libvirt_session.running(answer.stdout) as domain:
        found = domain.affinities()
        memory = policies_of_guest_memory(domain.pid, MEGABYTES)
    assert found.vcpus() == dict(enumerate(wanted))
    assert set(found.emulator().values()) == {names[threads.emulator]}
    assert set(found.io_threads().values()) == {names[threads.emulator]}
    assert len(found.io_threads()) == 2
    assert memory == {MEMORY[annotations.get("kvplace.io/numa-memory", "preferred")]}
