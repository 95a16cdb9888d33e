"""The sidecar's probe: KubeVirt starts the VM only when every sidecar of its pod is ready.

The kubelet runs it in the container again and again until it succeeds, and starting a process there costs
more than the checks. So the probe imports as little as it can, and waits for a while before it reports no.
"""

from __future__ import annotations

import socket
import time

from kvplace.core.errors import KvplaceError, Misconfigured
from kvplace.core.request import OnFailure
from kvplace.hook.pod import on_failure_of_pod, placement_of_pod
from kvplace.hook.pod_environment import PodEnvironment

PATIENCE_S = 10.0
"""How long the probe waits; the kubelet's time limit for it must be longer."""
_PAUSE_S = 0.1
"""Between two checks: a change of a cpuset cannot be awaited."""


def wait_until_ready(env: PodEnvironment, seconds: float = PATIENCE_S) -> None:
    """Return when the VM may start; raises what `check_ready` raised last when `seconds` have passed.

    A VM that may float then starts without a placement of its own, if the hook can report it in its log.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return check_ready(env)
        except KvplaceError:
            if time.monotonic() + _PAUSE_S > deadline:
                if on_failure_of_pod(env) is OnFailure.WAIT:
                    raise
                return _check_listening(env)
        time.sleep(_PAUSE_S)


def check_ready(env: PodEnvironment) -> None:
    """Raise Misconfigured unless the hook listens and this pod's placement is there, valid and in effect."""
    _check_listening(env)
    bound = placement_of_pod(env)
    if bound.enforced and bound.placement.owned:
        from kvplace.hook.bounds import check_protected

        check_protected(bound, env)


def _check_listening(env: PodEnvironment) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        try:
            client.connect(env.socket)
        except OSError as error:
            raise Misconfigured(f"the hook does not listen on {env.socket} yet: {error}") from None
