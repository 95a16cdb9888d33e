"""NodeLedgers, NodeTopologies and NodeResourceTopologies as JSON: their records, and the write of a ledger.

The write names the state that it was decided on: with a resource version, which is never used twice, so it
also identifies an object that was created again under the same name.

A ledger is replaced as a whole: for a patch the API server has to encode the stored ledger, to merge the
texts and to decode the result. Only a ledger that holds more than kvplace reads, such as a user's label or
a field of a newer version, is patched, so that this stays.

A write changes one claim or a few, but every replica then reads the whole ledger, with dozens of claims on a
full node. So claims are remembered by their text.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from kvplace.core.cpuset import parse_cpu_list
from kvplace.core.errors import BadTopology, Corrupt
from kvplace.core.free_resources import NOTHING_IN_USE, read_memory_in_use
from kvplace.core.json_fields import Fields
from kvplace.core.ledger import (
    Claim,
    Ledger,
    LedgerChange,
    claim_document,
    ledger_document,
    merge_patch,
    read_claim,
    read_ledger,
    summary_document,
)
from kvplace.core.node_devices import DeviceReport, read_device_report
from kvplace.core.node_topology import (
    API_VERSION,
    Enforcement,
    read_topology,
)
from kvplace.core.scalars import NO_CPUS, NodeName, PodUid
from kvplace.core.topology import Topology
from kvplace.kube.api_errors import NOT_JSON
from kvplace.kube.calls import METADATA_ONLY, ApiCall
from kvplace.kube.object_parts import ABSENT, ApiObject, ConditionObject
from kvplace.kube.object_records import (
    LedgerRecord,
    PodReport,
    ResourceTopologyRecord,
    TopologyRecord,
)
from kvplace.kube.objects import MetaWithWriters, RawObject
from kvplace.kube.watches import LEDGERS

_REMEMBERED = 4096
"""Claims of a hundred full nodes; one takes about 1 KB with its text."""
_PLAIN = frozenset(("namespace", "pod", "vmi", "policy", "cpus", "owned", "memory", "since", "revision"))
"""Fields of a claim that have no parts which kvplace may not know, apart from the nodes of `memory`."""


class _Summary(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """The counts for people, as kvplace writes them."""

    pods: int = 0
    owned: int = 0
    shared: int = 0


class _LedgerSpec(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """The spec of a NodeLedger as kvplace writes it; its claims stay texts."""

    owners: dict[str, Any]
    claims: dict[str, msgspec.Raw]
    summary: _Summary = _Summary()


def ledger_record(document: RawObject) -> LedgerRecord:
    """Read a NodeLedger; content that cannot be read becomes the record's problem."""
    metadata = document.metadata
    ledger, problem, is_whole = Ledger(), "", False
    try:
        ledger, is_whole = _ledger(document.spec)
    except (Corrupt, *NOT_JSON) as error:
        problem = str(error)
    return LedgerRecord(
        NodeName(metadata.name),
        ledger,
        metadata.resource_version,
        metadata.uid,
        problem,
        is_whole and not _somebodys(metadata),
    )


def _somebodys(metadata: MetaWithWriters) -> bool:
    """Whether the object has metadata that kvplace does not write."""
    given = (metadata.annotations, metadata.owner_references, metadata.finalizers)
    return bool(metadata.labels) or any(each is not None for each in given)


def _ledger(spec: msgspec.Raw) -> tuple[Ledger, bool]:
    """Read a ledger, and whether it reports all that the spec states."""
    try:
        found = _SPEC.decode(spec)
    except msgspec.ValidationError:
        return read_ledger(_JSON.decode(spec)), False  # its error names the fault, if there is one
    is_whole = True

    def claim_of(uid: PodUid, raw: msgspec.Raw) -> Claim:
        nonlocal is_whole
        claim, says_all = _claim_of_text(uid, bytes(raw))  # a copy: the raw one keeps the whole event
        is_whole = is_whole and says_all
        return claim

    return read_ledger({"owners": found.owners, "claims": found.claims}, claim_of), is_whole


@lru_cache(maxsize=_REMEMBERED)
def _claim_of_text(uid: PodUid, text: bytes) -> tuple[Claim, bool]:
    """Read a claim, and whether it reports all that its text states."""
    document = _JSON.decode(text)
    claim = read_claim(uid, document)
    is_plain = document.keys() <= _PLAIN and len(document.get("memory") or ()) == len(claim.memory)
    return claim, is_plain or claim_document(claim) == document


_SPEC = msgspec.json.Decoder(_LedgerSpec)
_JSON: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


_UNTRACKED: list[dict[str, str]] = [{}]
"""The `managedFields` that make the API server forget the writer of each field, until a user applies
the object. At later writes it then compares no fields either.
"""


def new_ledger(node: NodeName) -> dict[str, Any]:
    """Write an empty ledger."""
    return _ledger_object(Ledger(), {"name": node})


