"""A control plane on loopback: etcd, kube-apiserver and any number of kube-schedulers.

It behaves like a cluster of the field where that matters to the tests: RBAC decides, no client is
anonymous, everything is TLS under a CA of its own, and every scheduler runs the configuration that its test
gives it. There is no kubelet: see `hollow_node`. There is no controller-manager unless asked for, so
namespaces get no `default` service account and the admission that would demand one is off.

Data lives in memory (/dev/shm where there is one) and is gone with the process that started the cluster.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import ssl
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException, HTTPSConnection
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any, Self

from harness.control_plane.programs import KUBERNETES
from harness.control_plane.server_process import ServerProcess, reserve_port
from harness.go_build import built

Json = dict[str, Any]

SERVICE_SUBNET = IPv4Network("10.96.0.0/16")

MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_MERGE_PATCH = "application/strategic-merge-patch+json"
SERVER_SIDE_APPLY = "application/apply-patch+yaml"
_ATTEMPTS_TO_WAIT = 500
"""Each is a start of kubectl, so they last half a minute and more."""


class RequestRefused(Exception):
    """The API server answered a request with an error."""

    def __init__(self, method: str, path: str, status: int, answer: Json) -> None:
        self.status = status
        self.answer = answer
        super().__init__(
            f"{method} {path}: {status} {answer.get('reason', '')}: {answer.get('message', answer)}"
        )


class KubectlFailed(Exception):
    """kubectl ended with an error; the message is its output."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The user of a token."""

    user: str
    groups: tuple[str, ...] = ()
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))


@dataclass(frozen=True, slots=True)
class Scheduler:
    """One running kube-scheduler."""

    process: ServerProcess
    configuration: Path
    url: str
    _plane: ControlPlane
    _reservation: socket.socket

    def wait_until_ready(self) -> None:
        """Wait until it has synced (again)."""
        self.process.wait_until(lambda: self._plane._is_ready(self.url), "readyz")

    def metrics(self) -> str:
        """Return its /metrics, in Prometheus' text form."""
        return self._plane.fetch_text(self.url, "/metrics")

    def stop(self) -> None:
        """End it and wait until it is gone; the control plane continues."""
        self.process.stop()
        self._reservation.close()


