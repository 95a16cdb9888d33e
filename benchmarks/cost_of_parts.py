"""CPU time of a VM by process, while the parts of kvplace are added one after the other.

    python -m benchmarks.cost_of_parts [--nodes 50] [--vms 250] [--rounds 1]

One cluster as for `cost_per_vm`: a real kube-apiserver with KubeVirt's own admission and virt-controller,
and nodes that are Node objects. The same VMIs are created again and again, each time with one part more of
kvplace's way. All parts but the last are those of any solution with this design. For these, a server takes
the place of kvplace that answers at once and decides nothing (`benchmarks/_answers_at_once.py`). Its cost is
the cost of HTTP and TLS in Python.

* sidecar and options: the VMI has a request, and its client has written the hook sidecar into it, as
  admission would
* webhooks: the API server sends VMI and pod to two webhooks, which change nothing
* kvplace's patches: both webhooks answer what kvplace answers, but leave `metadata.managedFields`; the pod
  goes to the cluster's own scheduler
* no managedFields: the patches remove that record, too
* second scheduler: a kube-scheduler beside the first one binds the pods
* extender: it calls an extender. Its filter answers with the first node, and its bind writes the results of
  a VM
* policies: the admission policies are active
* watches: the server watches what `kvplace serve` watches
* kvplace: `kvplace serve` itself takes its place; it chooses nodes and cores, and writes ledgers

CPU is counted as for `cost_per_vm`. Tables have medians of the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from collections.abc import Iterator, Sequence
from enum import IntEnum
from functools import partial

from benchmarks._api_requests import Json
from benchmarks._tables import table
from benchmarks._vm_rounds import Round, VmRounds
from benchmarks.bound_per_second import machines
from harness.control_plane.cluster import ControlPlane
from harness.control_plane.kubevirt_parts import KubeVirt
from harness.control_plane.programs import KUBEVIRT
from harness.control_plane.server_process import ServerProcess, reserve_port
from harness.go_build import built
from harness.kvplace_cluster.installation import NAMESPACE, SIDECAR_IMAGE, Installation, Replica
from harness.kvplace_cluster.vms import vmi_manifest
from kvplace.admission.objects import AdmissionSettings
from kvplace.admission.vmi import admit_vmi

_CORES = 4
_ASKING = {"cpu-set": "one-numa"}
_SECOND = {"profiles": [{"schedulerName": "kvplace-scheduler", "percentageOfNodesToScore": 100}]}
PROCESSES = {
    "kube-apiserver": "API server",
    "etcd": "etcd",
    "virt-controller": "virt-controller",
    "KubeVirt's admission": "KubeVirt's admission",
    "kube-scheduler": "schedulers",
    "kvplace": "kvplace",
}


class Stage(IntEnum):
    """How much of kvplace's way is there; each stage has what those before it have."""

    NOTHING = 0
    SIDECAR = 1
    WEBHOOKS = 2
    PATCHES = 3
    NO_MANAGED_FIELDS = 4
    SECOND_SCHEDULER = 5
    EXTENDER = 6
    POLICIES = 7
    WATCHES = 8
    KVPLACE = 9


NAMES = {
    Stage.NOTHING: "without kvplace",
    Stage.SIDECAR: "+ sidecar and options",
    Stage.WEBHOOKS: "+ webhooks",
    Stage.PATCHES: "+ kvplace's patches",
    Stage.NO_MANAGED_FIELDS: "- managedFields",
    Stage.SECOND_SCHEDULER: "+ second scheduler",
    Stage.EXTENDER: "+ extender",
    Stage.POLICIES: "+ policies",
    Stage.WATCHES: "+ watches",
    Stage.KVPLACE: "= kvplace",
}


