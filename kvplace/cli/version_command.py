"""`kvplace version`: the release of this command, and those of what is installed in a cluster."""

from __future__ import annotations

import click

from kvplace import __version__
from kvplace.cli.cluster_flags import ClusterFlags, cluster_flags
from kvplace.cli.output import Answer, Output, output_option, print_document, say


@click.command("version", short_help="Show the releases of this command and of a cluster's kvplace.")
@click.option("--client", "client_only", is_flag=True, help="Only this command; no cluster is asked.")
@cluster_flags(namespaced=False, selector=False)
@output_option(Answer.REPORT)
def command(*, flags: ClusterFlags, client_only: bool, output: Output) -> None:
    """Show the release of this command, of serve, agent and hook in a cluster, of Kubernetes and KubeVirt.

    The releases of our programs are the tags of their images; `-` where one is named by its digest alone.
    """
    releases = {"client": __version__}
    if not client_only:
        releases |= _of_cluster(flags)
    if output.is_document:
        print_document(releases, output)
    else:
        for name, release in releases.items():
            click.echo(f"{name:<12}{release or '-'}")
    ours = {releases[name] for name in ("client", "serve", "agent", "hook") if releases.get(name)}
    if len(ours) > 1:
        say(f"there are different releases ({', '.join(sorted(ours))}): use one everywhere")


def _of_cluster(flags: ClusterFlags) -> dict[str, str]:
    from kvplace.cli.live_cluster import LiveCluster, run_with_cluster
    from kvplace.doctor.reading import read_releases
    from kvplace.kube.object_reader import ObjectReader

    async def body(cluster: LiveCluster) -> dict[str, str]:
        return await read_releases(ObjectReader(cluster.session))

    try:
        return run_with_cluster(flags, body)
    except BaseException:
        say(f"this command is of release {__version__}; about the cluster nothing can be said:")
        raise
