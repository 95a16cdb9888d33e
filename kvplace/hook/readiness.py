"""The sidecar's probe: KubeVirt starts the VM only when every sidecar of its pod is ready.

The kubelet runs it every second until it succeeds, so it imports as little as it can.
"""

from __future__ import annotations

import socket

from kvplace.core.errors import Misconfigured
from kvplace.hook.pod import placement_of_pod
from kvplace.hook.pod_environment import PodEnvironment


def check_ready(env: PodEnvironment) -> None:
    """Raise Misconfigured unless the hook listens and this pod's placement exists and is valid."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        try:
            client.connect(env.socket)
        except OSError as error:
            raise Misconfigured(f"the hook does not listen on {env.socket} yet: {error}") from None
    placement_of_pod(env)
