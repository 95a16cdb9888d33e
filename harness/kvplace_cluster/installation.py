"""kvplace in a test cluster: the objects of the manifests, and its processes with the manifests' rights.

The pods of a cluster run as processes here, so Services become loopback addresses and
certificates come from the cluster's CA; everything else is applied as an operator applies it.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import yaml

from harness.control_plane.cluster import ControlPlane, RequestRefused, Scheduler
from harness.control_plane.server_process import ServerProcess, reserve_port
from harness.kvplace_cluster.machines import node_topology
from harness.waiting import PATIENCE_S, wait_until
from kvplace.core.topology import Topology

MANIFESTS = Path(__file__).resolve().parents[2] / "manifests"
NAMESPACE = "kvplace-system"
SIDECAR_IMAGE = "kvplace.test/hook"
EXTENDER = f"kvplace-extender.{NAMESPACE}.svc"
"""The name that schedulers search for in the certificate of `serve`."""

SERVE = (sys.executable, "-m", "kvplace", "serve")

_RUN_AS_PODS = {"Deployment", "DaemonSet", "Service", "NetworkPolicy", "PodDisruptionBudget", "ConfigMap"}
_WEBHOOKS = {"MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"}
_POLICY_BINDING = "ValidatingAdmissionPolicyBinding"
_KINDS_OF_OTHERS = ("cert-manager.io/", "monitoring.coreos.com/")
_OF_THIS_MACHINE = ("--tls-cert", "--tls-key", "--client-ca", "--sidecar-image")
"""Flags of the Deployment with values of a pod; a replica here has its own."""

Json = dict[str, Any]


class Replica:
    """One `kvplace serve` process."""

    def __init__(
        self,
        plane: ControlPlane,
        number: int,
        certificate: tuple[Path, Path],
        *,
        kubeconfig: Path | None = None,
        flags: Sequence[str] = (),
    ) -> None:
        """Start it, with further `flags`; `wait_until_ready` returns when it serves."""
        self._reservations = contextlib.ExitStack()
        ports = []
        for _ in range(3):
            reservation, port = reserve_port()
            self._reservations.enter_context(reservation)
            ports.append(port)
        self.extender_url, self.admission_url = (f"https://127.0.0.1:{port}" for port in ports[:2])
        self.health_url = f"http://127.0.0.1:{ports[2]}"
        self.certificate = certificate[0]
        self._name = f"kvplace-serve-{number}"
        self._log = plane.logs / f"{self._name}.log"
        self._command = [
            *("setpriv", "--pdeathsig=KILL", "--"),
            *SERVE,
            f"--kubeconfig={kubeconfig or plane.service_account_kubeconfig(NAMESPACE, 'kvplace-serve')}",
            f"--extender-address=127.0.0.1:{ports[0]}",
            f"--admission-address=127.0.0.1:{ports[1]}",
            f"--health-address=127.0.0.1:{ports[2]}",
            f"--tls-cert={certificate[0]}",
            f"--tls-key={certificate[1]}",
            f"--client-ca={plane.ca_file}",
            f"--sidecar-image={SIDECAR_IMAGE}",
            *flags,
        ]
        self.start()

    def start(self, *more_flags: str) -> None:
        """Start it (again, after `process.kill()`), at the same addresses."""
        self.process = ServerProcess(self._name, [*self._command, *more_flags], self._log)

    def wait_until_ready(self) -> None:
        """Wait until it answers /readyz with yes."""
        self.process.wait_until(self._is_ready, "readyz")

    def metrics(self) -> str:
        """Read its metrics."""
        return _get(self.health_url, "/metrics")[1]

    def denials(self) -> list[str]:
        """Return the lines of its log about a right that it lacks.

        That no event can be written in a namespace which is being deleted is none.
        """
        lines = self._log.read_text(errors="replace").splitlines()
        return [line for line in lines if "forbidden" in line.lower() and "being terminated" not in line]

    def stop(self) -> None:
        """End it as a rollout does, and give its ports back."""
        self.process.terminate()
        self._reservations.close()

    def _is_ready(self) -> bool:
        try:
            return _get(self.health_url, "/readyz")[0] == 200
        except OSError:
            return False


class Installation:
    """kvplace installed and running in one control plane."""

    def __init__(
        self,
        plane: ControlPlane,
        *,
        replicas: int = 1,
        webhooks: bool = True,
        manifests: Path = MANIFESTS,
        resources: Sequence[str] = ("base", "scheduler"),
        components: Sequence[str] = (),
        objects: Iterable[Json] | None = None,
        flags: Sequence[str] = (),
        start: Callable[[ControlPlane, int], Replica] | None = None,
        admission: Callable[[Sequence[Replica]], str] = lambda replicas: replicas[0].admission_url,
        admission_ca: Path | None = None,
    ) -> None:
        """Apply the manifests and start the replicas; the webhooks point to `admission`, the first replica.

        Without `webhooks` pods stay as they are created, and so does everything else. `resources` and
        `components` are folders of the manifests, as operators list them; `objects` are applied in their
        place. The settings in them become flags of the replicas. `start` starts the replica of that number
        where the usual way does not serve.
        """
        self.plane = plane
        self._admission_ca = admission_ca or plane.ca_file
        self.replicas: list[Replica] = []
        if objects is None:
            objects = self._rendered(manifests, resources, components)
        self._objects = [one for one in objects if not one["apiVersion"].startswith(_KINDS_OF_OTHERS)]
        first = ("Namespace", "CustomResourceDefinition")
        stored = [one for one in self._objects if one["kind"] not in _RUN_AS_PODS | _WEBHOOKS]
        self._apply(*sorted(stored, key=lambda one: one["kind"] not in first))
        if start is None:
            certificate = plane.issue_certificate("kvplace-serve", EXTENDER)
            flags = [*self._flags_of_the_deployment(), *flags]

            def start(plane: ControlPlane, number: int) -> Replica:
                return Replica(plane, number, certificate, flags=flags)

        try:
            for number in range(replicas):
                self.replicas.append(start(plane, number))
            for replica in self.replicas:
                replica.wait_until_ready()
            if webhooks:
                self.register_webhooks(admission(self.replicas))
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Unregister the webhooks and end the replicas; the other objects stay."""
        self._delete_admission(_WEBHOOKS)
        for replica in self.replicas:
            replica.stop()

    def register_webhooks(self, url: str) -> None:
        """Have the API server send reviews to this address."""
        for manifest in self._objects:
            if manifest["kind"] in _WEBHOOKS:
                self._apply(self._on_loopback(manifest, url))

    def unregister_webhooks(self) -> None:
        """Have the API server send no reviews."""
        self._delete_admission(_WEBHOOKS)

    def apply_policies(self) -> None:
        """Put the admission policies in effect again, as they are after the start."""
        for manifest in self._of_kind(_POLICY_BINDING):
            self._apply(manifest)

    def suspend_policies(self) -> None:
        """Take the admission policies out of force."""
        self._delete_admission({_POLICY_BINDING})

    def remove(self) -> None:
        """Stop, and delete every object but kinds and namespaces, so that nothing is left to the next one."""
        self.stop()
        kept = {"CustomResourceDefinition", "Namespace", *_RUN_AS_PODS, *_WEBHOOKS}
        stored = [one for one in self._objects if one["kind"] not in kept]
        self.plane.kubectl("delete", "--ignore-not-found", "-f", "-", stdin=yaml.safe_dump_all(stored))

    def add_scheduler(
        self, asked: Replica | str, *, names: Sequence[str] = (), ca_file: Path | None = None
    ) -> Scheduler:
        """Start a kube-scheduler with the manifests' configuration and rights, asking a replica or a URL.

        `names` replace the names of its profiles in the manifests; the profiles are all alike. Without
        kvplace's own scheduler it is the cluster's main one, with the settings that its operator copies.
        """
        url = asked if isinstance(asked, str) else asked.extender_url
        shipped = [
            one["data"]["configuration.yaml"]
            for one in self._of_kind("ConfigMap")
            if "configuration.yaml" in one["data"]
        ]
        is_main = not shipped
        (text,) = shipped or [(MANIFESTS / "scheduler" / "configuration.yaml").read_text()]
        configuration = yaml.safe_load(text)
        if is_main:
            names = ("default-scheduler",)
        if names:
            profile = configuration["profiles"][0]
            configuration["profiles"] = [{**profile, "schedulerName": name} for name in names]
        del configuration["leaderElection"], configuration["clientConnection"]
        certificate, key = self.plane.issue_certificate("kvplace-scheduler")
        for extender in configuration["extenders"]:
            extender["urlPrefix"] = f"{url}/v1"
            extender["tlsConfig"] = {
                "caFile": str(ca_file or self.plane.ca_file),
                "certFile": str(certificate),
                "keyFile": str(key),
            }
        if is_main:
            return self.plane.add_scheduler(configuration)
        account = self.plane.service_account_kubeconfig(NAMESPACE, "kvplace-scheduler")
        return self.plane.add_scheduler(configuration, kubeconfig=account)

    def describe(self, node: str, topology: Topology, *, writer: str = "kvplace-agent") -> None:
        """Publish a node's machine, as its agent would, or as another writer."""
        self._apply(node_topology(node, topology), writer=writer)

    def ledger(self, node: str) -> Json:
        """Read the owners and claims of a node's ledger; empty when it has none yet."""
        try:
            stored = self.plane.request("GET", f"/apis/kvplace.io/v1alpha1/nodeledgers/{node}")
        except RequestRefused as refused:
            if refused.status != 404:
                raise
            return {"owners": {}, "claims": {}}
        return {key: stored["spec"][key] for key in ("owners", "claims")}

    def _flags_of_the_deployment(self) -> list[str]:
        """Return the arguments of `serve` in the manifests, with the settings that they name."""
        (deployment,) = (
            one for one in self._of_kind("Deployment") if one["metadata"]["name"] == "kvplace-serve"
        )
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        (source,) = container["envFrom"]
        (settings,) = (
            one["data"]
            for one in self._of_kind("ConfigMap")
            if one["metadata"]["name"] == source["configMapRef"]["name"]
        )
        return [
            re.sub(r"\$\((\w+)\)", lambda name: settings[name[1]], argument)
            for argument in container["args"][1:]
            if not argument.startswith(_OF_THIS_MACHINE)
        ]

    def _rendered(self, manifests: Path, resources: Sequence[str], components: Sequence[str]) -> list[Json]:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name).resolve()

            def relative(part: str) -> str:
                return os.path.relpath(manifests / part, folder)

            overlay = {
                "apiVersion": "kustomize.config.k8s.io/v1beta1",
                "kind": "Kustomization",
                "resources": [relative(part) for part in resources],
                "components": [relative(component) for component in components],
            }
            (folder / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
            text = self.plane.kubectl("kustomize", str(folder))
        return [document for document in yaml.load_all(text, yaml.CSafeLoader) if document]

    def _of_kind(self, kind: str) -> list[Json]:
        return [manifest for manifest in self._objects if manifest["kind"] == kind]

    def _apply(self, *manifests: Json, writer: str = "kubectl") -> None:
        options = ("--server-side", "--force-conflicts", f"--field-manager={writer}")
        self.plane.kubectl("apply", *options, "-f", "-", stdin=yaml.safe_dump_all(manifests))

    def _delete_admission(self, kinds: Collection[str]) -> None:
        for manifest in self._objects:
            if manifest["kind"] in kinds:
                path = _path_of_admission(manifest["kind"], manifest["metadata"]["name"])
                with contextlib.suppress(RequestRefused, OSError):
                    self.plane.request("DELETE", path)

    def _on_loopback(self, manifest: Json, url: str) -> Json:
        authority = base64.b64encode(self._admission_ca.read_bytes()).decode()
        webhooks = [
            {
                **webhook,
                "clientConfig": {
                    "url": f"{url}{webhook['clientConfig']['service']['path']}",
                    "caBundle": authority,
                },
            }
            for webhook in manifest["webhooks"]
        ]
        return {**manifest, "webhooks": webhooks}


@contextlib.contextmanager
def described_nodes(installation: Installation, machines: dict[str, Topology]) -> Iterator[None]:
    """Publish machines while the block runs, once earlier nodes of these names hold no core any more."""

    def held() -> list[str]:
        return [name for name in machines if installation.ledger(name)["claims"]]

    wait_until(lambda: not held(), lambda: f"there are claims from before on {', '.join(held())}")
    for name, topology in machines.items():
        installation.describe(name, topology)
    try:
        yield
    finally:
        for name in machines:
            with contextlib.suppress(RequestRefused):
                installation.plane.request("DELETE", f"/apis/kvplace.io/v1alpha1/nodetopologies/{name}")


def _path_of_admission(kind: str, name: str) -> str:
    return f"/apis/admissionregistration.k8s.io/v1/{kind.lower()}s/{name}"


def _get(url: str, path: str) -> tuple[int, str]:
    from http.client import HTTPConnection

    connection = HTTPConnection(url.removeprefix("http://"), timeout=PATIENCE_S)
    with contextlib.closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
