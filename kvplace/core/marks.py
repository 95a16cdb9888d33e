"""Names of kvplace in Kubernetes objects, other than the annotations of requests and results."""

from __future__ import annotations

from enum import StrEnum

PLACED_LABEL = "kvplace.io/placed"
"""Label, value `true`, of every pod that pod admission wrote a request on; watches select by it."""
ASKS_LABEL = "kvplace.io/asks"
"""Label, value `true`, of a VMI created with options: admission sees every change of them and of its size."""
FRONT_END_LABEL = "kvplace.io/front-end"
"""Label, value `plugin`, of a VMI and its pods: a Plugin of KubeVirt calls the hook, not the annotation."""
PLUGIN_SOCKET = "/var/run/kubevirt-plugin/kvplace/hook.sock"
"""Socket of the hook that our Plugin calls (manifests/plugin), in a virt-launcher pod."""
EDITED_LABEL = "kvplace.io/edited"
"""Label, value `true`, of a VMI with a request that was edited while it ran; watches select by it."""
PINNED = "kvplace.io/Pinned"
"""Pod condition by the agent: True after the affinity of every thread has been read back as placed."""
NO_LONGER_RUNNING = "NotRunning"
"""Reason of the condition Pinned: it was True, and the threads have ended."""
MARKER_RESOURCE = "kvplace.io/vm"
"""Extended resource that no node offers; `managedResources` of the extender's configuration names it."""
RELEASED_AT = "kvplace.io/released-at"
"""Node annotation; its change makes kube-scheduler try waiting pods again."""
ROLLOUT_LABEL = "kvplace.io/rollout"
"""Label of every VM, VMI and pod of a rollout, and of the ConfigMap with its document: the rollout's name."""


class FrontEnd(StrEnum):
    """How KubeVirt comes to call the hook of a VM."""

    ANNOTATION = "annotation"
    PLUGIN = "plugin"
