"""The domain for each option, on KubeVirt's own documents, through all components between.

VMI admission, pod admission, filter and bind of the extender, the annotations of the binding, the hook: the
real code of each, on a cluster in memory. KubeVirt's part is played from its captured documents.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from lxml import etree

from harness.libvirt_session.documents import minimal_domain
from kvplace.admission.pod import NewPod, admit_pod
from kvplace.admission.vmi import admit_vmi
from kvplace.core.cpuset import cpus_of, mask_of, parse_cpu_list
from kvplace.core.errors import Misconfigured
from kvplace.core.placement import Placement, PodPlacement
from kvplace.core.request import NumaMemory, PinningOptions
from kvplace.core.request_json import read_pod_request
from kvplace.core.scalars import Bytes, NodeName
from kvplace.core.topology import Topology
from kvplace.core.well_known_names import CPU_MAP, PLACEMENT, REQUEST
from kvplace.hook.define_domain import define_domain
from kvplace.hook.process import PodEnvironment
from kvplace.simulate.demo_vms import launcher_pod
from tests.admission.reviewed_objects import SETTINGS
from tests.controller.replicas import replica
from tests.core.machines import make_numa_node, make_package, make_topology
from tests.core.option_values import PINNED_IDS, PINNED_VALUES, OptionValue, Threads
from tests.domainxml.documents import bindings, cells, pins, topology
from tests.hook.machine import NODE, PodFolder, forbidden, logged, works
from tests.kube.faulty_cluster import FaultyCluster
from tests.kubevirt_documents import DOMAINS

GIB = Bytes(1 << 30)
FOUR, EIGHT_IN_PAGES, EIGHT_THREADS = (
    "01-amd64-plain-4vcpu",
    "13-amd64-hugepages-nonuma",
    "19-amd64-windows-efi",
)
FIRST, SECOND = parse_cpu_list("0-15,32-47"), parse_cpu_list("16-31,48-63")
MACHINE = make_topology(
    packages=(make_package(0, FIRST), make_package(1, SECOND)),
    numa_nodes=(
        make_numa_node(0, FIRST, 64 * GIB, {Bytes(1 << 21): 8192}, {0: 10, 1: 21}),
        make_numa_node(1, SECOND, 64 * GIB, {Bytes(1 << 21): 8192}, {0: 21, 1: 10}),
    ),
    l3_groups=tuple(
        parse_cpu_list(text) for text in ("0-7,32-39", "8-15,40-47", "16-23,48-55", "24-31,56-63")
    ),
    cores=tuple(mask_of((cpu, cpu + 32)) for cpu in range(32)),
    reserved=mask_of((0, 32, 16, 48)),
)
"""The machine that the hook of these tests is on: two sockets of 16 cores with two threads each."""


@dataclass
class Served:
    """One VM at the end of its way."""

    bound: PodPlacement
    cpu_map: Mapping[str, list[str]]
    xml: bytes
    options: PinningOptions
    """As the pod states them."""

    @property
    def placement(self) -> Placement:
        return self.bound.placement

    @property
    def vcpu_pins(self) -> list[str]:
        found = pins(self.xml)
        return [found[f"vcpu {vcpu}"] for vcpu in range(sum(name.startswith("vcpu") for name in found))]

    @property
    def emulator(self) -> str:
        return pins(self.xml)["emulator"]


def as_kubevirt_made_it(name: str, annotations: Mapping[str, str]) -> tuple[dict[str, Any], bytes]:
    folder = DOMAINS
    vmi = json.loads((folder / f"{name}.vmi.json").read_text())
    vmi["metadata"] |= {"namespace": "default", "annotations": dict(annotations), "labels": {}}
    return vmi, (folder / f"{name}.domain.xml").read_bytes()


def given_out(free: str) -> str:
    """Write the annotation of the node that gives out these CPUs."""
    cpus = parse_cpu_list(free)
    allowed = {f"socket{s}": [str(cpu) for cpu in cpus_of(cpus & c)] for s, c in ((0, FIRST), (1, SECOND))}
    return json.dumps({key: ids for key, ids in allowed.items() if ids})


@pytest.fixture
def lead(env: PodEnvironment, pod: PodFolder) -> Any:
    """Lead a VM from its creation to its domain, on a node with this machine."""

    async def on_its_way(
        raw: dict[str, Any], domain: bytes, machine: Topology, *, cpu_map: str = "", trial: Any = works
    ) -> Served:
        vmi = dict(admit_vmi(raw, namespace="default", settings=SETTINGS).object)
        made = launcher_pod(vmi)
        author = SETTINGS.kubevirt_controller
        assert NewPod.read(made, settings=SETTINGS, author=author).needed_vmi is None
        admitted = admit_pod(made, namespace="default", settings=SETTINGS, author=author).object
        cluster = FaultyCluster()
        cluster.create_node(NODE, topology=machine, cpu_map=cpu_map)
        stored = cluster.create_pod(
            "launcher", request=admitted["metadata"]["annotations"][REQUEST], vmi=raw["metadata"]["name"]
        )
        async with replica(cluster, controller=False) as one:
            answer = await one.filter(stored)
            error = await one.bind(stored, NODE) if answer.names else ""
        refused = {**answer.unresolvable, **answer.unresolvable}
        if refused:
            raise Misconfigured(refused[NodeName(NODE)])
        assert error == ""
        written = cluster.pod_annotations(stored.namespace, stored.name)
        await cluster.close()
        pod.write("uid", stored.uid)
        pod.write("placement", written[PLACEMENT])
        pod.write("request", admitted["metadata"]["annotations"][REQUEST])
        once = define_domain(domain, json.dumps(vmi).encode(), env, trial)
        assert define_domain(once, b"{}", env, trial) == once
        options = read_pod_request(admitted["metadata"]["annotations"][REQUEST]).request.options
        return Served(PodPlacement.from_json(written[PLACEMENT]), json.loads(written[CPU_MAP]), once, options)

    return on_its_way


@pytest.fixture
def serve(lead: Any) -> Any:
    """Lead a VM of KubeVirt's documents to its domain, on the machine of two sockets."""

    async def serve(
        name: str, annotations: Mapping[str, str], *, free: str = "1-15,33-47,17-31,49-63", trial: Any = works
    ) -> Served:
        raw, domain = as_kubevirt_made_it(name, annotations)
        served: Served = await lead(raw, domain, MACHINE, cpu_map=given_out(free), trial=trial)
        return served

    return serve


