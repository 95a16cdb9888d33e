"""`kvplace version`: the releases of this command and of the programs in a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kvplace import __version__
from kvplace.cli.cluster_flags import cluster_flags
from kvplace.cli.output import Output, print_document, print_line, say
from kvplace.cli.parameters import Answer, ClusterFlags, output_option

if TYPE_CHECKING:
    from kvplace.doctor.reading import Releases

_OURS = ("client", "serve", "agent", "hook")


@click.command("version", short_help="Show the releases of this command and of a cluster's kvplace.")
@click.option("--client", "client_only", is_flag=True, help="Only this command, without a cluster.")
@cluster_flags(namespaced=False, selector=False)
@output_option(Answer.REPORT)
def command(*, flags: ClusterFlags, client_only: bool, output: Output) -> None:
    """Show the release of this command, of serve, agent and hook in a cluster, of Kubernetes and KubeVirt.

    The release of a program in the cluster is the tag of its image, and `-` for an image with a digest alone.
    """
    found = None if client_only else _of_cluster(flags)
    releases = {"client": __version__, **({} if found is None else found.of)}
    if output.is_document:
        print_document(releases, output)
    else:
        for name, release in releases.items():
            print_line(f"{name:<12}{release or '-'}")
    if found is not None:
        _say_what_is_missing(found)
    ours = {release for name in _OURS for release in releases.get(name, "").split(", ") if release}
    if len(ours) > 1:
        say(f"there are different releases ({', '.join(sorted(ours))}): use one everywhere")


def _say_what_is_missing(found: Releases) -> None:
    """Name each right that is missing once, with the programs that it would show."""
    from kvplace.cli.live_cluster import missing_right

    programs: dict[str, list[str]] = {}
    for name, denied in found.denied.items():
        programs.setdefault(missing_right(denied), []).append(name)
    for sentence, names in programs.items():
        say(f"nothing is known of {' and '.join(names)}: {sentence}")
    if not found.denied and not any(name in found.of for name in _OURS):
        say("neither serve nor the agent was found; `kubectl kvplace doctor` checks the installation")


def _of_cluster(flags: ClusterFlags) -> Releases:
    from kvplace.cli.live_cluster import LiveCluster, run_with_cluster
    from kvplace.doctor.reading import read_releases
    from kvplace.kube.object_client import ObjectReader

    async def body(cluster: LiveCluster) -> Releases:
        return await read_releases(ObjectReader(cluster.session))

    try:
        return run_with_cluster(flags, body)
    except BaseException:
        say(f"this command is of release {__version__}; cluster unreachable:")
        raise
