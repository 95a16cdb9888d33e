"""Whether the VM may go on: virt-launcher's pod is handed to virt-handler only once every sidecar is ready.

Asked every few seconds for the life of the pod until it says yes, so it imports as little as it can.
"""

from __future__ import annotations

import socket

from kvplace.core.errors import Misconfigured
from kvplace.hook.pod import placement_of_pod
from kvplace.hook.pod_environment import PodEnvironment


def check_ready(env: PodEnvironment) -> None:
    """Raise Misconfigured unless the hook answers and this pod's placement is there and valid."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        try:
            client.connect(env.socket)
        except OSError as error:
            raise Misconfigured(f"the hook does not answer on {env.socket} yet: {error}") from None
    placement_of_pod(env)
