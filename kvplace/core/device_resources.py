"""Resources of device plugins, counted: which resources they are, and their JSON form `{"intel.com/vf": 1}`.

kube-scheduler counts devices and the kubelet chooses them, so a request states only how many it needs of each
resource.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvplace.core.marks import MARKER_RESOURCE
from kvplace.core.scalars import ResourceName
from kvplace.core.strict_json import shown

MOST_DEVICES = 2**31 - 1
"""Most of one resource: some plugins count other things than devices."""
_MOST_RESOURCES = 64
_OF_KUBERNETES = "kubernetes.io/"
_OF_KUBEVIRT = "devices.kubevirt.io/"
_COUNTERS = frozenset(
    ("kvm", "mshv", "tun", "vhost-net", "vhost-vsock", "sev", "sev-snp", "tdx", "pr-helper")
)
"""Resources of KubeVirt that count users of a file of the whole machine; they are on no NUMA node."""
_NAME = re.compile(
    r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?", re.ASCII
)


def is_device(resource: str) -> bool:
    """Whether a resource of a container may be on a NUMA node: no CPUs, memory, huge pages or counters."""
    if not _NAME.fullmatch(resource) or _OF_KUBERNETES in resource or resource == MARKER_RESOURCE:
        return False
    return resource.removeprefix(_OF_KUBEVIRT) not in _COUNTERS


def write_device_counts(devices: Mapping[ResourceName, int]) -> dict[str, int]:
    """Write counts by resource, in alphabetical order."""
    return {str(resource): count for resource, count in sorted(devices.items())}


def read_device_counts(devices: object, at: str) -> dict[ResourceName, int]:
    """Read counts by resource, without those that are 0; raises ValueError that names the entry."""
    if not isinstance(devices, Mapping):
        raise ValueError(  # noqa: TRY004
            f"{at} is {shown(devices)}; it must be an object of counts by resource such as "
            '{"intel.com/vf": 1}'
        )
    if len(devices) > _MOST_RESOURCES:
        raise ValueError(f"{at} has {len(devices)} resources, more than {_MOST_RESOURCES}")
    counts: dict[ResourceName, int] = {}
    for resource, count in devices.items():
        if not isinstance(resource, str) or not is_device(resource):
            raise ValueError(f"{at}: {shown(resource)} is not the resource of a device, such as intel.com/vf")
        if type(count) is not int or not 0 <= count <= MOST_DEVICES:
            raise ValueError(
                f"{at}[{shown(resource)}] is {shown(count)}; it must be a whole number from 0 to "
                f"{MOST_DEVICES}"
            )
        if count:
            counts[ResourceName(resource)] = count
    return counts
