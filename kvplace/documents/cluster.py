"""The cluster document, and the scenario document, which adds VMs that come to the cluster and go.

A cluster document lists the nodes of a cluster and the VMs that run there already.

    nodes:
    - name: worker            # worker-01 to worker-50
      count: 50
      machine: 2x-epyc-9354   # one that comes with kvplace
      devices: [{resource: intel.com/vf, numaNode: 1, count: 8}]
    - name: edge
      topology: edge.json     # a NodeTopology, or a folder or archive with a machine's sys/
      running:
      - id: db
        request: {vcpus: 8, cpuSet: one-numa}
        cpus: 2-5,34-37       # left out: where kvplace would put it

A scenario document also has the strategies.

    nodes: [...]             # as in a cluster document
    mix:                     # drawn by share; or `vms`, one by one
    - share: 5
      request: {vcpus: 2, memory: 8Gi}
    requests: 2000
    load: 0.9
    strategies: [pack, balance]
    seeds: [1, 2, 3]

Paths are relative to the document. YAML or JSON.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self, TypeAlias

from pydantic import AfterValidator, Field, PlainValidator, WithJsonSchema, model_validator

from kvplace.core.cluster.node_choice import Strategy
from kvplace.core.cpuset import MAX_CPU, parse_cpu_list
from kvplace.core.moves.make_room import MAX_MOVES
from kvplace.core.node_devices import MOST_DEVICES, NO_NUMA, is_device
from kvplace.core.scalars import CpuMask, NumaId, ResourceName
from kvplace.core.strict_json import shown
from kvplace.documents.model import DocumentModel, Text, unique
from kvplace.documents.request import RequestKeys

CLUSTER_EXAMPLE = """\
# The cluster that `kvplace plan` plans for by default. To change it and plan for it:
#   kvplace plan --example cluster > mine.yaml; kvplace plan --cluster mine.yaml --requests vms.yaml
nodes:
- name: worker                  # worker-01 to worker-04
  count: 4
  machine: 2x-epyc-9354-nps2    # one that comes with kvplace; `kvplace topology --help` lists them
- name: edge
  count: 2
  machine: epyc-7502p
#   devices:                    # VMs with `devices` are placed beside these
#   - {resource: intel.com/vf, numaNode: 0, count: 8}
#   topologyPolicy: best-effort   # of its kubelet; none by default
# One node of your own, with the VMs that run there already:
# - name: lab
#   topology: lab.json          # the output of `kvplace topology -o json` on the node
#   running:
#   - id: dns
#     request: {vcpus: 4, cpuSet: one-l3, memory: 8Gi}
#     cpus: 2-3,34-35           # left out: where kvplace would place it
"""
MOST_NODES = 10_000
_MOST_RUNNING = 4096
_MOST_DEVICES = 4096

SCENARIO_EXAMPLE = """\
# A scenario for `kvplace simulate`. To change it and run it:
#   kvplace simulate --example > mine.yaml; kvplace simulate --scenario mine.yaml

# The cluster: machines that come with kvplace (`kvplace topology --help`), or of your own:
#   - {name: edge, topology: edge.json}      the output of `kvplace topology -o json` on a node
nodes:
- {name: rome, count: 10, machine: 2x-epyc-7763-nps4}
- {name: genoa, count: 20, machine: 2x-epyc-9354-nps2}
- {name: ice, count: 10, machine: 2x-xeon-6338}
- {name: single, count: 10, machine: epyc-9654p}

# VMs, drawn at random by their share. A request has the keys of `kvplace place`.
mix:
- {share: 28, request: {vcpus: 4, memory: 16Gi}}
- {share: 12, request: {vcpus: 8, memory: 16Gi}}
- {share: 16, request: {vcpus: 4, cpuSet: one-l3, smt: require, memory: 8Gi}}
- {share: 12, request: {vcpus: 8, cpuSet: one-numa, memory: 24Gi}}
- share: 9
  request:
    {vcpus: 8, cpuSet: one-numa, smt: require, emulatorThreads: isolate, memory: 16Gi, hugepages: {1Gi: 16}}
- {share: 9, request: {vcpus: 16, memory: 64Gi}}
- {share: 7, request: {vcpus: 4, cpuSet: one-numa, smt: isolate, memory: 16Gi}}
- {share: 4, request: {vcpus: 2, memory: 32Gi}}
- {share: 3, request: {vcpus: 48, cpuSet: any, memory: 160Gi}}