@pytest.mark.parametrize(("row", "threads"), PINNED_VALUES, ids=PINNED_IDS)
async def test_threads_are_pinned_and_memory_is_bound_where_the_value_states(
    row: OptionValue, threads: Threads, lead: Any
) -> None:
    """On a machine of CPU 0, called a, and CPU 1, called b."""
    names = {"a": "0", "b": "1", "ab": "0-1"}
    wanted = [names[text] for text in threads.vcpus.split()]
    raw, _ = as_kubevirt_made_it(FOUR, {**row.annotations, **threads.beside})
    raw["spec"]["domain"] |= {"cpu": {"cores": len(wanted)}, "memory": {"guest": "64Mi"}}
    document = minimal_domain("value", vcpus=len(wanted), inside="<iothreads>1</iothreads>")
    served = await lead(raw, document.encode(), threads.on(1, 2))
    emulator = names[threads.emulator]
    vcpus = {f"vcpu {vcpu}": cpus for vcpu, cpus in enumerate(wanted)}
    assert pins(served.xml) == {**vcpus, "emulator": emulator, "io 1": emulator}
    options = served.options
    assert {option: getattr(options, option) for option in row.sets} == row.sets
    assert served.bound.device_numa is options.device_numa
    bound = {"is": "memory", "mode": options.numa_memory.value, "nodeset": "0"}
    assert bindings(served.xml)[:1] == ([] if options.numa_memory is NumaMemory.OFF else [bound])


def nodes_of(placement: Placement) -> list[int]:
    return [0 if FIRST >> cpu & 1 else 1 for cpu in placement.vcpus]


async def test_one_socket_alone_pins_each_vcpu_to_its_own_cpu(serve: Any) -> None:
    served = await serve(FOUR, {"cpu-set": "one-socket"})
    assert served.vcpu_pins[:4] == ["1", "33", "2", "34"]
    assert set(served.vcpu_pins[4:]) == {"1-2,33-34"}
    assert served.emulator == "0,32"
    assert served.cpu_map == {"socket0": ["1", "33", "2", "34"]}
    assert bindings(served.xml) == [{"is": "memory", "mode": "preferred", "nodeset": "0"}]


