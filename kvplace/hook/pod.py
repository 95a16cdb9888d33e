"""The placement of this pod, the check that it was made for this pod, and the probe that waits for it.

The placement is read from the downward API volume at each call: the annotation arrives with the Binding, and
the kubelet replaces the files when it changes.

KubeVirt starts the VM only when every sidecar of its pod is ready. The kubelet runs the probe in the
container again and again until it succeeds, and starting a process there costs more than the checks. So the
probe imports as little as it can, and waits for a while before it fails.
"""

from __future__ import annotations

import json
import os
import socket
import time

from kvplace.core.errors import KvplaceError, Misconfigured
from kvplace.core.placement import PodPlacement
from kvplace.core.request import OnFailure, Policy
from kvplace.core.scalars import PodUid
from kvplace.core.well_known_names import CPU_MAP, PLACEMENT
from kvplace.hook.process import PodEnvironment

_MAX_FILE_BYTES = 512 * 1024


def placement_of_pod(env: PodEnvironment) -> PodPlacement:
    """Read the pod's placement, or its bare `cpu-map` where another scheduler set only that.

    A pod that gets none, because its VM asks for no cores any more or could not be placed and may float, has
    a floating one.

    Raises Misconfigured when there is neither, and for a placement that cannot be read or was made for
    another pod or node.
    """
    if not os.path.isdir(env.pod_folder):  # noqa: PTH112 - see process
        raise Misconfigured(
            f"{env.pod_folder} is not mounted, so the placement cannot be read; "
            "was kvplace's pod webhook running when this pod was created?"
        )
    if text := _read(env, "placement"):
        placement = PodPlacement.from_json(text)
        _check_owner(placement, env)
        return placement
    if text := _read(env, "cpu-map"):
        return PodPlacement.of_cpu_map(text, on_failure=on_failure_of_pod(env))
    if not _gets_placement(env):
        return PodPlacement.floating(pod_uid=PodUid(_read(env, "uid")), node=env.node)
    raise Misconfigured(
        f"the pod has neither the annotation {PLACEMENT} nor {CPU_MAP} yet; "
        "it must be bound by a scheduler that calls kvplace's extender"
    )


def on_failure_of_pod(env: PodEnvironment) -> OnFailure:
    """Read `on-failure` from the request, else from the placement; `wait` where neither has a valid one."""
    for name in ("request", "placement"):
        try:
            return OnFailure(json.loads(_read(env, name) or "null")["onFailure"])
        except (ValueError, TypeError, KeyError, RecursionError, Misconfigured):
            continue
    return OnFailure.WAIT


def _gets_placement(env: PodEnvironment) -> bool:
    """Whether pod admission has written a request for cores; without one no scheduler is asked for any.

    The file of a pod without one is empty; where it is missing, pod admission has not made the volume.
    """
    text = _read(env, "request")
    if not text:
        return not os.path.exists(f"{env.pod_folder}/request")  # noqa: PTH110 - see process
    try:
        return bool(json.loads(text)["policy"] != Policy.NONE.value)
    except (ValueError, TypeError, KeyError, RecursionError):
        return True


def _check_owner(placement: PodPlacement, env: PodEnvironment) -> None:
    uid = _read(env, "uid")
    if placement.pod_uid != uid:
        raise Misconfigured(
            f"annotation {PLACEMENT}: it was made for the pod with UID {placement.pod_uid!r}, this pod has "
            f"{uid!r}: it was inherited or copied; remove it from the VM's template and restart the VM"
        )
    if env.node and placement.node != env.node:
        raise Misconfigured(
            f"annotation {PLACEMENT}: it was made for node {placement.node!r}, this pod runs on "
            f"{env.node!r}; delete the pod so that it is placed again"
        )


def _read(env: PodEnvironment, name: str) -> str:
    """Read one file of the volume; empty for a missing annotation and for a missing file."""
    path = f"{env.pod_folder}/{name}"
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - see process
            raw = file.read(_MAX_FILE_BYTES + 1)
        if len(raw) > _MAX_FILE_BYTES:
            raise Misconfigured(f"{path} is longer than {_MAX_FILE_BYTES} bytes")
        return raw.decode().strip()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise Misconfigured(f"{path} cannot be read: {error}") from None


PATIENCE_S = 10.0
"""How long the probe waits; the kubelet's time limit for it must be longer."""
_PAUSE_S = 0.1
"""Between two checks: a change of a cpuset cannot be awaited."""


def wait_until_ready(env: PodEnvironment, seconds: float = PATIENCE_S) -> None:
    """Return when the VM may start; raises the last error of `check_ready` when `seconds` have passed.

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
