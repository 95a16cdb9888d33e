"""The claims on one node: the values of a NodeLedger and the rules for changing it.

A CPU may change from no owner to A and from A to no owner, never from A to B. The API server runs the
same rule on every write (manifests/crd); here it is applied before writing, so that a mistake is found
where it was made, and by the in-memory cluster, so that tests and the demo follow it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

from kvplace.core.cpuset import MAX_CPU, cpus_of, format_cpu_list, mask_of, parse_id, union
from kvplace.core.errors import BadAnnotation, Conflict, Corrupt
from kvplace.core.json_fields import Fields
from kvplace.core.placement import MAX_REVISION, Placement, PodPlacement
from kvplace.core.quantity import plain_bytes, write_page_counts
from kvplace.core.request import Policy
from kvplace.core.scalars import NO_CPUS, Bytes, CpuId, CpuMask, NumaId, PodUid
from kvplace.core.strict_json import shown


class OwnershipConflict(Conflict):
    """A write would hand a CPU from one owner to another."""


@dataclass(frozen=True, slots=True)
class Relocation:
    """Other cores that a running pod is getting.

    Until the node's agent has confirmed them, the pod's claim holds its present cores and these.
    """

    next: PodPlacement
    previous: PodPlacement | None = None
    """The placement to go back to; None for a pod that had none."""

    @property
    def is_way_back(self) -> bool:
        """Whether it takes back a revision that the agent could not carry out."""
        return self.previous == self.next


@dataclass(frozen=True, slots=True)
class Reserved:
    """CPUs that are kept for a waiting pod while VMs move or are evicted for it."""

    owned: CpuMask
    """CPUs that the pod is to own; its claim already owns the free ones."""
    until: str
    """Its latest end unless renewed, RFC 3339. For people: each replica measures the time."""
    migration: str = ""
    """The name of the live migration with the pod that gets them, which does not exist yet.

    The claim is under the UID of the VMI and owns nothing. Empty where a pod waits.
    """


@dataclass(frozen=True, slots=True)
class Claim:
    """The holdings of one pod on the node; keyed by pod UID, never by VMI (a migration has two pods)."""

    uid: PodUid
    namespace: str
    pod: str
    vmi: str
    """Name of the VMI, empty for a plain pod."""
    policy: Policy
    cpus: CpuMask
    """CPUs that the pod's threads may use, shared ones included."""
    owned: CpuMask
    """CPUs that no other pod may use; a subset of the ledger's owners."""
    memory: Mapping[NumaId, Bytes]
    huge_pages: Mapping[NumaId, Mapping[Bytes, int]]
    since: str
    """When it was claimed, RFC 3339."""
    revision: int = 1
    """The revision of the pod's placement that it was made for, or that the last relocation put in effect."""
    relocation: Relocation | None = None
    """The relocation in progress; the fields above then include both placements."""
    reserved: Reserved | None = None
    """Set for a reservation of a waiting pod; its bind makes an ordinary claim of it."""

    @property
    def vm(self) -> str:
        """The name of its VM; the name of a plain pod."""
        return self.vmi or self.pod

    @property
    def vm_name(self) -> str:
        """`namespace/name` of its VM."""
        return f"{self.namespace}/{self.vm}"

    @property
    def still_in_use(self) -> CpuMask:
        """CPUs that are reserved for the pod and that it does not own yet."""
        return NO_CPUS if self.reserved is None else CpuMask(self.reserved.owned & ~self.owned)

    @property
    def plain_memory(self) -> dict[NumaId, Bytes]:
        """Bytes outside huge pages by NUMA node; `memory` holds both."""
        if not self.huge_pages:
            return dict(self.memory)
        return {
            node: plain_bytes(count, self.huge_pages.get(node, {})) for node, count in self.memory.items()
        }

    def at(self, placement: Placement, revision: int) -> Claim:
        """The ordinary claim of the same pod for another placement, of a revision."""
        return claim_of(
            self.uid,
            placement,
            namespace=self.namespace,
            pod=self.pod,
            vmi=self.vmi,
            since=self.since,
            revision=revision,
        )