class Parts:
    """A cluster with parts of kvplace that come and go."""

    def __init__(self, plane: ControlPlane, virt: KubeVirt, installation: Installation) -> None:
        """Nothing of kvplace runs yet; its kinds, accounts and rights are there."""
        self._plane = plane
        self._installation = installation
        self._certificate = plane.issue_certificate("kvplace-serve")
        self._server: list[ServerProcess] = []
        self.rounds = VmRounds(
            plane, lambda: [*plane.servers, *virt.servers, *self._server], has_kvplace=True
        )
        installation.suspend_policies()

    @contextlib.contextmanager
    def at(self, stage: Stage) -> Iterator[None]:
        """Have the parts of a stage while the block runs."""
        with contextlib.ExitStack() as stack:
            if stage >= Stage.POLICIES:
                self._installation.apply_policies()
                stack.callback(self._installation.suspend_policies)
            if stage >= Stage.WEBHOOKS:
                extender, admission = stack.enter_context(
                    self._serve() if stage is Stage.KVPLACE else self._stand_in(stage)
                )
                self._installation.register_webhooks(admission)
                stack.callback(self._installation.unregister_webhooks)
                if stage >= Stage.EXTENDER:
                    stack.callback(self._installation.add_scheduler(extender).stop)
            if stage is Stage.SECOND_SCHEDULER:
                stack.callback(self._plane.add_scheduler(_SECOND).stop)
            yield

    def vmi(self, stage: Stage, name: str) -> Json:
        """Write a VMI as its client sends it."""
        if stage is Stage.NOTHING:
            return vmi_manifest(name, cores=_CORES, annotations={})
        asking = vmi_manifest(name, cores=_CORES, annotations=_ASKING)
        if stage >= Stage.PATCHES:
            return asking
        admitted = admit_vmi(asking, namespace="", settings=AdmissionSettings(SIDECAR_IMAGE))
        return dict(admitted.object)

    @contextlib.contextmanager
    def _serve(self) -> Iterator[tuple[str, str]]:
        replica = Replica(self._plane, 0, self._certificate)
        self._server.append(replica.process)
        try:
            replica.wait_until_ready()
            yield replica.extender_url, replica.admission_url
        finally:
            self._server.clear()
            replica.stop()

    @contextlib.contextmanager
    def _stand_in(self, stage: Stage) -> Iterator[tuple[str, str]]:
        with contextlib.ExitStack() as stack:
            addresses = []
            for _ in range(2):
                reservation, port = reserve_port()
                stack.enter_context(reservation)
                addresses.append(f"127.0.0.1:{port}")
            scheduler = "kvplace-scheduler" if stage >= Stage.SECOND_SCHEDULER else "default-scheduler"
            process = ServerProcess(
                "kvplace-serve-stand-in",
                [
                    *("setpriv", "--pdeathsig=KILL", "--"),
                    *(sys.executable, "-m", "benchmarks._answers_at_once"),
                    f"--kubeconfig={self._plane.service_account_kubeconfig(NAMESPACE, 'kvplace-serve')}",
                    f"--tls-cert={self._certificate[0]}",
                    f"--tls-key={self._certificate[1]}",
                    f"--client-ca={self._plane.ca_file}",
                    f"--extender-address={addresses[0]}",
                    f"--admission-address={addresses[1]}",
                    f"--vcpus={_CORES}",
                    *([f"--patches-for={scheduler}"] if stage >= Stage.PATCHES else []),
                    *(["--keeps-managed-fields"] if stage is Stage.PATCHES else []),
                    *(["--watches"] if stage >= Stage.WATCHES else []),
                ],
                self._plane.logs / "stand-in.log",
            )
            stack.callback(process.terminate)
            process.wait_until(lambda: f"admission is on {addresses[1]}" in process.log_tail(), "listener")
            self._server.append(process)
            stack.callback(self._server.clear)
            yield f"https://{addresses[0]}", f"https://{addresses[1]}"


@contextlib.contextmanager
def running_parts(nodes: int) -> Iterator[Parts]:
    """Start the cluster."""
    programs = built(KUBEVIRT)
    with (
        ControlPlane() as plane,
        KubeVirt(plane, programs) as virt,
        Installation(plane, replicas=0, webhooks=False) as installation,
    ):
        plane.add_scheduler()
        parts = Parts(plane, virt, installation)
        parts.rounds.add_nodes(machines(nodes), 0)
        yield parts


def report(nodes: int, vms: int, found: dict[Stage, list[Round]]) -> None:
    """Print the table."""
    rounds = len(next(iter(found.values())))
    print(f"{nodes} nodes, {vms} VMs at once, CPU-ms per VM, medians of {rounds} rounds\n")
    rows = []
    sums = {stage: statistics.median(one.sum_ms for one in of_stage) for stage, of_stage in found.items()}
    first, before = next(iter(sums.values())), None
    for stage, of_stage in found.items():
        by_process = [statistics.median(one.cpu_ms.get(name, 0.0) for one in of_stage) for name in PROCESSES]
        rows.append(
            [
                NAMES[stage],
                *(f"{value:.1f}" for value in by_process),
                f"{sums[stage]:.1f}",
                "" if before is None else f"{sums[stage] - before:+.1f}",
                f"{sums[stage] / first:.2f}",
            ]
        )
        before = sums[stage]
    print(table(["", *PROCESSES.values(), "all", "", "times"], rows))


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=50)
    parser.add_argument("--vms", type=int, default=250)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--stages", type=int, nargs="+", default=list(Stage), help="only these, by number")
    given = parser.parse_args()
    stages: Sequence[Stage] = [Stage(number) for number in given.stages]
    found: dict[Stage, list[Round]] = {stage: [] for stage in stages}
    with running_parts(given.nodes) as parts:
        for number in range(given.rounds):
            for stage in stages:
                vmi = partial(parts.vmi, stage)
                with parts.at(stage):
                    parts.rounds.measure(20, vmi)  # the first ones meet cold caches and new connections
                    one = parts.rounds.measure(given.vms, vmi)
                found[stage].append(one)
                shown = ", ".join(f"{name} {value:.1f}" for name, value in one.cpu_ms.items())
                print(f"round {number + 1}, {NAMES[stage]}: {one.sum_ms:.1f} ({shown})", file=sys.stderr)
    report(given.nodes, given.vms, found)


if __name__ == "__main__":
    main()
