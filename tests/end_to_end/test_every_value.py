"""Every value of an annotation on the whole way: VM, admission, scheduler, ledger, pod, hook, domain XML.

One machine of eight NUMA nodes takes VMs with requests of every kind, and another one a VM for each other
value of `tests/core/option_values.py`. Each comes through KubeVirt's own converter and hooks client.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from lxml import etree

from harness.control_plane.cluster import ControlPlane
from harness.control_plane.containers import Image, ProcessRunner, python_image
from harness.control_plane.hollow_node import nodes_in_background
from harness.control_plane.kubevirt_parts import KubeVirt
from harness.control_plane.launcher_side import LauncherSide
from harness.control_plane.watching import wait_for
from harness.kvplace_cluster.installation import SIDECAR_IMAGE, Installation, described_nodes
from harness.kvplace_cluster.machines import GIB, node_shape, write_machine
from harness.kvplace_cluster.vms import VMS, vm_manifest
from kvplace.core.cpuset import cpus_of, format_cpu_list, mask_of, parse_cpu_list
from kvplace.core.placement import Placement, PodPlacement
from kvplace.core.request_json import read_pod_request
from kvplace.core.scalars import CpuId, CpuMask
from kvplace.core.well_known_names import CPU_MAP, PLACEMENT, REQUEST
from kvplace.machines.server_types import read_machine
from tests.core.option_values import PINNED_VALUES, VALUES

NODE = "words"
MACHINE = read_machine("2x-epyc-7763-nps4")
"""8 NUMA nodes of 16 cores with 2 threads each, one core reserved for the host; 48 huge pages of 1 GiB."""
NARROW = "words-narrow"
SINGLE = "words-single"
"""A third such machine, for VMs with one value each."""
GIVEN_OUT = {"socket0": "1-2,129-130,17-18,145-146", "socket1": "65-68,193-196"}
"""Another such machine; the operator gives out eight CPUs of each socket."""


@dataclass(frozen=True)
class Asked:
    """The request of one VM."""

    annotations: Mapping[str, str]
    cpu: Mapping[str, int]
    memory: Mapping[str, Any]
    domain: Mapping[str, Any]
    node: str

    @property
    def vcpus(self) -> int:
        return self.cpu["cores"] * self.cpu.get("threads", 1)


def asked(
    words: str,
    cores: int,
    *,
    threads: int = 1,
    guest: str = "2Gi",
    page: str = "",
    node: str = NODE,
    **domain: Any,
) -> Asked:
    """Read `key=value` words; keys without a domain are kvplace's, but for `cpu-set`."""
    pairs = (word.split("=") for word in words.split())
    annotations = {
        key if "/" in key or key == "cpu-set" else f"kvplace.io/{key}": text for key, text in pairs
    }
    memory = {"guest": guest} | ({"hugepages": {"pageSize": page}} if page else {})
    return Asked(annotations, {"cores": cores, "threads": threads}, memory, domain, node)


VMS_ASKED = {
    "mirror": asked(
        "cpu-set=spread-numa guest-numa=mirror smt=require numa-memory=strict",
        18,
        threads=2,
        guest="20Gi",
        page="1Gi",
    ),
    "pool": asked("cpu-set=one-numa cpu-policy=numa", 4),
    "shared": asked("cpu-set=one-l3 cpu-policy=share", 6),
    "shared-too": asked("cpu-set=one-numa cpu-policy=share emulator-threads=isolate", 6),
    "fixed": asked("cpu-set=one-numa cpu-policy=immovable", 5),
    "isolated": asked("cpu-set=one-l3 smt=isolate emulator-threads=isolate", 3),
    "odd": asked("cpu-set=one-socket smt=require", 7),
    "wide": asked("cpu-set=any numa-memory=interleave emulator-threads=with-vcpus", 33),
    "crane": asked(
        "topology.crane.io/cpu-policy=exclusive topology.crane.io/topology-awareness=true numa-memory=off",
        4,
        ioThreadsPolicy="supplementalPool",
        ioThreads={"supplementalPoolThreadCount": 3},
    ),
    "apart": asked(
        "cpu-set=spread-sockets guest-numa=mirror numa-memory=preferred explain=true",
        6,
        threads=2,
        node=NARROW,
    ),
    "floats": asked("cpu-set=one-l3 on-failure=float", 20),
}

WRITTEN = {f"{key}={text}" for vm in VMS_ASKED.values() for key, text in vm.annotations.items()}
ONE_VALUE = {
    f"value-{number}": Asked(
        {**row.annotations, **threads.beside},
        {"cores": len(threads.vcpus.split())},
        {"guest": "64Mi"},
        {},
        SINGLE,
    )
    for number, (row, threads) in enumerate(PINNED_VALUES)
    if str(row) not in WRITTEN
}
"""VMs for the values that no VM above has."""
VMS_ASKED |= ONE_VALUE