@pytest.mark.parametrize("scope", ["spread-sockets", "spread-numa"])
async def test_a_spread_vm_sits_on_one_domain_while_it_fits_and_in_equal_shares_when_not(
    serve: Any, scope: str
) -> None:
    assert set(nodes_of((await serve(FOUR, {"cpu-set": scope})).placement)) == {0}
    apart = await serve(FOUR, {"cpu-set": scope}, free="1,33,2,17,49")
    assert nodes_of(apart.placement) == [0, 0, 1, 1]
    assert apart.vcpu_pins[:4] == ["1", "33", "17", "49"]
    assert apart.cpu_map == {"socket0": ["1", "33"], "socket1": ["17", "49"]}
    assert bindings(apart.xml) == [{"is": "memory", "mode": "preferred", "nodeset": "0-1"}]
    unlike = await serve(FOUR, {"cpu-set": "any"}, free="1,33,2,17")
    assert nodes_of(unlike.placement) == [0, 0, 0, 1]


async def test_a_spread_vm_that_no_equal_shares_hold_waits(serve: Any) -> None:
    with pytest.raises(Misconfigured, match="equal shares"):
        await serve(FOUR, {"cpu-set": "spread-numa"}, free="1,33,2,17")


async def test_policy_numa_lets_every_thread_use_the_shared_cpus_of_the_chosen_nodes(serve: Any) -> None:
    served = await serve(FOUR, {"cpu-set": "one-numa", "kvplace.io/cpu-policy": "numa"})
    assert served.placement.vcpus == ()
    assert set(pins(served.xml).values()) == {"1-15,33-47"}
    assert len(served.vcpu_pins) == 16
    assert served.placement.owned == 0
    assert sorted(served.cpu_map["socket0"], key=int) == [str(cpu) for cpu in parse_list("1-15,33-47")]
    assert bindings(served.xml) == [{"is": "memory", "mode": "preferred", "nodeset": "0"}]


def parse_list(text: str) -> list[int]:
    return list(cpus_of(parse_cpu_list(text)))


async def test_sharing_vms_get_named_cpus_and_whole_cores_where_they_require_them(serve: Any) -> None:
    for policy in ("share", "immovable"):
        served = await serve(FOUR, {"kvplace.io/cpu-policy": policy}, free="1,2,3,4")
        assert served.vcpu_pins[:4] == ["1", "2", "3", "4"]
        assert served.placement.owned == 0
        whole = {"kvplace.io/cpu-policy": policy, "kvplace.io/smt": "require"}
        served = await serve(FOUR, whole, free="1,2,3,35,4,36")
        assert served.vcpu_pins[:4] == ["3", "35", "4", "36"]


async def test_isolated_vcpus_sit_on_a_core_each_and_own_its_sibling(serve: Any) -> None:
    served = await serve(FOUR, {"cpu-set": "one-socket", "kvplace.io/smt": "isolate"})
    assert served.vcpu_pins[:4] == ["1", "2", "3", "4"]
    assert served.placement.owned == parse_cpu_list("1-4,33-36")


@pytest.mark.parametrize(
    ("policy", "word", "emulator"),
    [
        ("exclusive", "shared", "0,32"),
        ("exclusive", "isolate", "3"),
        ("exclusive", "with-vcpus", "1-2,33-34"),
        ("share", "isolate", "3"),
        ("numa", "with-vcpus", "1-15,33-47"),
    ],
)
async def test_qemus_own_threads_run_where_emulator_threads_states(
    serve: Any, policy: str, word: str, emulator: str
) -> None:
    options = {"kvplace.io/cpu-policy": policy, "kvplace.io/emulator-threads": word}
    assert (await serve(FOUR, options)).emulator == emulator


SPREAD_MIRROR = {
    "cpu-set": "spread-numa",
    "kvplace.io/guest-numa": "mirror",
    "kvplace.io/numa-memory": "strict",
}
HALF_OF_EACH = "1-2,33-34,17-18,49-50"


