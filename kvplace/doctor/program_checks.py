"""Checks of the programs and the scheduler: number, readiness, releases and images."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

from kvplace.core.errors import BadBody
from kvplace.core.quantity import counted
from kvplace.core.well_known_names import MARKER_RESOURCE
from kvplace.doctor.installation import (
    AGENT,
    APPLY_AGAIN,
    SCHEDULER,
    SERVE,
    Finding,
    Installation,
    image_of,
    labels_of,
    object_name,
    setting_of_serve,
    some,
    warning,
    wrong,
)
from kvplace.doctor.installation import COMPONENT_LABEL as COMPONENT
from kvplace.kube.object_client import Document, at, condition, items_at

_PULL = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
_CRASH = ("CrashLoopBackOff", "CreateContainerConfigError", "CreateContainerError", "RunContainerError")
_LEASE = "kvplace-scheduler"
_LEASE_S = 60
"""A scheduler that has not renewed its lease for so long is gone; it renews every few seconds."""
_SAMPLE = "percentageOfNodesToScore"
"""Set for a profile, else for all of them."""
_DEFAULT_SCHEDULER = "default-scheduler"


def check_serve(found: Installation) -> Iterator[Finding]:
    """Check that `serve` is there once, and ready."""
    yield from _deployment(found, SERVE, "VMs that opted in are neither admitted nor placed")


def check_scheduler(found: Installation) -> Iterator[Finding]:
    """Check that a scheduler runs under the name in the pods, and that it is configured for our extender."""
    named = setting_of_serve(found, "SCHEDULER_NAME") or "kvplace-scheduler"
    if not found.component("deployments", SCHEDULER):
        if named != _DEFAULT_SCHEDULER:
            yield wrong(
                "Deployment kvplace-scheduler",
                f"it is missing, and pods get the schedulerName {named}: no scheduler uses that name",
                f"{APPLY_AGAIN}, with the component main-scheduler if the main scheduler is to call kvplace",
            )
        return  # the configuration of the cluster's own scheduler is not in the API
    yield from _deployment(found, SCHEDULER, "pods of VMs stay Pending")
    mounted = _mounted_by_scheduler(found)  # kustomize leaves older ConfigMaps behind
    configurations = [
        (object_name(one, "ConfigMap"), configuration)
        for one in found.component("configmaps", SCHEDULER)
        if one["metadata"]["name"] in mounted and (configuration := _configuration(one)) is not None
    ]
    if not configurations:
        yield wrong("ConfigMap of kvplace-scheduler", "no scheduler configuration can be read", APPLY_AGAIN)
    for about, configuration in configurations:
        yield from _of_configuration(about, configuration, named)
    if all(_elects(configuration) for _, configuration in configurations):
        yield from _lease(found)


def check_images(found: Installation) -> Iterator[Finding]:
    """Check that no pod of ours, and no hook sidecar, waits for an image or crashes."""
    for pod in (*found.of("pods"), *found.of("waiting pods")):
        for status in (
            *items_at(pod, "status", "initContainerStatuses"),
            *items_at(pod, "status", "containerStatuses"),
        ):
            waiting = at(status, "state", "waiting") or {}
            reason, message = waiting.get("reason", ""), " ".join((waiting.get("message") or "").split())
            about = f"{object_name(pod, 'Pod')}, container {status.get('name')}"
            if reason in _PULL:
                yield wrong(
                    about,
                    f"its image {status.get('image')} cannot be pulled ({reason}: {message[:200]})",
                    "set newName and newTag under images in your folder's kustomization and apply it again, "
                    "or give the node access to the registry",
                )
            elif reason in _CRASH:
                yield wrong(
                    about,
                    f"it does not run ({reason}: {message[:200]})",
                    f"see `kubectl -n {pod['metadata'].get('namespace')} logs --previous "
                    f"{pod['metadata']['name']} -c {status.get('name')}`",
                )


def check_versions(found: Installation) -> Iterator[Finding]:
    """Check that all programs are of one release, this one included."""
    releases = releases_of(
        found.component("deployments", SERVE),
        found.component("daemonsets", AGENT),
        (setting_of_serve(found, "SIDECAR_IMAGE"),),
    )
    known = {release for release in releases.values() if release}
    if len(known) > 1:
        parts = ", ".join(f"{name} {release}" for name, release in releases.items() if release)
        yield warning("releases", f"the programs are of different releases: {parts}", APPLY_AGAIN)
    elif known and known != {found.client_version}:
        (release,) = known
        yield warning(
            "releases",
            f"this command is of release {found.client_version}, the installation of {release}",
            "use the command of the installation's release",
        )


def releases_of(serve: Iterable[Document], agents: Iterable[Document], hook: Iterable[str]) -> dict[str, str]:
    """Return the releases of `serve`, agent and hook by the tags of their images.

    Several of one program have commas between them; it is an empty text for images with digests alone.
    """
    images = {SERVE: map(image_of, serve), AGENT: map(image_of, agents), "hook": hook}
    named = {name: list(filter(None, each)) for name, each in images.items()}
    return {name: joined(map(release_of, each)) for name, each in named.items() if each}


def joined(releases: Iterable[str]) -> str:
    """Write different releases with commas between them."""
    return ", ".join(sorted(set(filter(None, releases))))


def release_of(image: str) -> str:
    """Return the tag of an image; empty where it has none."""
    path = image.partition("@")[0].rpartition("/")[2]
    return path.partition(":")[2]


def _deployment(found: Installation, component: str, effect: str) -> Iterator[Finding]:
    there = found.component("deployments", component)
    if not there:
        yield wrong(f"Deployment of {component}", f"it is missing: {effect}", APPLY_AGAIN)
    if len(there) > 1:
        names = some(object_name(one, "Deployment") for one in there)
        yield wrong(
            f"Deployments of {component}",
            f"there are {len(there)} installations ({names}), which process the same VMs",
            "delete the unused installation",
        )
    for one in there:
        about = object_name(one, "Deployment")
        kubectl = f"kubectl -n {one['metadata'].get('namespace')}"
        wanted, ready = at(one, "spec", "replicas") or 0, at(one, "status", "readyReplicas") or 0
        if not ready:
            why = condition(one, "ReplicaFailure").get("message") or condition(one, "Available").get(
                "message"
            )
            yield wrong(
                about,
                f"none of its {counted(wanted, 'replica')} is ready ({why or 'no pod is ready'}): {effect}",
                f"see `{kubectl} get pods` and `{kubectl} logs deployment/{one['metadata']['name']}`",
            )
        elif ready < wanted:
            ready_of = f"{ready} of {counted(wanted, 'replica')} ready"
            yield warning(about, ready_of, f"find the pod that is not ready with `{kubectl} get pods`")
        elif wanted == 1:
            yield warning(
                about, "it has one replica: VMs wait while its node is drained", "set spec.replicas to 2"
            )


def _of_configuration(about: str, configuration: Mapping[str, Any], named: str) -> Iterator[Finding]:
    extenders = [
        one
        for one in items_at(configuration, "extenders")
        if any(resource.get("name") == MARKER_RESOURCE for resource in items_at(one, "managedResources"))
    ]
    if not extenders:
        yield wrong(
            about, f"no extender manages {MARKER_RESOURCE}: the scheduler does not call kvplace", APPLY_AGAIN
        )
    for extender in extenders:
        if extender.get("ignorable"):
            yield wrong(about, "ignorable is true: VMs get no cores while kvplace is down", APPLY_AGAIN)
        for verb in ("filterVerb", "bindVerb"):
            if not extender.get(verb):
                yield wrong(about, f"the extender has no {verb}", APPLY_AGAIN)
        if not extender.get("preemptVerb"):
            yield warning(
                about, "the extender has no preemptVerb: evictions may not help the preemptor", APPLY_AGAIN
            )
    profiles = items_at(configuration, "profiles")
    if named not in {one.get("schedulerName") for one in profiles}:
        yield wrong(about, f"no profile has the schedulerName {named}, which pods of VMs get", APPLY_AGAIN)
    elif any(
        one.get(_SAMPLE, configuration.get(_SAMPLE)) != 100
        for one in profiles
        if one.get("schedulerName") == named
    ):
        yield warning(about, f"{_SAMPLE} is not 100: a VM may wait although it fits on a node", APPLY_AGAIN)


def _elects(configuration: Mapping[str, Any]) -> bool:
    """Whether a scheduler takes our Lease: it may have been configured to take another one, or none."""
    election = at(configuration, "leaderElection") or {}
    return election.get("leaderElect") is not False and election.get("resourceName", _LEASE) == _LEASE


def _lease(found: Installation) -> Iterator[Finding]:
    lease = found.named("leases", _LEASE)
    renewed = None if lease is None else at(lease, "spec", "renewTime")
    if renewed is None:
        yield wrong(
            f"Lease {_LEASE}",
            "no scheduler holds it: the pods of VMs are not scheduled",
            "see its log",
        )
        return
    age = found.now - datetime.fromisoformat(str(renewed))
    if age.total_seconds() > _LEASE_S:
        yield wrong(
            f"Lease {_LEASE}",
            f"its holder renewed it {age.total_seconds():.0f} seconds ago: no scheduler is active",
            "read the pods and the log of kvplace-scheduler",
        )


def _mounted_by_scheduler(found: Installation) -> set[object]:
    return {
        at(volume, "configMap", "name")
        for one in found.component("deployments", SCHEDULER)
        for volume in items_at(one, "spec", "template", "spec", "volumes")
    }


def _configuration(document: Document) -> Mapping[str, Any] | None:
    from kvplace.documents.reading import read_value

    for text in (at(document, "data") or {}).values():
        try:
            read = read_value(text, "configuration")
        except BadBody:
            continue
        if isinstance(read, Mapping) and read.get("kind") == "KubeSchedulerConfiguration":
            return read
    return None


def pods_of(found: Installation, component: str) -> Iterator[Document]:
    """Return the pods of one of our programs."""
    return (one for one in found.of("pods") if labels_of(one).get(COMPONENT) == component)