FIRST = ("mirror", "pool")
"""Started before the others: on node 0, to which memory can really be bound anywhere, and on a free node."""


@dataclass(frozen=True)
class Served:
    """The result of one VM."""

    pod: dict[str, Any]
    claim: dict[str, Any]
    owners: int
    domain: etree._Element

    @property
    def placement(self) -> Placement:
        return PodPlacement.from_json(self.pod["metadata"]["annotations"][PLACEMENT]).placement

    def pins(self, kind: str, number: str = "") -> list[str]:
        """CPUs of the threads of one kind, in the order of their numbers."""
        found = self.domain.findall(f"cputune/{kind}")
        if number:
            found.sort(key=lambda pin: int(pin.get(number, "")))
        return [pin.get("cpuset", "") for pin in found]

    @property
    def memory(self) -> list[dict[str, str]]:
        return [
            {str(key): str(text) for key, text in part.items()} for part in self.domain.iterfind("numatune/*")
        ]


@pytest.fixture(scope="module")
def served(
    cluster: ControlPlane, virt: KubeVirt, kvplace: Installation, launcher_side: LauncherSide
) -> Iterator[dict[str, Served]]:
    """Start all the VMs on one machine, and lead each through its hook."""
    namespace = cluster.create_namespace(f"words-{secrets.token_hex(4)}")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # the sidecar runs as another user
        image = python_image("kvplace.hook")
        seen = write_machine(Path(folder), MACHINE)
        runner = ProcessRunner(
            {SIDECAR_IMAGE: Image(image.entrypoint, image.command, {**image.environment, **seen})}
        )
        kubelet = Path(folder) / "kubelet"
        kubelet.mkdir()
        given_out = {
            socket: [str(cpu) for cpu in cpus_of(parse_cpu_list(text))] for socket, text in GIVEN_OUT.items()
        }
        narrow = replace(node_shape(NARROW, MACHINE), annotations={CPU_MAP: json.dumps(given_out)})
        with (
            nodes_in_background(
                cluster,
                [node_shape(NODE, MACHINE), narrow, node_shape(SINGLE, MACHINE)],
                runner=runner,
                folder=kubelet,
            ) as nodes,
            described_nodes(kvplace, {NODE: MACHINE, NARROW: MACHINE, SINGLE: MACHINE}),
        ):
            pods = {name: _bound(cluster, virt, namespace, name, VMS_ASKED[name]) for name in FIRST}
            with ThreadPoolExecutor(4) as pool:
                others = [name for name in VMS_ASKED if name not in FIRST]
                bound = pool.map(lambda name: _bound(cluster, virt, namespace, name, VMS_ASKED[name]), others)
                pods |= dict(zip(others, bound, strict=True))
            found = {}
            for name, pod in pods.items():
                uid = pod["metadata"]["uid"]
                ledger = kvplace.ledger(VMS_ASKED[name].node)
                vmi = virt.vmi_in_phase(namespace, name, "Scheduled")
                running = nodes.nodes.find(namespace, pod["metadata"]["name"])
                sockets = running.volumes.folder / "hook-sidecar-sockets"
                report = launcher_side.call_hook(vmi, sockets, calls=3, shutdown=False)
                assert report.errors == (), name
                owners = mask_of(int(cpu) for cpu, owner in ledger["owners"].items() if owner == uid)
                claim = ledger["claims"].get(uid, {})
                found[name] = Served(pod, claim, owners, etree.fromstring(report.defined))
            yield found
            cluster.remove_namespace(namespace)


def _bound(cluster: ControlPlane, virt: KubeVirt, namespace: str, name: str, vm: Asked) -> dict[str, Any]:
    domain = {"cpu": dict(vm.cpu), "memory": dict(vm.memory), **vm.domain}
    manifest = vm_manifest(
        name,
        annotations=vm.annotations,
        domain=domain,
        nodeSelector={"kubernetes.io/hostname": vm.node},
    )
    virt.create(VMS, namespace, manifest)
    pod = virt.launcher_pod(namespace, name)["metadata"]["name"]
    path = f"/api/v1/namespaces/{namespace}/pods"
    return wait_for(cluster, path, pod, lambda pod: bool(pod["spec"].get("nodeName")))


