"""CPU of the API server for one write to a node's ledger, by the size of the node.

    python -m benchmarks.ledger_write [--cpus 64 256 512] [--writes 200] [--rounds 3]

etcd and kube-apiserver are real, with the CRD of the manifests. Every ledger is full: each claim owns four
CPUs and has memory of one NUMA node. A write is the merge patch that kvplace sends: in turn one that
releases a claim and one that claims the same CPUs, one after the other over one connection. The floor is the
same for a custom resource that has a single short text and no rules. The CPU is that of the kube-apiserver
process, garbage collection included. The ledgers of different sizes and the floor take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any

import yaml

from benchmarks._processes import cpu_seconds
from benchmarks._tables import table
from harness.control_plane.cluster import ControlPlane
from kvplace.core.cpuset import mask_of
from kvplace.core.ledger import Claim, Ledger, LedgerChange, merge_patch, summary_document
from kvplace.core.request import Policy
from kvplace.core.scalars import Bytes, CpuId, NumaId, PodUid

CRD = Path(__file__).resolve().parents[1] / "manifests" / "crd" / "nodeledgers.yaml"
LEDGERS = "/apis/kvplace.io/v1alpha1/nodeledgers"
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
        self.pid = next(server.pid for server in plane.servers if server.name == "kube-apiserver")

    def patch(self, path: str, body: Json) -> None:
        """Send a merge patch as kvplace does, and ask for nothing but metadata back."""
        headers = {
            "Authorization": f"Bearer {self._plane.admin.token}",
            "Content-Type": "application/merge-patch+json",
            "Accept": "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1",
        }
        self._connection.request("PATCH", f"{path}?fieldManager=kvplace", json.dumps(body), headers)
        answer = self._connection.getresponse()
        said = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"PATCH {path}: {answer.status} {said.decode()}")


@contextmanager
def served(plane: ControlPlane, crd: Json) -> Iterator[None]:
    """Install a custom resource until it is served."""
    plane.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(crd))
    plane.wait_for_crds(crd["metadata"]["name"])
    yield


def full_ledger(plane: ControlPlane, server: Server, cpus: int) -> Write:
    """Create the full ledger of a node and return what writes it once."""
    path = f"{LEDGERS}/node-{cpus}"
    named = {"apiVersion": "kvplace.io/v1alpha1", "kind": "NodeLedger", "metadata": {"name": f"node-{cpus}"}}
    plane.request("POST", LEDGERS, {**named, "spec": {"owners": {}, "claims": {}}})
    claims = [claim_of(number) for number in range(cpus // CPUS_OF_A_CLAIM)]
    filling = LedgerChange(tuple(claims))
    server.patch(path, {"spec": merge_patch(Ledger(), filling)})
    full = Ledger().after(filling)
    release = LedgerChange((), (claims[0].uid,))
    claim = LedgerChange((claims[0],))
    changes = [(full, release), (full.after(release), claim)]
    bodies = [
        {**merge_patch(before, change), "summary": summary_document(before.after(change))}
        for before, change in changes
    ]
    turn = 0

    def write() -> None:
        nonlocal turn
        server.patch(path, {"spec": bodies[turn % 2]})
        turn += 1

    return write


def small_object(plane: ControlPlane, server: Server) -> Write:
    """Create the object of the floor and return what writes it once."""
    kind = {"apiVersion": "benchmark.kvplace.io/v1", "kind": "Note", "metadata": {"name": "note"}}
    plane.request("POST", NOTES, {**kind, "text": ""})
    turn = 0

    def write() -> None:
        nonlocal turn
        turn += 1
        server.patch(f"{NOTES}/note", {"text": f"written {turn} times"})

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
    parser.add_argument("--cpus", type=int, nargs="+", default=[64, 256, 512])
    parser.add_argument("--writes", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--crd", type=Path, default=CRD, help="another version of the ledger's CRD")
    given = parser.parse_args()
    crd = yaml.safe_load(given.crd.read_text())
    with ControlPlane() as plane, served(plane, crd), served(plane, note_crd()):
        address = plane.url.removeprefix("https://")
        with closing(HTTPSConnection(address, context=plane.tls, timeout=60)) as connection:
            server = Server(plane, connection)
            kinds = {"the floor: a small custom resource": small_object(plane, server)}
            kinds |= {f"a ledger of {cpus} CPUs": full_ledger(plane, server, cpus) for cpus in given.cpus}
            found = measure(server, kinds, given.writes, given.rounds)
    floor = next(iter(found.values()))
    rows = [[name, f"{each:.1f}", f"{each / floor:.1f}"] for name, each in found.items()]
    print(table(["one write to", "CPU-ms of the API server", "of the floor"], rows))


if __name__ == "__main__":
    main()
