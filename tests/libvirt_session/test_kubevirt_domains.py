"""KubeVirt's own documents, rewritten for a placement, run on real QEMU where the placement states."""

from dataclasses import replace

import pytest

from harness.libvirt_session.daemon import LibvirtSession
from harness.libvirt_session.documents import minimal_domain, without_its_pod
from kvplace.core.cpuset import cpus_of, mask_of
from kvplace.core.placement import Placement
from kvplace.core.request import NumaMemory, Policy
from kvplace.core.scalars import CpuMask, NumaId
from kvplace.domainxml import rewrite
from tests.kubevirt_documents import DOMAINS
from tests.libvirt_session.guest_memory import policies_of_guest_memory

pytestmark = pytest.mark.libvirt_session

DOCUMENTS = [path.name for path in sorted(DOMAINS.glob("*-amd64-*.domain.xml"))]
WITH_IO_THREADS = {
    "09-amd64-iothreads-shared.domain.xml": 2,
    "11-amd64-iothreads-supplementalpool.domain.xml": 4,
}
BINDINGS = [NumaMemory.STRICT, NumaMemory.PREFERRED, NumaMemory.INTERLEAVE]


def placement_on(session: LibvirtSession, numa_memory: NumaMemory = NumaMemory.STRICT) -> Placement:
    """Gives each vCPU one of two CPUs in turn, the emulator the second, I/O threads both in turn."""
    first, second = list(cpus_of(CpuMask(session.group.effective())))[:2]
    return Placement(
        policy=Policy.SHARE,
        vcpus=(second, first) * 8,
        cpus=mask_of([first, second]),
        emulator_cpus=mask_of([second]),
        io_thread_cpus=(mask_of([first]), mask_of([second])),
        numa_nodes=(NumaId(0),),
        numa_memory=numa_memory,
        memory={},
    )


def rewritten(name: str, placement: Placement, session: LibvirtSession) -> bytes:
    document = (DOMAINS / name).read_bytes()
    return without_its_pod(rewrite(document, placement), session.folder / "run")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_thread_of_a_rewritten_document_runs_where_the_placement_states(
    name: str, libvirt_session: LibvirtSession
) -> None:
    placement = placement_on(libvirt_session)
    with libvirt_session.running(rewritten(name, placement, libvirt_session)) as domain:
        found = domain.affinities()
    assert found.vcpus(), "QEMU shows no vCPU threads"
    assert found.vcpus() == {vcpu: mask_of([placement.vcpus[vcpu]]) for vcpu in found.vcpus()}
    assert len(found.io_threads()) == WITH_IO_THREADS.get(name, 0)
    assert found.io_threads() == {
        number: placement.io_thread_cpus[(number - 1) % 2] for number in found.io_threads()
    }
    assert found.emulator()
    assert set(found.emulator().values()) == {placement.emulator_cpus}


def test_threads_of_a_shared_pool_may_use_all_of_it_and_no_more(libvirt_session: LibvirtSession) -> None:
    first = mask_of([next(cpus_of(CpuMask(libvirt_session.group.effective())))])
    placement = replace(
        placement_on(libvirt_session),
        policy=Policy.NUMA,
        vcpus=(),
        cpus=first,
        emulator_cpus=first,
        io_thread_cpus=(),
    )
    xml = rewritten("09-amd64-iothreads-shared.domain.xml", placement, libvirt_session)
    with libvirt_session.running(xml) as domain:
        found = domain.affinities()
    assert {thread.cpus for thread in found.threads} == {first}


def test_a_rewritten_document_that_comes_back_for_another_placement_follows_it(
    libvirt_session: LibvirtSession,
) -> None:
    earlier = placement_on(libvirt_session)
    later = replace(
        earlier,
        vcpus=earlier.vcpus[1:],
        emulator_cpus=earlier.cpus & ~earlier.emulator_cpus,
        io_thread_cpus=(),
    )
    document = (DOMAINS / "05-amd64-dedicated.domain.xml").read_bytes()
    twice = without_its_pod(rewrite(rewrite(document, earlier), later), libvirt_session.folder / "run")
    with libvirt_session.running(twice) as domain:
        found = domain.affinities()
    assert found.vcpus() == {vcpu: mask_of([later.vcpus[vcpu]]) for vcpu in range(4)}
    assert set(found.emulator().values()) == {later.emulator_cpus}


@pytest.mark.parametrize(
    ("mode", "policy"), [(NumaMemory.STRICT, "bind"), (NumaMemory.INTERLEAVE, "interleave")]
)
def test_guest_memory_is_bound_to_the_placements_numa_node(
    mode: NumaMemory, policy: str, libvirt_session: LibvirtSession
) -> None:
    xml = rewrite(minimal_domain(f"bound-{policy}").encode(), placement_on(libvirt_session, mode))
    with libvirt_session.running(xml) as domain:
        assert policies_of_guest_memory(domain.pid, megabytes=64) == {f"{policy}:0"}


@pytest.mark.parametrize("mode", BINDINGS)
def test_a_memory_binding_keeps_a_domain_from_starting_where_seccomp_denies_it(
    mode: NumaMemory, libvirt_session_without_memory_policy: LibvirtSession
) -> None:
    import libvirt

    session = libvirt_session_without_memory_policy
    xml = rewritten("05-amd64-dedicated.domain.xml", placement_on(session, mode), session)
    with (
        pytest.raises(
            libvirt.libvirtError, match="cannot bind memory to host NUMA nodes: Operation not permitted"
        ),
        session.running(xml),
    ):
        pass


def test_pins_alone_start_where_seccomp_denies_memory_bindings(
    libvirt_session_without_memory_policy: LibvirtSession,
) -> None:
    session = libvirt_session_without_memory_policy
    placement = placement_on(session, NumaMemory.OFF)
    with session.running(rewritten("05-amd64-dedicated.domain.xml", placement, session)) as domain:
        found = domain.affinities()
    assert found.vcpus() == {vcpu: mask_of([placement.vcpus[vcpu]]) for vcpu in range(4)}
    assert set(found.emulator().values()) == {placement.emulator_cpus}


def test_memory_that_is_plugged_in_gets_the_numa_node_of_the_vm(libvirt_session: LibvirtSession) -> None:
    """KubeVirt attaches one virtio-mem device; it names no host node and follows `<numatune><memory>`."""
    port = "<controller type='pci' model='pcie-root'/><controller type='pci' model='pcie-root-port'/>"
    xml = minimal_domain(
        "growing",
        vcpus=1,
        inside="""
          <maxMemory unit='MiB' slots='1'>512</maxMemory>
          <numatune><memory mode='strict' nodeset='0'/></numatune>
          <cpu><numa><cell id='0' cpus='0' memory='64' unit='MiB'/></numa></cpu>""",
    ).replace("<devices>", f"<devices>{port}")
    plugged = """
      <memory model='virtio-mem'>
        <target><size unit='MiB'>128</size><node>0</node><block unit='MiB'>2</block>
          <requested unit='MiB'>64</requested></target>
      </memory>"""
    with libvirt_session.running(xml) as domain:
        domain.handle.attachDeviceFlags(plugged, 1)  # VIR_DOMAIN_AFFECT_LIVE
        assert policies_of_guest_memory(domain.pid, 128) == {"bind:0"}