class ControlPlane:
    """A running control plane; use it as a context manager, or call `stop`."""

    def __init__(
        self,
        *,
        controller_manager: bool = False,
        service_account_admission: bool = False,
        apiserver_flags: Sequence[str] = (),
        service_subnet: IPv4Network = SERVICE_SUBNET,
        logs: Path | None = None,
    ) -> None:
        """Start etcd and kube-apiserver and wait until the API server is ready.

        Args:
            controller_manager: also run kube-controller-manager (garbage collection, namespaces, service
                accounts; not the node life cycle, which would evict from nodes without a kubelet).
            service_account_admission: demand and mount service accounts as a real cluster does; without a
                controller-manager each namespace then needs `create_service_account("default")`.
            apiserver_flags: put behind our own, so they win.
            service_subnet: the addresses of Services; the first is the API server's own.
            logs: folder that keeps the servers' logs; otherwise they go with the cluster.
        """
        self.programs = built(KUBERNETES)
        self.folder = _scratch_folder()
        self.logs = logs or self.folder / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.servers: list[ServerProcess] = []
        self._open_files = contextlib.ExitStack()
        self.schedulers: list[Scheduler] = []
        self.admin = Identity("admin", ("system:masters",))
        self._scheduler_identity = Identity("system:kube-scheduler")
        self._controller_identity = Identity("system:kube-controller-manager")
        try:
            self.issue_certificate("kube-apiserver", "kubernetes.default.svc", str(service_subnet[1]))
            self.ca_file = self.folder / "pki" / "ca.crt"
            self.tls = ssl.create_default_context(cafile=str(self.ca_file))
            self._start_etcd()
            self._start_apiserver(
                service_account_admission=service_account_admission,
                flags=[f"--service-cluster-ip-range={service_subnet}", *apiserver_flags],
            )
            self.kubeconfig = self.kubeconfig_for(self.admin.token, name="admin")
            if controller_manager:
                self._start_controller_manager()
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End every server, wait until they are gone, and remove all data; may be called twice."""
        for server in self.servers:
            server.close_input()
        for server in self.servers:
            server.stop()
        for scheduler in self.schedulers:
            scheduler.stop()
        self._open_files.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def server(self, name: str) -> ServerProcess:
        """Return one of the servers, as `etcd` or `kube-apiserver`."""
        return next(server for server in self.servers if server.name == name)

    def wait_until_ready(self) -> None:
        """Wait until the API server is ready (again)."""
        self.server("kube-apiserver").wait_until(lambda: self._is_ready(self.url), "readyz")

    # Identities

    def kubeconfig_for(
        self,
        token: str,
        *,
        name: str | None = None,
        as_user: str | None = None,
        as_groups: Sequence[str] = (),
        server: str | None = None,
        ca_file: Path | None = None,
    ) -> Path:
        """Write a kubeconfig for a token, optionally one that impersonates a user, and return its path.

        `server` and its `ca_file` may lead to the API server by a detour.
        """
        user: Json = {"token": token}
        if as_user is not None:
            user["as"] = as_user
        if as_groups:
            user["as-groups"] = list(as_groups)
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {
                    "name": "tests",
                    "cluster": {
                        "server": server or self.url,
                        "certificate-authority": str(ca_file or self.ca_file),
                    },
                }
            ],
            "users": [{"name": "user", "user": user}],
            "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": "user"}}],
            "current-context": "tests",
        }
        path = self.folder / f"{name or secrets.token_hex(4)}.kubeconfig"
        path.write_text(json.dumps(content, indent=1))
        path.chmod(0o600)
        return path

    def service_account_token(self, namespace: str, name: str, lifetime_s: int = 3600) -> str:
        """Ask the API server for a service account's own token, as the kubelet does for a pod."""
        answer = self.request(
            "POST",
            f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token",
            {
                "apiVersion": "authentication.k8s.io/v1",
                "kind": "TokenRequest",
                "spec": {"expirationSeconds": lifetime_s},
            },
        )
        return str(answer["status"]["token"])

    def service_account_kubeconfig(self, namespace: str, name: str) -> Path:
        """Write a kubeconfig that gives a process exactly the rights of that service account."""
        return self.kubeconfig_for(self.service_account_token(namespace, name), name=f"{namespace}-{name}")

    def issue_certificate(self, name: str, *hosts: str) -> tuple[Path, Path]:
        """Sign a certificate for loopback and `hosts`, of servers and clients; (certificate, key)."""
        folder = self.folder / "pki"
        subprocess.run(
            [self.programs / "kubernetes", "pki", folder, f"{name}={','.join(hosts)}"],
            check=True,
            stdin=subprocess.DEVNULL,
        )
        return folder / f"{name}.crt", folder / f"{name}.key"

    # Asking the API server

    def request(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        *,
        content_type: str = "application/json",
        token: str | None = None,
    ) -> Json:
        """Send one request as admin, or with `token`, and return the answer; raises `RequestRefused`."""
        status, text = self._exchange(
            self.url, method, path, body=body, content_type=content_type, token=token or self.admin.token
        )
        answer: Json = json.loads(text) if text.startswith("{") else {"message": text}
        if status >= 400:
            raise RequestRefused(method, path, status, answer)
        return answer

    def fetch_text(self, url: str, path: str) -> str:
        """GET a path of the API server or of a scheduler as admin."""
        status, text = self._exchange(url, "GET", path, token=self.admin.token)
        if status != 200:
            raise RequestRefused("GET", path, status, {"message": text})
        return text

    def kubectl(self, *arguments: str, stdin: str | None = None, kubeconfig: Path | None = None) -> str:
        """Run kubectl (kustomize included) and return its output; raises `KubectlFailed`."""
        done = subprocess.run(
            [self.programs / "kubernetes", "kubectl", *arguments],
            env=self.kubectl_environment(kubeconfig),
            input=stdin or "",
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise KubectlFailed(
                f"kubectl {' '.join(arguments)}: {done.stderr.strip() or done.stdout.strip()}"
            )
        return done.stdout

    def wait_for_crds(self, *names: str) -> None:
        """Wait until the API server serves these custom resource definitions, without names all there are.

        `kubectl wait` gives up on an object without conditions; it is asked again then.
        """
        which = [f"crd/{name}" for name in names] or ["crd", "--all"]
        for _ in range(_ATTEMPTS_TO_WAIT):
            try:
                self.kubectl("wait", "--for=condition=Established", "--timeout=60s", *which)
            except KubectlFailed as failed:
                if ".status.conditions accessor error" not in str(failed):
                    raise
            else:
                return
        raise KubectlFailed(f"{' '.join(which)}: the API server wrote no conditions")

    def kubectl_environment(self, kubeconfig: Path | None = None) -> dict[str, str]:
        """Return the environment of a kubectl that asks this cluster and uses no files of the user."""
        return {
            **os.environ,
            "KUBECONFIG": str(kubeconfig or self.kubeconfig),
            "KUBECACHEDIR": str(self.folder / "kubectl-cache"),
            "KUBERC": "off",
        }

    # Namespaces

    def create_namespace(self, name: str) -> str:
        """Create a namespace that pods can use at once, and return its name."""
        self.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        with contextlib.suppress(RequestRefused):  # The controller-manager may have been faster.
            self.create_service_account(name, "default")
        return name

    def create_service_account(self, namespace: str, name: str) -> None:
        """Create a service account."""
        self.request("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts", {"metadata": {"name": name}})

    def remove_namespace(self, name: str) -> None:
        """Remove a namespace with all its objects at once, also those waiting for a kubelet or a finalizer.

        Namespace deletion is otherwise the controller-manager's work, and takes it five seconds.
        """
        self.request("DELETE", f"/api/v1/namespaces/{name}")
        for collection in self._namespaced_collections():
            path = f"{collection[0]}/namespaces/{name}/{collection[1]}"
            deleted = self.request("DELETE", f"{path}?gracePeriodSeconds=0&propagationPolicy=Background")
            # Without its namespace an object takes no write, so its controller could never finish it.
            for held in (one for one in deleted.get("items", ()) if one["metadata"].get("finalizers")):
                freed, item = {"metadata": {"finalizers": None}}, f"{path}/{held['metadata']['name']}"
                with contextlib.suppress(RequestRefused):  # it is finished by now
                    self.request("PATCH", item, freed, content_type=MERGE_PATCH)
        with contextlib.suppress(RequestRefused):
            namespace = self.request("GET", f"/api/v1/namespaces/{name}")
            namespace["spec"]["finalizers"] = []
            self.request("PUT", f"/api/v1/namespaces/{name}/finalize", namespace)

    def _namespaced_collections(self) -> Iterator[tuple[str, str]]:
        """Yield (path of the group version, plural) of everything in a namespace that can be deleted at
        once.
        """
        groups = self.request("GET", "/apis")["groups"]
        for path in ["/api/v1", *(f"/apis/{group['preferredVersion']['groupVersion']}" for group in groups)]:
            for resource in self.request("GET", path)["resources"]:
                if resource["namespaced"] and "deletecollection" in resource["verbs"]:
                    yield path, resource["name"]

    # Schedulers

    def add_scheduler(
        self,
        configuration: Mapping[str, Any] | None = None,
        *,
        kubeconfig: Path | None = None,
        flags: Sequence[str] = (),
    ) -> Scheduler:
        """Start one more kube-scheduler and wait until it has synced.

        `configuration` is a KubeSchedulerConfiguration; missing fields are filled in so that a test run
        is quick: no leader election, 5,000 requests/s, back-off of 1 to 2 s. It runs as
        `system:kube-scheduler` unless `kubeconfig` states otherwise. Two with the same configuration race
        each other, as they should in a test.
        """
        name = f"kube-scheduler-{len(self.schedulers)}"
        path = self.folder / f"{name}.json"
        given = dict(configuration or {})
        client = {
            "kubeconfig": str(kubeconfig or self.kubeconfig_for(self._scheduler_identity.token, name=name))
        }
        filled = {
            "apiVersion": "kubescheduler.config.k8s.io/v1",
            "kind": "KubeSchedulerConfiguration",
            "podInitialBackoffSeconds": 1,
            "podMaxBackoffSeconds": 2,
            **given,
            "leaderElection": {"leaderElect": False, **given.get("leaderElection", {})},
            "clientConnection": {"qps": 5000, "burst": 10000, **client, **given.get("clientConnection", {})},
        }
        path.write_text(json.dumps(filled, indent=1))
        reservation, port = reserve_port()
        process = self._start(
            name,
            "kube-scheduler",
            f"--config={path}",
            *self._serving_flags(port, name),
            f"--authentication-kubeconfig={client['kubeconfig']}",
            f"--authorization-kubeconfig={client['kubeconfig']}",
            *flags,
        )
        scheduler = Scheduler(process, path, f"https://127.0.0.1:{port}", self, reservation)
        self.schedulers.append(scheduler)
        scheduler.wait_until_ready()
        return scheduler

    # Starting

    def _start(self, name: str, program: str, *flags: str) -> ServerProcess:
        server = ServerProcess(
            name, [self.programs / "kubernetes", program, *flags], self.logs / f"{name}.log"
        )
        self.servers.append(server)
        return server

    def _start_etcd(self) -> None:
        self._start(
            "etcd",
            "etcd",
            f"--data-dir={self.folder / 'etcd'}",
            f"--socket={self.folder / 'etcd.sock'}",
            # When this process is killed, no other one tidies up.
            f"--remove-at-end={self.folder}",
        )

    def _start_apiserver(self, *, service_account_admission: bool, flags: Sequence[str]) -> None:
        tokens = self.folder / "tokens.csv"
        identities = (self.admin, self._scheduler_identity, self._controller_identity)
        tokens.write_text(
            "".join(f'{i.token},{i.user},{i.user},"{",".join(i.groups)}"\n' for i in identities)
        )
        # Without a kubelet that reports Ready this plugin's taint would stay on every node.
        disabled = ["TaintNodesByCondition"]
        if not service_account_admission:
            disabled.append("ServiceAccount")
        reservation, port = reserve_port()
        self._open_files.callback(reservation.close)
        self.url = f"https://127.0.0.1:{port}"
        signing_key = self.folder / "pki" / "service-account.key"
        self._start(
            "kube-apiserver",
            "kube-apiserver",
            f"--etcd-servers=unix://{self.folder / 'etcd.sock'}",
            *self._serving_flags(port, "kube-apiserver"),
            "--advertise-address=127.0.0.1",
            f"--token-auth-file={tokens}",
            f"--client-ca-file={self.ca_file}",
            "--anonymous-auth=false",
            "--authorization-mode=RBAC",
            f"--service-account-key-file={signing_key}",
            f"--service-account-signing-key-file={signing_key}",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--allow-privileged=true",
            f"--disable-admission-plugins={','.join(disabled)}",
            *flags,
        )
        self.wait_until_ready()

    def _start_controller_manager(self) -> None:
        kubeconfig = self.kubeconfig_for(self._controller_identity.token, name="kube-controller-manager")
        self._start(
            "kube-controller-manager",
            "kube-controller-manager",
            f"--kubeconfig={kubeconfig}",
            "--use-service-account-credentials=true",
            "--leader-elect=false",
            "--secure-port=0",
            f"--root-ca-file={self.ca_file}",
            f"--service-account-private-key-file={self.folder / 'pki' / 'service-account.key'}",
            # A hollow node renews no lease: these two would taint it and evict its pods.
            "--controllers=*,-node-lifecycle-controller,-taint-eviction-controller",
        )

    def _serving_flags(self, port: int, name: str) -> tuple[str, ...]:
        certificate, key = self.folder / "pki" / f"{name}.crt", self.folder / "pki" / f"{name}.key"
        if not certificate.exists():
            certificate, key = self.issue_certificate(name)
        return (
            "--bind-address=127.0.0.1",
            f"--secure-port={port}",
            "--permit-port-sharing=true",
            f"--tls-cert-file={certificate}",
            f"--tls-private-key-file={key}",
        )

    def _is_ready(self, url: str) -> bool:
        try:
            status, _ = self._exchange(url, "GET", "/readyz", token=self.admin.token)
        except (OSError, HTTPException):
            return False
        return status == 200

    def _exchange(
        self,
        url: str,
        method: str,
        path: str,
        *,
        token: str,
        body: Json | None = None,
        content_type: str = "application/json",
    ) -> tuple[int, str]:
        connection = HTTPSConnection(url.removeprefix("https://"), context=self.tls, timeout=60)
        with contextlib.closing(connection):
            headers = {"Authorization": f"Bearer {token}", "Content-Type": content_type}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()


def _scratch_folder() -> Path:
    """Make a folder in memory where possible; its name is short because unix sockets live in it."""
    memory = Path("/dev/shm")
    base = memory if os.access(memory, os.W_OK) else None
    return Path(tempfile.mkdtemp(prefix="kvplace-", dir=base))