requests: 2000
load: 0.85          # share of CPUs or memory in use; left out, no VM ends and the cluster fills up
moves: 0            # running VMs that may move inside their node for one that does not fit well, at most 3
strategies: [pack, spread, balance]
seeds: [1, 2]
"""
MOST_REQUESTS = 1_000_000
_MOST_TIME = 1e15
_MIX_KEYS = ("requests", "load", "seeds")


def _cpu_list(value: object) -> CpuMask:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{shown(value)} is not a CPU list such as '0-7'")
    return parse_cpu_list(value, what="the CPU list")


CpuList: TypeAlias = Annotated[
    CpuMask, PlainValidator(_cpu_list), WithJsonSchema({"type": "string", "examples": ["2-5,34"]})
]


class RunningVm(DocumentModel):
    """A VM that runs on a node."""

    id: Text
    request: RequestKeys
    cpus: CpuList | None = None
    """All CPUs that the VM holds; default: where kvplace would place it."""


def _resource(value: str) -> ResourceName:
    if not is_device(value):
        raise ValueError(f"{shown(value)} is not the resource of a device, such as intel.com/vf")
    return ResourceName(value)


class NodeDeviceEntry(DocumentModel):
    """Equal devices of a node, all of them free before its VMs run."""

    resource: Annotated[ResourceName, AfterValidator(_resource)]
    """The resource of their device plugin."""
    numa_node: Annotated[NumaId, Field(strict=True, ge=NO_NUMA, le=MAX_CPU)]
    """Their NUMA node, -1 where it is unknown."""
    count: Annotated[int, Field(strict=True, ge=0, le=MOST_DEVICES)] = 1


class NodeEntry(DocumentModel):
    """One node, or `count` equal nodes."""

    name: Text
    count: Annotated[int, Field(strict=True, ge=1, le=MOST_NODES)] | None = None
    """Makes so many nodes of the same machine, named name-01, name-02, ..."""
    machine: Text | None = None
    """A machine that comes with kvplace, by name; or give `topology`."""
    topology: Text | None = None
    """A file or folder that describes the machine, relative to this document."""
    running: Annotated[tuple[RunningVm, ...], Field(max_length=_MOST_RUNNING)] = ()
    """VMs that run on the node already."""
    devices: Annotated[tuple[NodeDeviceEntry, ...], Field(max_length=_MOST_DEVICES)] | None = None
    """Devices of the node; default: the devices in the description of the machine, else they are unknown."""
    topology_policy: Literal["none", "best-effort", "restricted", "single-numa-node"] = "none"
    """The kubelet's topologyManagerPolicy, for `devices`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.machine is None) == (self.topology is None):
            raise ValueError(
                "must have either machine (a name that `kvplace topology --help` lists) or topology (a file)"
            )
        if self.running and self.count is not None:
            raise ValueError("a node with running VMs must not have a count")
        if self.devices is None and "topology_policy" in self.model_fields_set:
            raise ValueError("topologyPolicy is for devices; name these, too")
        return self


class ClusterDocument(DocumentModel):
    """The nodes of a cluster, and the VMs that run on them."""

    nodes: Annotated[tuple[NodeEntry, ...], Field(min_length=1, max_length=MOST_NODES)]

    @model_validator(mode="after")
    def _check_running(self) -> Self:
        unique((vm.id for node in self.nodes for vm in node.running), "id of a running VM:")
        return self


class MixEntry(DocumentModel):
    """One kind of VM in a mix."""

    share: Annotated[float, Field(strict=True, ge=0, le=1e9)] = 1.0
    """How often it arrives, relative to the other kinds."""
    request: RequestKeys


class VmEntry(DocumentModel):
    """One VM of a trace, or `count` equal VMs."""

    id: Text | None = None
    request: RequestKeys
    arrives: Annotated[float, Field(strict=True, ge=0, le=_MOST_TIME)] = 0.0
    lifetime: Annotated[float, Field(strict=True, ge=1e-9, le=_MOST_TIME)] | None = None
    """Default: the VM runs until the end."""
    count: Annotated[int, Field(strict=True, ge=1, le=MOST_REQUESTS)] | None = None
    """Makes so many VMs of the same request, named id-01, id-02, ..."""


class ScenarioDocument(ClusterDocument):
    """The input of `kvplace simulate`: a cluster and its load. Either `mix` or `vms` describes the VMs."""

    mix: Annotated[tuple[MixEntry, ...], Field(max_length=1000)] | None = None
    """Kinds of VMs, drawn at random by their share."""
    requests: Annotated[int, Field(strict=True, ge=1, le=MOST_REQUESTS)] = 1000
    """How many VMs of the mix arrive."""
    load: Annotated[float, Field(strict=True, ge=0.01, le=1)] | None = None
    """Share of CPUs or memory in use around which the cluster stays; default: no VM ends."""
    vms: Annotated[tuple[VmEntry, ...], Field(min_length=1, max_length=MOST_REQUESTS)] | None = None
    """VMs with their times, instead of a mix."""
    strategies: Annotated[tuple[Strategy, ...], Field(min_length=1)] = (Strategy.PACK,)
    """How nodes are chosen; the scenario runs once for each."""
    seeds: Annotated[
        tuple[Annotated[int, Field(strict=True, ge=-(2**63), le=2**63)], ...],
        Field(min_length=1, max_length=100),
    ] = (1,)
    """Seeds of the random draw; the scenario runs once for each."""
    moves: Annotated[int, Field(strict=True, ge=0, le=MAX_MOVES)] = 0
    """How many running VMs may move inside their node to make room for one VM."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.mix is None) == (self.vms is None):
            raise ValueError("must have either mix (VMs drawn by share) or vms (VMs one by one)")
        if self.mix is not None and not any(entry.share for entry in self.mix):
            raise ValueError("mix has no entry with a share above 0")
        for key in _MIX_KEYS if self.mix is None else ():
            if key in self.model_fields_set:
                raise ValueError(f"{key} belongs to mix; leave it out, or describe the VMs by mix")
        return self