def claim_of(
    uid: PodUid,
    placement: Placement,
    *,
    namespace: str = "",
    pod: str = "",
    vmi: str = "",
    since: str = "",
    revision: int = 1,
) -> Claim:
    """Make the claim of a pod from its placement; outside Kubernetes its UID is its name, too."""
    return Claim(
        uid=uid,
        namespace=namespace,
        pod=pod or uid,
        vmi=vmi,
        policy=placement.policy,
        cpus=placement.cpus,
        owned=placement.owned,
        memory=placement.memory,
        huge_pages=placement.huge_pages,
        since=since,
        revision=revision,
    )


@dataclass(frozen=True)
class LedgerChange:
    """Claims to add or update and pods to release, in one write."""

    claims: tuple[Claim, ...] = ()
    releases: tuple[PodUid, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.claims or self.releases)


@dataclass(frozen=True)
class Ledger:
    """The ledger of one node; a value, changed by `after`."""

    owners: Mapping[CpuId, PodUid] = field(default_factory=lambda: MappingProxyType({}))
    claims: Mapping[PodUid, Claim] = field(default_factory=lambda: MappingProxyType({}))

    @cached_property
    def owned(self) -> CpuMask:
        """All CPUs that have an owner."""
        return mask_of(self.owners)

    def owned_by(self, uid: PodUid) -> CpuMask:
        """The CPUs that have a pod as their owner."""
        return mask_of(cpu for cpu, owner in self.owners.items() if owner == uid)

    @cached_property
    def still_in_use(self) -> CpuMask:
        """CPUs that are reserved for waiting pods and that they do not own yet."""
        return union(claim.still_in_use for claim in self.claims.values())

    @cached_property
    def shared_use(self) -> Mapping[CpuId, int]:
        """How many sharing claims name each CPU, by CPU id; unused CPUs are absent."""
        uses: dict[CpuId, int] = {}
        for claim in self.claims.values():
            for cpu in cpus_of(claim.cpus & ~claim.owned):
                uses[cpu] = uses.get(cpu, 0) + 1
        return uses

    @cached_property
    def numa_pools(self) -> tuple[CpuMask, ...]:
        """The CPUs of each claim of policy `numa`: the shared pools of whole NUMA nodes."""
        return tuple(
            claim.cpus & ~claim.owned for claim in self.claims.values() if claim.policy is Policy.NUMA
        )

    @cached_property
    def named(self) -> CpuMask:
        """The CPUs that sharing claims name one by one, without the CPUs of whole pools."""
        return union(
            claim.cpus & ~claim.owned for claim in self.claims.values() if claim.policy is not Policy.NUMA
        )

    @cached_property
    def shared(self) -> CpuMask:
        """CPUs without an owner that claims name, one by one or as a pool."""
        return CpuMask(union((self.named, *self.numa_pools)) & ~self.owned)

    @cached_property
    def plain_memory(self) -> Mapping[NumaId, Bytes]:
        """Bytes claimed outside huge pages by NUMA node."""
        total: dict[NumaId, Bytes] = {}
        for claim in self.claims.values():
            for node, count in claim.plain_memory.items():
                total[node] = total.get(node, 0) + count
        return total

    @cached_property
    def huge_pages(self) -> Mapping[tuple[NumaId, Bytes], int]:
        """Huge pages claimed by (NUMA node, page size in bytes)."""
        total: dict[tuple[NumaId, Bytes], int] = {}
        for claim in self.claims.values():
            for node, pages in claim.huge_pages.items():
                for size, count in pages.items():
                    total[node, size] = total.get((node, size), 0) + count
        return total

    def after(self, change: LedgerChange) -> Ledger:
        """Apply a change; raises OwnershipConflict, naming CPU and both pods, and changes nothing then.

        Releases do not make room for claims of the same change: the API server compares with the
        stored owners, so a core that changes hands needs two writes.
        """
        owners = dict(self.owners)
        claims = dict(self.claims)
        for uid in change.releases:
            claims.pop(uid, None)
            owners = {cpu: owner for cpu, owner in owners.items() if owner != uid}
        for claim in change.claims:
            for cpu in cpus_of(claim.owned):
                before = self.owners.get(cpu, claim.uid)
                now = owners.get(cpu, claim.uid)
                holder = before if before != claim.uid else now
                if holder != claim.uid:
                    raise OwnershipConflict(
                        f"CPU {cpu} belongs to pod {holder} and must be released before {claim.uid} owns it"
                    )
            if claim.uid in owners.values():
                owners = {cpu: owner for cpu, owner in owners.items() if owner != claim.uid}
            owners |= dict.fromkeys(cpus_of(claim.owned), claim.uid)
            claims[claim.uid] = claim
        return Ledger(owners, claims)

    def check(self) -> None:
        """Raise Corrupt, naming the CPUs, when owners and claims disagree."""
        for uid, claim in self.claims.items():
            if (held := self.owned_by(uid)) != claim.owned:
                raise Corrupt(
                    f"{uid} claims CPU {format_cpu_list(claim.owned)!r} but owns {format_cpu_list(held)!r}"
                )
        strangers = {owner for owner in self.owners.values() if owner not in self.claims}
        if strangers:
            raise Corrupt(f"CPUs are owned by pods without a claim: {', '.join(sorted(strangers))}")