async def test_a_mirroring_guest_sees_the_host_under_it(serve: Any, capfd: Any) -> None:
    served = await serve(EIGHT_THREADS, SPREAD_MIRROR, free=HALF_OF_EACH)
    assert served.vcpu_pins == ["1", "33", "2", "34", "17", "49", "18", "50"]
    assert topology(served.xml) == (2, 2, 2)
    assert cells(served.xml) == [
        {"id": "0", "cpus": "0-3", "memory": str(4 * GIB), "unit": "b", "distances": ["10", "21"]},
        {"id": "1", "cpus": "4-7", "memory": str(4 * GIB), "unit": "b", "distances": ["21", "10"]},
    ]
    assert bindings(served.xml) == [
        {"is": "memory", "mode": "strict", "nodeset": "0-1"},
        {"is": "memnode", "cellid": "0", "mode": "strict", "nodeset": "0"},
        {"is": "memnode", "cellid": "1", "mode": "strict", "nodeset": "1"},
    ]
    lines = logged(capfd)
    assert {line["level"] for line in lines} == {"info"}
    assert lines[0]["msg"].endswith("memory strict on NUMA nodes 0,1; the guest sees 2 NUMA cells")


async def test_a_mirroring_guest_in_huge_pages_has_cells_of_whole_pages(serve: Any) -> None:
    served = await serve(EIGHT_IN_PAGES, SPREAD_MIRROR, free=HALF_OF_EACH)
    assert served.placement.huge_pages == {0: {1 << 21: 4096}, 1: {1 << 21: 4096}}
    assert [int(cell["memory"]) for cell in cells(served.xml)] == [8 * GIB, 8 * GIB]
    assert etree.fromstring(served.xml).find("memoryBacking/hugepages") is not None


async def test_a_mirroring_guest_that_may_grow_is_pinned_and_the_log_gives_the_effect_of_growth(
    serve: Any, capfd: Any
) -> None:
    served = await serve(FOUR, SPREAD_MIRROR, free="1,33,17,49")
    assert topology(served.xml) == (8, 1, 2)
    assert [cell["cpus"] for cell in cells(served.xml)] == ["0-1,4-5,8-9,12-13", "2-3,6-7,10-11,14-15"]
    (warning, *_) = [line["msg"] for line in logged(capfd) if line["level"] == "warning"]
    assert warning.startswith("12 vCPUs that can be plugged in later are assigned to the guest's NUMA cells")


async def test_where_memory_cannot_be_bound_a_mirroring_guest_keeps_its_cells_and_the_log_reports_it(
    serve: Any, capfd: Any
) -> None:
    options = SPREAD_MIRROR | {"kvplace.io/numa-memory": "preferred"}
    served = await serve(EIGHT_THREADS, options, free=HALF_OF_EACH, trial=forbidden)
    assert bindings(served.xml) == []
    assert [cell["cpus"] for cell in cells(served.xml)] == ["0-3", "4-7"]
    warning = next(line["msg"] for line in logged(capfd) if line["level"] == "warning")
    assert warning == "memory is not bound: the pod's seccomp profile forbids mbind"
    with pytest.raises(Misconfigured, match="numa-memory strict is not possible"):
        await serve(EIGHT_THREADS, SPREAD_MIRROR, free=HALF_OF_EACH, trial=forbidden)


async def test_a_mirroring_guest_of_shared_cpus_sees_them_as_well(serve: Any) -> None:
    options = SPREAD_MIRROR | {"kvplace.io/cpu-policy": "share"}
    served = await serve(EIGHT_THREADS, options, free=HALF_OF_EACH)
    assert topology(served.xml) == (2, 2, 2)
    assert served.placement.owned == 0


async def test_guests_that_do_not_ask_keep_the_topology_that_kubevirt_wrote(serve: Any) -> None:
    _, domain = as_kubevirt_made_it(EIGHT_THREADS, {})
    served = await serve(EIGHT_THREADS, {"cpu-set": "spread-numa"}, free=HALF_OF_EACH)
    before, after = (etree.fromstring(xml).find("cpu") for xml in (domain, served.xml))
    assert before is not None
    assert after is not None
    assert etree.tostring(after, method="c14n") == etree.tostring(before, method="c14n")
