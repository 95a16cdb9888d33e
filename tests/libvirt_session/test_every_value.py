"""Every value of an annotation on real threads: annotations, allocator, the hook in its pod, libvirt, QEMU.

The machine that runs the tests gives two CPUs, called a and b here; the allocator is informed that they are
the threads of one core, or that each is a socket, or that the host keeps a for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

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
from kvplace.core.well_known_names import OPTING_IN
from tests.core.machines import make_numa_node, make_package, make_topology
from tests.libvirt_session.guest_memory import policies_of_guest_memory
from tests.libvirt_session.hook_sidecar import Sidecar

pytestmark = pytest.mark.libvirt_session

GIB = Bytes(1 << 30)
MEGABYTES = 64


def one_core(a: int, b: int) -> Topology:
    return make_topology(
        packages=(make_package(0, a | b),),
        numa_nodes=(make_numa_node(0, a | b, GIB),),
        l3_groups=(a | b,),
        cores=(a | b,),
    )


def two_sockets(a: int, b: int) -> Topology:
    return make_topology(
        packages=(make_package(0, a), make_package(1, b)),
        numa_nodes=(
            make_numa_node(0, a, GIB, {}, {0: 10, 1: 21}),
            make_numa_node(1, b, GIB, {}, {0: 21, 1: 10}),
        ),
        l3_groups=(a, b),
        cores=(a, b),
    )


def a_reserved(a: int, b: int) -> Topology:
    return make_topology(
        packages=(make_package(0, a | b),),
        numa_nodes=(make_numa_node(0, a | b, GIB),),
        l3_groups=(a | b,),
        cores=(a, b),
        reserved=a,
    )


@dataclass(frozen=True)
class Case:
    """The request of a VM, and where its threads must run: CPUs of each vCPU with blanks between, of QEMU."""

    words: str
    vcpus: str
    emulator: str
    on: Callable[[int, int], Topology] = one_core


CASES = [
    Case("cpu-set=one-socket kvplace.io/numa-memory=strict", "a b", "ab"),
    Case("cpu-set=one-l3 kvplace.io/numa-memory=interleave", "a b", "ab"),
    Case("cpu-set=spread-sockets kvplace.io/numa-memory=off", "a b", "ab", two_sockets),
    Case("cpu-set=spread-numa kvplace.io/numa-memory=off", "a b", "ab", two_sockets),
    Case("cpu-set=any kvplace.io/numa-memory=off", "a b", "ab", two_sockets),
    Case("kvplace.io/cpu-set=one-numa", "a", "a", two_sockets),
    Case("kvplace.io/cpu-policy=exclusive", "b", "a", a_reserved),
    Case("kvplace.io/emulator-threads=with-vcpus", "b", "b", a_reserved),
    Case("kvplace.io/cpu-policy=share", "b", "a", a_reserved),
    Case("kvplace.io/cpu-policy=share kvplace.io/emulator-threads=isolate", "a", "b"),
    Case("kvplace.io/cpu-policy=immovable", "a b", "ab"),
    Case("kvplace.io/cpu-policy=numa", "ab ab", "ab"),
    Case("kvplace.io/smt=prefer kvplace.io/emulator-threads=isolate", "a", "b"),
    Case("kvplace.io/smt=require", "a", "b"),
    Case("kvplace.io/smt=isolate", "a", "a"),
    Case("topology.crane.io/cpu-policy=numa", "ab", "ab"),
    Case("qos.gocrane.io/cpu-manager=share topology.crane.io/topology-awareness=true", "a b", "ab"),
]
# As in the kernel's /proc/PID/numa_maps of the guest's memory.
MEMORY = {"preferred": "prefer:0", "strict": "bind:0", "interleave": "interleave:0", "off": "default"}


def pod_placement(topology: Topology, annotations: Mapping[str, str], vcpus: int) -> Placement:
    opted_in = any(key in OPTING_IN for key in annotations)
    options = read_options(annotations if opted_in else {"cpu-set": "one-socket", **annotations})
    assert options is not None
    request = Request(vcpus, options, memory=Bytes(MEGABYTES << 20))
    placement = place(topology, free_of(topology, Ledger()), request)
    assert isinstance(placement, Placement), placement
    return placement


@pytest.fixture
def sidecar(libvirt_session: LibvirtSession, request: pytest.FixtureRequest) -> Sidecar:
    folder = libvirt_session.folder / f"words-{abs(hash(request.node.nodeid))}"
    folder.mkdir()
    return Sidecar(libvirt_session, folder)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.words)
def test_every_thread_runs_and_memory_is_bound_where_the_words_state(
    case: Case, libvirt_session: LibvirtSession, sidecar: Sidecar
) -> None:
    a, b = (1 << cpu for cpu in list(cpus_of(CpuMask(libvirt_session.group.effective())))[:2])
    names = {"a": a, "b": b, "ab": a | b}
    wanted = [names[text] for text in case.vcpus.split()]
    annotations = dict(word.split("=") for word in case.words.split())
    placement = pod_placement(case.on(a, b), annotations, len(wanted))
    document = minimal_domain("words", vcpus=len(wanted), inside="<iothreads>2</iothreads>")
    answer = sidecar.answer(document, placement)
    assert answer.returncode == 0, answer.stderr
    with libvirt_session.running(answer.stdout) as domain:
        found = domain.affinities()
        memory = policies_of_guest_memory(domain.pid, MEGABYTES)
    assert found.vcpus() == dict(enumerate(wanted))
    assert set(found.emulator().values()) == {names[case.emulator]}
    assert set(found.io_threads().values()) == {names[case.emulator]}
    assert len(found.io_threads()) == 2
    assert memory == {MEMORY[annotations.get("kvplace.io/numa-memory", "preferred")]}