def merge_patch(ledger: Ledger, change: LedgerChange) -> dict[str, Any]:
    """Write a change as the JSON merge patch of a NodeLedger's spec, with the changed fields only.

    A merge patch keeps fields that it does not name, so it names the fields that a claim no longer has.
    """
    owners: dict[str, str | None] = {}
    claims: dict[str, Any] = {}
    for uid in change.releases:
        owners |= {str(cpu): None for cpu, owner in ledger.owners.items() if owner == uid}
        if uid in ledger.claims:
            claims[uid] = None
    for claim in change.claims:
        held = {str(cpu): owner for cpu, owner in ledger.owners.items() if owner == claim.uid}
        wanted = dict.fromkeys(map(str, cpus_of(claim.owned)), claim.uid)
        owners = {cpu: owner for cpu, owner in owners.items() if cpu not in held and owner != claim.uid}
        owners |= _difference(held, wanted)
        claims.pop(claim.uid, None)
        known = ledger.claims.get(claim.uid)
        if known is None:
            claims[claim.uid] = claim_document(claim)
        elif known != claim:
            claims[claim.uid] = _difference(claim_document(known), claim_document(claim))
    return {"owners": owners, "claims": claims}


def ledger_document(ledger: Ledger) -> dict[str, Any]:
    """Write a ledger as the whole spec of a NodeLedger."""
    return {
        "owners": {str(cpu): owner for cpu, owner in ledger.owners.items()},
        "claims": {uid: claim_document(claim) for uid, claim in ledger.claims.items()},
        "summary": summary_document(ledger),
    }


def summary_document(ledger: Ledger) -> dict[str, int]:
    """Write the counts that `kubectl get nodeledgers` shows; nothing is decided by them."""
    return {
        "owned": ledger.owned.bit_count(),
        "shared": ledger.shared.bit_count(),
        "pods": len(ledger.claims),
    }