@pytest.mark.parametrize("name", [name for name in VMS_ASKED if name != "floats"])
def test_pod_ledger_and_domain_state_the_same_of_a_vm(name: str, served: dict[str, Served]) -> None:
    vm, placement = served[name], served[name].placement
    annotations = vm.pod["metadata"]["annotations"]
    options = read_pod_request(annotations[REQUEST]).request.options
    for row in VALUES:
        if VMS_ASKED[name].annotations.get(row.key) == row.value:
            assert {option: getattr(options, option) for option in row.sets} == row.sets
    named = placement.vcpus or tuple(cpus_of(placement.cpus))
    by_socket: dict[str, list[str]] = {}
    for cpu in named:
        by_socket.setdefault(f"socket{MACHINE.packages_of(CpuMask(1 << cpu))[0]}", []).append(str(cpu))
    assert json.loads(annotations["cpu-map"]) == by_socket

    assert vm.owners == placement.owned == parse_cpu_list(vm.claim.get("owned", ""))
    assert parse_cpu_list(vm.claim["cpus"]) == placement.cpus
    assert vm.claim.get("memory", {}) == {str(node): count for node, count in placement.memory.items()}

    vcpus = VMS_ASKED[name].vcpus
    alike = [format_cpu_list(placement.cpus)] * vcpus
    assert vm.pins("vcpupin", "vcpu")[:vcpus] == ([str(cpu) for cpu in placement.vcpus] or alike)
    assert vm.pins("emulatorpin") == [format_cpu_list(placement.emulator_cpus)]
    assert set(vm.pins("iothreadpin", "iothread")) <= {format_cpu_list(placement.emulator_cpus)}


def test_no_vm_is_given_cpus_that_another_vm_owns(served: dict[str, Served]) -> None:
    for name, vm in served.items():
        for other in served.values():
            if other is not vm and other.pod["spec"]["nodeName"] == vm.pod["spec"]["nodeName"]:
                assert not vm.placement.owned & other.placement.cpus, name
                assert not vm.placement.owned & other.placement.emulator_cpus, name
        assert not vm.placement.cpus & MACHINE.reserved, name


def test_a_mirroring_vm_in_huge_pages_lies_in_equal_shares_on_two_nodes_that_its_guest_sees(
    served: dict[str, Served],
) -> None:
    vm, placement = served["mirror"], served["mirror"].placement
    assert placement.numa_nodes == (0, 1)
    assert [len(cell.vcpus) for cell in placement.guest_cells] == [18, 18]
    assert placement.huge_pages == {0: {GIB: 10}, 1: {GIB: 10}}
    assert vm.claim["hugePages"] == {"0": {"1Gi": 10}, "1": {"1Gi": 10}}
    (topology,) = vm.domain.iterfind("cpu/topology")
    cells = vm.domain.findall("cpu/numa/cell")
    per_socket = int(topology.get("cores", "")) * int(topology.get("threads", ""))
    assert topology.get("threads") == "2"
    assert 18 % per_socket == 0
    assert [parse_cpu_list(cell.get("cpus", "")) & mask_of(range(36)) for cell in cells] == [
        mask_of(range(18)),
        mask_of(range(18, 36)),
    ]
    assert [int(cell.get("memory", "")) for cell in cells] == [10 * GIB, 10 * GIB]
    distances = [[s.get("value") for s in cell.iterfind("distances/sibling")] for cell in cells]
    assert distances == [["10", "12"], ["12", "10"]]
    for first in range(0, 36, 2):
        here, there = placement.vcpus[first : first + 2]
        assert MACHINE.core_of[here] == mask_of((here, there))
    assert vm.memory == [
        {"mode": "strict", "nodeset": "0-1"},
        {"cellid": "0", "mode": "strict", "nodeset": "0"},
        {"cellid": "1", "mode": "strict", "nodeset": "1"},
    ]


def test_a_vm_of_policy_numa_has_the_shared_cpus_of_its_node_and_owns_none(served: dict[str, Served]) -> None:
    vm = served["pool"].placement
    (node,) = vm.numa_nodes
    assert vm.cpus == MACHINE.node_by_id[node].cpus & ~MACHINE.reserved & ~served["mirror"].owners
    assert (vm.vcpus, vm.owned, vm.emulator_cpus) == ((), 0, vm.cpus)


def test_sharing_vms_are_given_cpus_that_no_other_of_them_has_while_there_are_such(
    served: dict[str, Served],
) -> None:
    sharing = [served[name].placement for name in ("shared", "shared-too", "fixed")]
    assert [len(vm.vcpus) for vm in sharing] == [6, 6, 5]
    assert [vm.policy.value for vm in sharing] == ["share", "share", "immovable"]
    assert sharing[0].cpus & sharing[1].cpus == 0
    assert (sharing[0].cpus | sharing[1].cpus) & sharing[2].cpus == 0
    assert len(sharing[0].numa_nodes) == 1
    assert any(not sharing[0].cpus & ~group for group in MACHINE.l3_groups)
    beside = sharing[1].emulator_cpus
    assert beside.bit_count() == 1
    assert not beside & mask_of(sharing[1].vcpus)


