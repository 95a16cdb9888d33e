"""A virt-launcher pod's main program, as far as a node's agent sees it: libvirt and one VM, until SIGTERM.

`start` is called inside, and leaves a process behind that keeps them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from harness.libvirt_session.cpuset_group import CpusetGroup
from harness.libvirt_session.daemon import PROJECT, LibvirtSession, session_daemon
from harness.libvirt_session.documents import without_its_pod
from kvplace.core.placement import PodPlacement

_FULL_SIZE, _SIZE = b">4294967296<", b">%d<"
_TOUCHED = b"<memoryBacking><allocation mode='immediate'/></memoryBacking><vcpu"


@dataclass(frozen=True)
class Vm:
    """One VM of a pod."""

    cgroup: str
    """The cgroup of its compute container."""
    sidecar: str
    """The cgroup of its hook sidecar, which must not have the VM's CPUs any more."""
    document: str
    """The path of a document that KubeVirt's converter made."""
    megabytes: int
    vmi: str
    """The VMI as JSON."""
    placement: str
    """The pod's annotation `kvplace.io/placement`."""


@dataclass(frozen=True)
class RunningVm:
    """The processes of a VM, and its libvirt."""

    pid: int
    """QEMU's."""
    keeper: int
    """The process that keeps it."""
    uri: str
    """For virsh."""


def start(vm: Vm) -> RunningVm:
    """Start a VM that outlives the call, as KubeVirt does; called inside."""
    reader, writer = os.pipe()
    keeper = os.fork()
    if keeper == 0:
        _keep(vm, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read()
    assert text, "the VM did not start; its reason is above"
    pid, uri = json.loads(text)
    return RunningVm(pid, keeper, uri)


def _keep(vm: Vm, writer: int) -> NoReturn:
    """Run the VM until SIGTERM."""
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        group = CpusetGroup(Path(vm.cgroup), "cpuset.cpus.effective")
        with session_daemon(container=group) as session, session.running(_document(vm, session)) as domain:
            os.write(writer, json.dumps([domain.pid, session.uri]).encode())
            os.close(writer)
            signal.pause()
    finally:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(0)


def _document(vm: Vm, session: LibvirtSession) -> bytes:
    """Let the hook answer as the pod's sidecar, and make its answer start here with all memory touched."""
    folder = session.folder / "sidecar"
    folder.mkdir()
    bound = PodPlacement.from_json(vm.placement)
    (folder / "uid").write_text(bound.pod_uid)
    (folder / "placement").write_text(vm.placement)
    size = _SIZE % (vm.megabytes << 20)
    (folder / "domain.xml").write_bytes(Path(vm.document).read_bytes().replace(_FULL_SIZE, size))
    sidecar = replace(session.pod, group=vm.sidecar)
    command = [sys.executable, "-m", "harness.libvirt_session.hook_in_pod", sidecar.to_json(), vm.vmi]
    answer = subprocess.run(
        [*command, str(folder / "domain.xml")],
        cwd=PROJECT,
        env={"KVPLACE_POD_FOLDER": str(folder), "NODE_NAME": bound.node, "LC_ALL": "C.UTF-8"},
        capture_output=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr.decode()
    return without_its_pod(answer.stdout, session.folder / "run").replace(b"<vcpu", _TOUCHED, 1)
