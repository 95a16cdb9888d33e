"""The hook's container beside a QEMU that runs: what the kubelet mounts into it, and its answers."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from harness.libvirt_session.cpuset_group import CpusetGroup
from harness.libvirt_session.daemon import PROJECT, LibvirtSession
from kvplace.core.placement import Placement, PodPlacement
from kvplace.core.request import OnFailure
from kvplace.core.scalars import NodeName, PodUid

POD_UID = "0f6d8a54-3a0e-4f5b-9d0c-6a5d2c8c1a77"
VMI = json.dumps({"metadata": {"namespace": "games", "name": "arena-7", "uid": "v-7"}})


class Sidecar:
    """The hook's container: what the kubelet mounts into it, and its answers."""

    def __init__(self, session: LibvirtSession, folder: Path, group: CpusetGroup | None = None) -> None:
        """`group` is its cpuset where that is another one than QEMU's, as an agent sets it."""
        self._pod = session.pod if group is None else replace(session.pod, group=str(group.path))
        self._folder = folder
        (folder / "uid").write_text(POD_UID)

    def answer(
        self,
        domain: str,
        placement: Placement,
        on_failure: OnFailure = OnFailure.WAIT,
        *,
        enforced: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Asks for a domain, with this placement on the pod."""
        bound = PodPlacement(PodUid(POD_UID), NodeName("worker-1"), "f00d", on_failure, placement, enforced)
        (self._folder / "placement").write_text(bound.to_json())
        (self._folder / "domain.xml").write_text(domain)
        command = [sys.executable, "-m", "harness.libvirt_session.hook_in_pod"]
        return subprocess.run(
            [*command, self._pod.to_json(), VMI, str(self._folder / "domain.xml")],
            cwd=PROJECT,
            env={"KVPLACE_POD_FOLDER": str(self._folder), "NODE_NAME": "worker-1", "LC_ALL": "C.UTF-8"},
            capture_output=True,
            text=True,
            check=False,
        )
