"""KubeVirt in the tests' cluster: its CRDs, roles and CR, its admission and its virt-controller.

All of it is KubeVirt's own code and KubeVirt's own objects, and its two processes have the rights of the
service accounts that KubeVirt gives them. There is no virt-operator (the tests install), no virt-handler
(a VMI stays Scheduled) and no subresource API (`virtctl start` does not work: write `spec.runStrategy`).
"""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from harness.control_plane.cluster import MERGE_PATCH, SERVER_SIDE_APPLY, ControlPlane, RequestRefused
from harness.control_plane.server_process import ServerProcess
from harness.control_plane.watching import is_gone, watch
from harness.waiting import PATIENCE_S

Json = dict[str, Any]

NAMESPACE = "kubevirt"
FEATURE_GATES = ("Sidecar", "CPUManager", "NUMA")

_PLUGINS_CRD = "plugins.plugin.kubevirt.io"
_ONE_DAY_S = 86_400
"""Longer than kvplace pauses between two searches: a first try may come before a VM can migrate."""


class KubeVirt:
    """KubeVirt installed and running in one control plane; use it as a context manager, or call `stop`."""

    def __init__(
        self,
        plane: ControlPlane,
        programs: Path,
        *,
        feature_gates: Sequence[str] = FEATURE_GATES,
        configuration: Json | None = None,
        admission: bool = True,
        plugins_crd: bool = False,
    ) -> None:
        """Install KubeVirt, start it, and wait until it answers for VMs.

        Args:
            plane: where to.
            programs: the folder with the built programs.
            feature_gates: `developerConfiguration.featureGates` of the KubeVirt CR.
            configuration: more of the CR's `spec.configuration`.
            admission: whether KubeVirt's webhooks are there; without them objects stay as they are sent,
                and a VMI lacks its defaults.
            plugins_crd: install the CRD of KubeVirt's Plugins, the successor of hook sidecars, too.
        """
        self.plane = plane
        self._programs = programs
        self._configuration_paths: list[str] = []
        self.servers: list[ServerProcess] = []
        try:
            installed = installation(self._programs)
            plane.create_namespace(NAMESPACE)
            for rule in installed["rbac"]:
                self._create(rule)
            crds = [
                crd for crd in installed["crds"] if crd["metadata"]["name"] != _PLUGINS_CRD or plugins_crd
            ]
            # It initialises for seconds; meanwhile the CRDs that it waits for are created.
            announcement = self._start_admission() if admission else None
            for crd in crds:
                self._create({key: value for key, value in crd.items() if key != "status"})
            for crd in crds:
                self._wait_until_served(crd)
            self.configure(feature_gates, configuration or {})
            self.virt_controller = self._start_virt_controller()
            if announcement is not None:
                self._register_admission(announcement)
            self.virt_controller.wait_until(self._leads, "lease")
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End KubeVirt's processes and unregister its admission; its objects stay. May be called twice."""
        while self._configuration_paths:
            with contextlib.suppress(RequestRefused, OSError):
                self.plane.request("DELETE", self._configuration_paths[-1])
            self._configuration_paths.pop()
        for server in self.servers:
            server.close_input()
        for server in self.servers:
            server.stop()

    def create(self, kind: str, namespace: str, manifest: Json) -> Json:
        """Create a VM, VMI or migration by its plural (`virtualmachines`) and return the stored object."""
        path = f"/apis/kubevirt.io/v1/namespaces/{namespace}/{kind}"
        return self.plane.request("POST", path, {"apiVersion": "kubevirt.io/v1", **manifest})

    def launcher_pod(self, namespace: str, vmi: str, other_than: str = "") -> Json:
        """Wait for the virt-launcher pod of a VMI, or for another one than that with a UID.

        Raises `TimeoutError` when there is none after 120 s.
        """
        pods = f"/api/v1/namespaces/{namespace}/pods?labelSelector=vm.kubevirt.io/name={vmi}"
        return self.first(pods, lambda pod: bool(pod["metadata"]["uid"] != other_than))

    def vmi_in_phase(self, namespace: str, name: str, phase: str) -> Json:
        """Wait until a VMI is in a phase; raises `TimeoutError` when it is not after 120 s."""
        vmis = f"/apis/kubevirt.io/v1/namespaces/{namespace}/virtualmachineinstances"
        return self.first(
            f"{vmis}?fieldSelector=metadata.name={name}",
            lambda vmi: bool(vmi.get("status", {}).get("phase") == phase),
        )

    def gone(self, kind: str, namespace: str, name: str) -> None:
        """Wait until an object is gone for good; raises `ServerDied` when it is still there after 120 s."""
        collection = f"/apis/kubevirt.io/v1/namespaces/{namespace}/{kind}"
        self.virt_controller.wait_until(
            lambda: is_gone(self.plane, collection, name), f"end of {kind} {namespace}/{name}"
        )

    def migrations_ended(self) -> None:
        """Wait until no migration of the cluster is unfinished; kvplace begins no other one before."""
        path = "/apis/kubevirt.io/v1/virtualmachineinstancemigrations"

        def have_ended() -> bool:
            found = self.plane.request("GET", path)["items"]
            phases = {one.get("status", {}).get("phase") for one in found}
            return phases <= {"Failed", "Succeeded"}

        self.virt_controller.wait_until(have_ended, "end of all migrations")

    def first(self, path: str, is_wanted: Callable[[Json], bool]) -> Json:
        """Wait for an object of a list that is as wanted; raises `TimeoutError` when none is after 120 s."""
        last: Json = {}
        with watch(self.plane, path) as events, contextlib.suppress(TimeoutError):
            for event in events:
                last = event["object"]
                if event["type"] != "DELETED" and is_wanted(last):
                    return last
        raise TimeoutError(
            f"waited {PATIENCE_S:.0f} s on {path}; last seen: {json.dumps(last.get('status', last))}\n"
            f"virt-controller reported:\n{self.virt_controller.log_tail()}"
        )

    def configure(
        self, feature_gates: Sequence[str] = FEATURE_GATES, configuration: Json | None = None
    ) -> None:
        """Write the KubeVirt CR; running processes take a change up within moments, without a signal."""
        given = configuration or {}
        development = {**given.get("developerConfiguration", {}), "featureGates": list(feature_gates)}
        path = f"/apis/kubevirt.io/v1/namespaces/{NAMESPACE}/kubevirts/kubevirt"
        self.plane.request(
            "PATCH",
            f"{path}?fieldManager=virt-operator&force=true",
            {
                "apiVersion": "kubevirt.io/v1",
                "kind": "KubeVirt",
                "metadata": {"name": "kubevirt"},
                "spec": {"configuration": {**given, "developerConfiguration": development}},
            },
            content_type=SERVER_SIDE_APPLY,
        )
        # virt-operator's word that KubeVirt is there; its processes do not believe in it before.
        status = {"phase": "Deployed", "defaultArchitecture": "amd64"}
        self.plane.request("PATCH", f"{path}/status", {"status": status}, content_type=MERGE_PATCH)

    # Installing

    def _create(self, manifest: Json) -> None:
        path = _collection(manifest)
        try:
            self.plane.request("POST", path, manifest)
        except RequestRefused as refused:
            # KubeVirt may have been here before, with the same objects.
            if refused.status != 409:
                raise

    def _wait_until_served(self, crd: Json) -> None:
        spec = crd["spec"]
        wanted = spec["names"]["plural"]
        versions = (version["name"] for version in spec["versions"] if version["served"])
        paths = [f"/apis/{spec['group']}/{version}" for version in versions]

        def is_served() -> bool:
            try:
                return all(
                    wanted in (resource["name"] for resource in self.plane.request("GET", path)["resources"])
                    for path in paths
                )
            except RequestRefused as refused:
                if refused.status != 404:
                    raise
                return False

        api_server = next(server for server in self.plane.servers if server.name == "kube-apiserver")
        api_server.wait_until(is_served, crd["metadata"]["name"])

    # Starting

    def _start(self, name: str, program: str, *flags: str, **environment: str) -> ServerProcess:
        server = ServerProcess(
            name, [self._programs / program, *flags], self.plane.logs / f"{name}.log", environment
        )
        self.servers.append(server)
        return server

    def _kubeconfig(self, account: str) -> Path:
        token = self.plane.service_account_token(NAMESPACE, account, lifetime_s=_ONE_DAY_S)
        return self.plane.kubeconfig_for(token, name=account)

    def _start_virt_controller(self) -> ServerProcess:
        return self._start(
            "virt-controller",
            "virt-controller",
            f"--kubeconfig={self._kubeconfig('kubevirt-controller')}",
            "--launcher-image=kubevirt.test/virt-launcher",
            "--exporter-image=kubevirt.test/virt-exportserver",
            # Its metrics need certificates that do not exist here, so no test reads them.
            "--listen=127.0.0.1",
            "--port=0",
            # It ends when it has lost its lease; a test pauses it, and a busy machine may, too.
            "--leader-elect-lease-duration=1h",
            "--leader-elect-renew-deadline=30m",
            SIDECAR_SHIM_IMAGE="kubevirt.test/sidecar-shim",
        )

    def _leads(self) -> bool:
        path = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/virt-controller"
        try:
            return bool(self.plane.request("GET", path)["spec"].get("holderIdentity"))
        except RequestRefused as refused:
            if refused.status != 404:
                raise
            return False

    def _start_admission(self) -> Path:
        announcement = self.plane.folder / "kubevirt-admission.json"
        announcement.unlink(missing_ok=True)
        self.admission = self._start(
            "kubevirt-admission",
            "webhooks",
            f"-kubeconfig={self._kubeconfig('kubevirt-apiserver')}",
            f"-namespace={NAMESPACE}",
            f"-announce={announcement}",
        )
        return announcement

    def _register_admission(self, announcement: Path) -> None:
        self.admission.wait_until(announcement.exists, "handlers")
        for configuration in json.loads(announcement.read_text()):
            path = f"{_collection(configuration)}/{configuration['metadata']['name']}"
            self._configuration_paths.append(path)
            self._create(configuration)


def installation(programs: Path) -> Json:
    """Return the objects that virt-operator creates: `crds`, and `rbac` (accounts, roles, bindings)."""
    printed = subprocess.run(
        [programs / "installation", "-namespace", NAMESPACE],
        check=True,
        capture_output=True,
        stdin=subprocess.DEVNULL,
    )
    installed: Json = json.loads(printed.stdout)
    return installed


def _collection(manifest: Json) -> str:
    group = manifest["apiVersion"]
    start = f"/apis/{group}" if "/" in group else f"/api/{group}"
    namespace = manifest["metadata"].get("namespace")
    plural = f"{manifest['kind'].lower()}s"
    return f"{start}/namespaces/{namespace}/{plural}" if namespace else f"{start}/{plural}"
