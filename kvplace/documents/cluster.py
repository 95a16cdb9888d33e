"""The cluster document: the nodes of a cluster and the VMs that run there already.

    nodes:
    - name: worker            # worker-01 to worker-50
      count: 50
      machine: 2x-epyc-9354   # one that comes with kvplace
    - name: edge
      topology: edge.json     # a NodeTopology, or a folder or archive with a machine's sys/
      running:
      - id: db
        request: {vcpus: 8, cpuSet: one-numa}
        cpus: 2-5,34-37       # left out: where kvplace would put it

Paths are relative to the document. YAML or JSON.
"""

from __future__ import annotations

from typing import Annotated, Self, TypeAlias

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from kvplace.core.cpuset import parse_cpu_list
from kvplace.core.scalars import CpuMask
from kvplace.core.strict_json import shown
from kvplace.documents.model import Document, Text, unique
from kvplace.documents.request import RequestKeys

EXAMPLE = """\
# The cluster that `kvplace plan` plans for by default. To change it and plan for it:
#   kvplace plan --example cluster > mine.yaml; kvplace plan --cluster mine.yaml --requests vms.yaml
nodes:
- name: worker                  # worker-01 to worker-04
  count: 4
  machine: 2x-epyc-9354-nps2    # one that comes with kvplace; `kvplace topology --help` lists them
- name: edge
  count: 2
  machine: epyc-7502p
# One node of your own, with the VMs that run there already:
# - name: lab
#   topology: lab.json          # what `kvplace topology -o json` prints on the node
#   running:
#   - id: dns
#     request: {vcpus: 4, cpuSet: one-l3, memory: 8Gi}
#     cpus: 2-3,34-35           # left out: where kvplace would place it
"""
MOST_NODES = 10_000
_MOST_RUNNING = 4096


def _cpu_list(value: object) -> CpuMask:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{shown(value)} is not a CPU list such as '0-7'")
    return parse_cpu_list(value, what="the CPU list")


CpuList: TypeAlias = Annotated[
    CpuMask, PlainValidator(_cpu_list), WithJsonSchema({"type": "string", "examples": ["2-5,34"]})
]


class RunningVm(Document):
    """A VM that runs on a node."""

    id: Text
    request: RequestKeys
    cpus: CpuList | None = None
    """All CPUs that the VM holds; default: where kvplace would place it."""


class NodeEntry(Document):
    """One node, or `count` equal ones."""

    name: Text
    count: Annotated[int, Field(strict=True, ge=1, le=MOST_NODES)] | None = None
    """Makes so many nodes of the same machine, named name-01, name-02, ..."""
    machine: Text | None = None
    """A machine that comes with kvplace, by name; or give `topology`."""
    topology: Text | None = None
    """A file or folder that describes the machine, relative to this document."""
    running: Annotated[tuple[RunningVm, ...], Field(max_length=_MOST_RUNNING)] = ()
    """VMs that run on the node already."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.machine is None) == (self.topology is None):
            raise ValueError(
                "must have either machine (a name that `kvplace topology --help` lists) or topology (a file)"
            )
        if self.running and self.count is not None:
            raise ValueError("a node with running VMs must not have a count")
        return self


class ClusterDocument(Document):
    """The nodes of a cluster, and the VMs that run on them."""

    nodes: Annotated[tuple[NodeEntry, ...], Field(min_length=1, max_length=MOST_NODES)]

    @model_validator(mode="after")
    def _check_running(self) -> Self:
        unique((vm.id for node in self.nodes for vm in node.running), "id of a running VM:")
        return self