def _difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON merge patch that makes `after` of `before`."""
    patch: dict[str, Any] = {key: None for key in before if key not in after}
    for key, value in after.items():
        known = before.get(key)
        if isinstance(known, Mapping) and isinstance(value, Mapping):
            if inner := _difference(known, value):
                patch[key] = inner
        elif known != value:
            patch[key] = value
    return patch


def claim_document(claim: Claim) -> dict[str, Any]:
    """Write a claim as it is under `spec.claims` of a NodeLedger.

    Empty fields are left out: the API server's work for each write grows with the whole ledger.
    """
    document: dict[str, Any] = {
        "namespace": claim.namespace,
        "pod": claim.pod,
        "vmi": claim.vmi,
        "policy": claim.policy.value,
        "cpus": format_cpu_list(claim.cpus),
        "owned": format_cpu_list(claim.owned),
        "memory": {str(node): count for node, count in claim.memory.items()},
        "hugePages": {str(node): write_page_counts(pages) for node, pages in claim.huge_pages.items()},
        "since": claim.since,
        "revision": claim.revision if claim.revision != 1 else "",
        "next": {} if claim.relocation is None else _relocation_document(claim.relocation),
        "reserved": {} if claim.reserved is None else _reserved_document(claim.reserved),
    }
    return {key: value for key, value in document.items() if value not in ("", {})}


def _relocation_document(relocation: Relocation) -> dict[str, str]:
    document = {"placement": relocation.next.to_json()}
    if relocation.previous is not None:
        document["previous"] = relocation.previous.to_json()
    return document


def _reserved_document(reserved: Reserved) -> dict[str, str]:
    document = {"owned": format_cpu_list(reserved.owned), "until": reserved.until}
    return {**document, "migration": reserved.migration} if reserved.migration else document


def read_claim(uid: PodUid, raw: object) -> Claim:
    """Read an entry of `spec.claims` of a NodeLedger; raises ValueError that names the field."""
    return _read_claim(uid, Fields(raw))


def read_ledger(spec: object, claim_of: Callable[[PodUid, Any], Claim] = read_claim) -> Ledger:
    """Read a NodeLedger's spec; raises Corrupt, naming CPU or claim, on content that its schema forbids.

    `claim_of` reads an entry of its claims.
    """
    try:
        fields = Fields(spec, "spec")
        cpus = fields.fields("owners")
        owners = {_cpu_id(cpu): PodUid(cpus.text(cpu)) for cpu in cpus.raw}
        documents = fields.fields("claims").raw
    except ValueError as error:
        raise Corrupt(f"owners or claims of a ledger cannot be read: {error}") from error
    claims = {}
    for uid, raw in documents.items():
        try:
            claims[PodUid(uid)] = claim_of(PodUid(uid), raw)
        except ValueError as error:
            raise Corrupt(f"the claim of pod {uid} cannot be read: {error}") from error
    return Ledger(owners, claims)


def _read_claim(uid: PodUid, fields: Fields) -> Claim:
    return Claim(
        uid=uid,
        namespace=fields.text("namespace"),
        pod=fields.text("pod"),
        vmi=fields.text("vmi", ""),
        policy=fields.word("policy", Policy),
        cpus=fields.cpus("cpus", ""),
        owned=fields.cpus("owned", ""),
        memory=fields.bytes_by_node("memory"),
        huge_pages=fields.pages_by_node("hugePages"),
        since=fields.text("since", ""),
        revision=fields.whole("revision", MAX_REVISION, least=1, default=1),
        relocation=_read_relocation(fields.fields("next")) if fields.raw.get("next") else None,
        reserved=_read_reserved(fields.fields("reserved")) if fields.raw.get("reserved") else None,
    )


def _read_reserved(fields: Fields) -> Reserved:
    return Reserved(fields.cpus("owned", ""), fields.text("until", ""), fields.text("migration", ""))


def _read_relocation(fields: Fields) -> Relocation:
    previous = fields.text("previous", "")
    try:
        return Relocation(
            next=PodPlacement.from_json(fields.text("placement")),
            previous=PodPlacement.from_json(previous) if previous else None,
        )
    except BadAnnotation as error:
        raise ValueError(f"its next or previous placement cannot be read: {error}") from None


def _cpu_id(text: str) -> CpuId:
    cpu = parse_id(text)
    if cpu is None:
        raise ValueError(f"{shown(text)} is not a CPU id from 0 to {MAX_CPU}")
    return CpuId(cpu)