def test_an_isolated_vm_owns_whole_cores_behind_one_cache_and_its_emulator_sits_on_another(
    served: dict[str, Served],
) -> None:
    vm = served["isolated"].placement
    cores = {MACHINE.core_of[cpu] for cpu in vm.vcpus}
    assert len(cores) == 3
    emulators = MACHINE.core_of[CpuId(vm.emulator_cpus.bit_length() - 1)]
    assert emulators not in cores
    assert vm.owned == mask_of(sibling for core in (*cores, emulators) for sibling in cpus_of(core))
    assert any(not vm.owned & ~group for group in MACHINE.l3_groups)


def test_the_odd_thread_of_whole_cores_serves_the_emulator(served: dict[str, Served]) -> None:
    vm = served["odd"].placement
    assert vm.owned.bit_count() == 8
    assert vm.emulator_cpus == vm.owned & ~mask_of(vm.vcpus)


def memory_can_be_bound(placement: Placement) -> bool:
    """Ask this machine's kernel, as the hook does: it may have fewer NUMA nodes than the VM's node."""
    asking = (
        "from kvplace.core.request import NumaMemory\n"
        "from kvplace.hook.bounds import try_to_bind\n"
        f"print(try_to_bind(NumaMemory({placement.numa_memory.value!r}), {placement.numa_nodes!r}))"
    )
    answer = subprocess.run([sys.executable, "-c", asking], capture_output=True, text=True, check=True)
    return answer.stdout.strip() == "None"


def test_a_vm_that_may_lie_anywhere_takes_the_fewest_nodes_and_interleaves_over_them(
    served: dict[str, Served],
) -> None:
    vm, placement = served["wide"], served["wide"].placement
    assert len(placement.numa_nodes) == 2
    assert placement.emulator_cpus == placement.cpus
    assert placement.numa_memory.value == "interleave"
    interleaved = [{"mode": "interleave", "nodeset": format_cpu_list(mask_of(placement.numa_nodes))}]
    assert vm.memory == (interleaved if memory_can_be_bound(placement) else [])


def test_a_vm_with_a_request_in_cranes_words_sits_on_one_node_and_is_answered_in_them(
    served: dict[str, Served],
) -> None:
    vm, placement = served["crane"], served["crane"].placement
    (node,) = placement.numa_nodes
    (zone,) = json.loads(vm.pod["metadata"]["annotations"]["topology.crane.io/topology-result"])
    assert zone["name"] == f"node{node}"
    assert zone["resources"]["capacity"]["cpu"] == "4"
    assert vm.memory == []
    assert len(vm.pins("iothreadpin", "iothread")) == 3


def test_a_vm_spread_over_sockets_has_half_of_its_vcpus_on_each_and_its_guest_sees_all_their_nodes(
    served: dict[str, Served],
) -> None:
    vm, placement = served["apart"], served["apart"].placement
    sockets = [MACHINE.packages_of(CpuMask(1 << cpu))[0] for cpu in placement.vcpus]
    assert sockets == [0] * 6 + [1] * 6
    cells = [
        parse_cpu_list(cell.get("cpus", "")) & mask_of(range(12))
        for cell in vm.domain.iterfind("cpu/numa/cell")
    ]
    on_host = [MACHINE.nodes_of(CpuMask(1 << cpu))[0] for cpu in placement.vcpus]
    assert [{on_host[vcpu] for vcpu in cpus_of(cell)} for cell in cells] == [{0}, {1}, {4}]
    assert [cell.bit_count() for cell in cells] in ([4, 2, 6], [2, 4, 6])
    (topology,) = vm.domain.iterfind("cpu/topology")
    assert topology.get("threads") == "2"
    assert vm.pod["metadata"]["annotations"]["kvplace.io/explanation"]


def test_a_vm_that_fits_nowhere_and_may_float_holds_nothing_and_keeps_the_domain_that_kubevirt_wrote(
    served: dict[str, Served],
) -> None:
    vm = served["floats"]
    assert vm.placement.floats
    assert "cpu-map" not in vm.pod["metadata"]["annotations"]
    assert (vm.claim, vm.owners) == ({}, 0)
    assert vm.domain.find("cputune") is None
    assert vm.memory == []
