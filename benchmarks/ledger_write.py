"""CPU of the API server for one write to a node's ledger, by the size of the node.

    python -m benchmarks.ledger_write [--cpus 16 64 256 512] [--writes 50] [--rounds 9] [--patched]
        [--against FOLDER]

etcd and kube-apiserver are real, with the CRD of the manifests and the policy for claims. Every ledger is
full: each claim owns four CPUs and has memory of one NUMA node. A write is the request that kvplace sends:
in turn one that releases a claim and one that claims the same CPUs, one after the other over one connection.
The floor is the same for a custom resource that has a single short text and no rules. The CPU is that of the
kube-apiserver process, garbage collection included. The same ledgers *without rules*, as a kind that the API
server does not check, show the cost of the size alone. The ledgers of different sizes and the floor take
turns; each figure is the median of the rounds. `--against` names the manifests of another version of
kvplace; its ledgers are measured in the same turns. `--patched` also measures ledgers that are patched, as
ledgers with unknown fields are.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from contextlib import closing
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import yaml

from benchmarks._processes import cpu_seconds
from benchmarks._tables import table
from harness.control_plane.cluster import ControlPlane, RequestRefused
from kvplace.core.cpuset import mask_of
from kvplace.core.ledger import Claim, Ledger, LedgerChange
from kvplace.core.node_topology import GROUP
from kvplace.core.request import Policy
from kvplace.core.scalars import Bytes, CpuId, NodeName, NumaId, PodUid
from kvplace.kube.calls import JSON, MERGE_PATCH, METADATA_ONLY, METHODS, ApiCall
from kvplace.kube.custom_objects import write_ledger_call
from kvplace.kube.object_records import LedgerRecord

MANIFESTS = Path(__file__).resolve().parents[1] / "manifests"
CRD = Path("crd", "nodeledgers.yaml")
POLICY = Path("policy", "ledger-claims.yaml")
OTHER_GROUP = f"other.{GROUP}"
UNRULED_GROUP = f"unruled.{GROUP}"
NOTES = "/apis/benchmark.kvplace.io/v1/notes"
CPUS_OF_A_CLAIM = 4

Json = dict[str, Any]
Write = Callable[[], None]


def claim_of(number: int) -> Claim:
    """Make the claim that owns the next CPUs."""
    first = number * CPUS_OF_A_CLAIM
    owned = mask_of(CpuId(cpu) for cpu in range(first, first + CPUS_OF_A_CLAIM))
    return Claim(
        uid=PodUid(f"00000000-0000-4000-8000-{number:012}"),
        namespace="customers",
        pod=f"virt-launcher-database-{number:03}-abcde",
        vmi=f"database-{number:03}",
        policy=Policy.EXCLUSIVE,
        cpus=owned,
        owned=owned,
        memory={NumaId(0): Bytes(8 << 30)},
        huge_pages={},
        since="2026-01-01T00:00:00Z",
    )


def note_crd() -> Json:
    """Describe the smallest custom resource."""
    schema = {"type": "object", "properties": {"text": {"type": "string"}}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "notes.benchmark.kvplace.io"},
        "spec": {
            "group": "benchmark.kvplace.io",
            "scope": "Cluster",
            "names": {"kind": "Note", "listKind": "NoteList", "plural": "notes", "singular": "note"},
            "versions": [
                {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
            ],
        },
    }


class Server:
    """The API server, asked over one connection."""

    def __init__(self, plane: ControlPlane, connection: HTTPSConnection) -> None:
        self._plane = plane
        self._connection = connection
        self.pid = plane.server("kube-apiserver").pid

    def write(self, call: ApiCall, group: str = GROUP) -> str:
        """Make a call of kvplace to a ledger of a group; returns the new resource version."""
        body = (call.body or b"").replace(f'"{GROUP}/'.encode(), f'"{group}/'.encode())
        path = f"{call.path.replace(GROUP, group)}?{urlencode(call.query or {})}"
        return self._send(METHODS[call.verb], path, body, JSON if call.verb == "update" else call.patch_type)

    def patch(self, path: str, body: bytes) -> str:
        """Send a merge patch; returns the new resource version."""
        return self._send("PATCH", f"{path}?fieldManager=kvplace", body, MERGE_PATCH)

    def _send(self, method: str, path: str, body: bytes, content_type: str) -> str:
        headers = {
            "Authorization": f"Bearer {self._plane.admin.token}",
            "Content-Type": content_type,
            "Accept": METADATA_ONLY,
        }
        self._connection.request(method, path, body, headers)
        answer = self._connection.getresponse()
        said = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{method} {path}: {answer.status} {said.decode()}")
        return str(json.loads(said)["metadata"]["resourceVersion"])


def serve_notes(plane: ControlPlane) -> None:
    """Install the kind of the floor."""
    _serve(plane, note_crd())


def serve_unruled_ledgers(plane: ControlPlane) -> None:
    """Install NodeLedger without its schema, its rules and its policy, in a group of its own."""
    crd = yaml.safe_load((MANIFESTS / CRD).read_text().replace(GROUP, UNRULED_GROUP))
    for version in crd["spec"]["versions"]:
        version["schema"]["openAPIV3Schema"] = {
            "type": "object",
            "x-kubernetes-preserve-unknown-fields": True,
        }
    _serve(plane, crd)


def _serve(plane: ControlPlane, crd: Json) -> None:
    plane.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(crd))
    plane.wait_for_crds(crd["metadata"]["name"])


def serve_ledgers(plane: ControlPlane, manifests: Path, group: str) -> None:
    """Install NodeLedger in an API group, and return when its claims are checked."""
    for file in (CRD, POLICY):
        if (manifests / file).exists():  # an earlier version has no policy: its CRD checks claims
            text = (manifests / file).read_text().replace(GROUP, group)
            plane.kubectl("apply", "--server-side", "-f", "-", stdin=text)
    plane.wait_for_crds(f"nodeledgers.{group}")
    nonsense = ledger_json(group, "nonsense", {"owners": {}, "claims": {"nobody": {}}})

    def is_checked() -> bool:
        try:
            plane.request("POST", f"{ledgers_path(group)}?dryRun=All", nonsense)
        except RequestRefused:
            return True
        return False

    plane.server("kube-apiserver").wait_until(is_checked, "check of claims")


def ledgers_path(group: str) -> str:
    """Return the path of the ledgers of a group."""
    return f"/apis/{group}/v1alpha1/nodeledgers"


def ledger_json(group: str, name: str, spec: Json) -> Json:
    """Write a NodeLedger of a group."""
    return {
        "apiVersion": f"{group}/v1alpha1",
        "kind": "NodeLedger",
        "metadata": {"name": name},
        "spec": spec,
    }


def full_ledger(
    plane: ControlPlane, server: Server, group: str, cpus: int, *, patched: bool = False
) -> Write:
    """Create the full ledger of a node and return what writes it once."""
    node = NodeName(f"{'patched' if patched else 'node'}-{cpus}")
    empty = ledger_json(group, node, {"owners": {}, "claims": {}})
    made = plane.request("POST", ledgers_path(group), empty)
    record = LedgerRecord(node, Ledger(), made["metadata"]["resourceVersion"], is_whole=not patched)

    def store(change: LedgerChange) -> None:
        nonlocal record
        after = record.ledger.after(change)
        version = server.write(write_ledger_call(record, change, after), group)
        record = LedgerRecord(node, after, version, is_whole=not patched)

    claims = [claim_of(number) for number in range(cpus // CPUS_OF_A_CLAIM)]
    store(LedgerChange(tuple(claims)))

    def write() -> None:
        first = claims[0]
        is_held = first.uid in record.ledger.claims
        store(LedgerChange((), (first.uid,)) if is_held else LedgerChange((first,)))

    return write


def small_object(plane: ControlPlane, server: Server) -> Write:
    """Create the object of the floor and return what writes it once."""
    kind = {"apiVersion": "benchmark.kvplace.io/v1", "kind": "Note", "metadata": {"name": "note"}}
    plane.request("POST", NOTES, {**kind, "text": ""})
    turn = 0

    def write() -> None:
        nonlocal turn
        turn += 1
        server.patch(f"{NOTES}/note", json.dumps({"text": f"written {turn} times"}).encode())

    return write


def measure(server: Server, kinds: dict[str, Write], writes: int, rounds: int) -> dict[str, float]:
    """Let the kinds take turns; returns the median CPU-ms of one write of each."""
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for write in kinds.values():
        for _ in range(20):
            write()
    for number in range(rounds):
        for name, write in kinds.items():
            before = cpu_seconds(server.pid)
            for _ in range(writes):
                write()
            found[name].append((cpu_seconds(server.pid) - before) * 1000 / writes)
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
    return {name: statistics.median(each) for name, each in found.items()}


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cpus", type=int, nargs="+", default=[16, 64, 256, 512])
    parser.add_argument("--writes", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--patched", action="store_true")
    parser.add_argument("--against", type=Path, help="the manifests of another version of kvplace")
    given = parser.parse_args()
    with ControlPlane() as plane:
        serve_notes(plane)
        serve_ledgers(plane, MANIFESTS, GROUP)
        serve_unruled_ledgers(plane)
        if given.against:
            serve_ledgers(plane, given.against, OTHER_GROUP)
        address = plane.url.removeprefix("https://")
        with closing(HTTPSConnection(address, context=plane.tls, timeout=60)) as connection:
            server = Server(plane, connection)
            kinds = {"the floor: a small custom resource": small_object(plane, server)}
            versions = {GROUP: "", UNRULED_GROUP: " without rules"}
            if given.against:
                versions[OTHER_GROUP] = " in the other version"
            for cpus in given.cpus:
                for group, version in versions.items():
                    for patched in (False, True) if given.patched else (False,):
                        name = f"a ledger of {cpus} CPUs{version}{', patched' if patched else ''}"
                        kinds[name] = full_ledger(plane, server, group, cpus, patched=patched)
            found = measure(server, kinds, given.writes, given.rounds)
    floor = next(iter(found.values()))
    rows = [[name, f"{each:.1f}", f"{each / floor:.1f}"] for name, each in found.items()]
    print(table(["one write to", "CPU-ms of the API server", "of the floor"], rows))


if __name__ == "__main__":
    main()
