"""Reads the node of each agent pod, and whether the pod is ready."""

from __future__ import annotations

import msgspec

from kvplace.core.scalars import NodeName, PodUid
from kvplace.kube.api_list_watch import Resource
from kvplace.kube.object_records import AgentPod
from kvplace.kube.session import path_of
from kvplace.kube.watches import AGENT_PODS


class _Meta(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    uid: str
    deletion_timestamp: str | None = None


class _Spec(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    node_name: str = ""


class _Condition(msgspec.Struct, frozen=True, gc=False):
    type: str = ""
    status: str = ""


class _Status(msgspec.Struct, frozen=True, gc=False):
    conditions: tuple[_Condition, ...] | None = None


class _Pod(msgspec.Struct, frozen=True, gc=False):
    metadata: _Meta
    spec: _Spec = _Spec()
    status: _Status = _Status()


def _record(pod: _Pod) -> AgentPod:
    ready = any(one.type == "Ready" and one.status == "True" for one in pod.status.conditions or ())
    is_ready = ready and pod.metadata.deletion_timestamp is None
    return AgentPod(PodUid(pod.metadata.uid), NodeName(pod.spec.node_name), is_ready)


AGENT_POD_RESOURCE = Resource.of(
    AGENT_PODS.name, path_of("api", "v1", "pods"), msgspec.json.Decoder(_Pod), _record
)