def write_ledger_call(before: LedgerRecord, change: LedgerChange, after: Ledger) -> ApiCall:
    """Change a ledger that still equals `before`; `after` is the result of the change."""
    metadata = {"resourceVersion": before.resource_version, "managedFields": _UNTRACKED}
    verb, query = "patch", {"fieldManager": "kvplace"}
    if before.is_whole:
        # Nothing reads the warnings about fields that kvplace replaces, and the API server would pay.
        verb, query["fieldValidation"] = "update", "Ignore"
        document = _ledger_object(after, {"name": before.node, **metadata})
    else:
        spec = {**merge_patch(before.ledger, change), "summary": summary_document(after)}
        document = {"metadata": metadata, "spec": spec}
    return ApiCall.on(verb, LEDGERS.api, before.node, query=query, document=document, accept=METADATA_ONLY)


def _ledger_object(ledger: Ledger, metadata: Mapping[str, Any]) -> dict[str, Any]:
    spec = ledger_document(ledger)
    return {"apiVersion": API_VERSION, "kind": "NodeLedger", "metadata": metadata, "spec": spec}


class PodReportObject(ApiObject, frozen=True):
    """An entry of `status.pods` of a NodeTopology."""

    uid: str
    namespace: str = ""
    pod: str = ""
    revision: int = 0
    pinned: bool = False
    running: bool = False
    failed_revision: int = 0
    restored_placement: str = ""
    cpus: str = ""
    drift: str = ""


class StatusObject(ApiObject, frozen=True):
    """The fields of a NodeTopology's status."""

    kubelet_cpus: str = ""
    enforcement: Enforcement = Enforcement.NONE
    pods: tuple[PodReportObject, ...] = ()
    conditions: tuple[ConditionObject, ...] = ()
    observed_generation: int | None = None
    in_use: dict[str, Any] | None = None
    devices: dict[str, Any] | None = None


class TopologyReader:
    """Makes records of NodeTopology objects; nodes with equal specs share one machine, which is read once.

    An agent writes the status far more often than the spec. A machine is remembered for as long as a record
    of it is in use, so nothing stays of deleted nodes.
    """

    def __init__(self) -> None:
        self._machines: WeakValueDictionary[bytes, Topology] = WeakValueDictionary()
        """Machines by their specs."""

    def record(self, document: RawObject) -> TopologyRecord:
        """Read a NodeTopology; content that cannot be read becomes the record's problem."""
        metadata = document.metadata
        spec = bytes(document.spec)
        topology, problem = self._machines.get(spec), ""
        kubelet_cpus, enforcement, in_use = NO_CPUS, Enforcement.NONE, NOTHING_IN_USE
        pods: dict[PodUid, PodReport] = {}
        devices: DeviceReport | None = None
        status: StatusObject | None = None
        try:
            if topology is None:
                topology = self._machines[spec] = read_topology(_JSON.decode(spec))
        except (BadTopology, ValueError, *NOT_JSON) as error:
            problem = str(error)
        # Each on its own: an edit of a description does not change the pods on the machine.
        try:
            status = _STATUS.decode(document.status)
            if status is not None:
                kubelet_cpus = parse_cpu_list(status.kubelet_cpus, what="status.kubeletCpus")
                enforcement = status.enforcement
                in_use = read_memory_in_use(Fields({"inUse": status.in_use}, "status"), "inUse")
                devices = read_device_report(status.devices, "status.devices")
                pods = {PodUid(pod.uid): _pod_report(pod) for pod in status.pods}
        except (ValueError, *NOT_JSON) as error:
            topology, problem = None, problem or str(error)
        return TopologyRecord(
            NodeName(metadata.name),
            topology,
            problem,
            kubelet_cpus,
            metadata.resource_version,
            enforcement,
            pods,
            metadata.generation,
            metadata.agents.spec != ABSENT,
            () if status is None else tuple(one.record for one in status.conditions),
            None if status is None else status.observed_generation,
            in_use,
            devices,
        )


def _pod_report(pod: PodReportObject) -> PodReport:
    return PodReport(
        uid=PodUid(pod.uid),
        namespace=pod.namespace,
        pod=pod.pod,
        revision=pod.revision,
        pinned=pod.pinned,
        running=pod.running,
        failed_revision=pod.failed_revision,
        restored_placement=pod.restored_placement,
        cpus=parse_cpu_list(pod.cpus, what="status.pods.cpus"),
        drift=pod.drift,
    )


def resource_topology_record(document: RawObject) -> ResourceTopologyRecord:
    """Cut a NodeResourceTopology down to its record."""
    metadata = document.metadata
    return ResourceTopologyRecord(
        NodeName(metadata.name), metadata.resource_version, metadata.agents.zones != ABSENT
    )


_STATUS: msgspec.json.Decoder[StatusObject | None] = msgspec.json.Decoder(StatusObject | None)
