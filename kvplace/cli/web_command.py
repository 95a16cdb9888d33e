"""`kvplace web`: the map of a live cluster in a browser, from this machine and with the user's own rights."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import click

from kvplace.cli.cluster_flags import ClusterFlags, cluster_flags
from kvplace.cli.output import say

if TYPE_CHECKING:
    from kvplace.cli.live_cluster import LiveCluster

_OPENING_FILE = """<!doctype html>
<meta charset="utf-8"><meta name="referrer" content="no-referrer">
<meta http-equiv="refresh" content="0; url={url}">
<title>kvplace</title><a href="{url}">the web map</a>
"""


@click.command("web", short_help="Show a live cluster in a browser.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    metavar="NUMBER",
    help="Port on 127.0.0.1 (default: a free one).",
)
@click.option("--no-browser", is_flag=True, help="Only print the URL.")
@click.option(
    "--no-token",
    is_flag=True,
    help="Let all users of this machine read the map; for a pod with an authenticating proxy.",
)
@click.option(
    "--cluster-name", metavar="NAME", help="Name on the pages (default: the context of the kubeconfig)."
)
@cluster_flags(namespaced=False, selector=False)
def command(
    *, port: int, no_browser: bool, no_token: bool, cluster_name: str | None, flags: ClusterFlags
) -> None:
    """Show the cluster in a browser: its nodes, core maps and VMs.

    Serves the pages on 127.0.0.1 until Ctrl-C, prints their URL on stderr and opens it. Only clients with
    this URL can read the pages: keep it to yourself. The pages show the objects that you may read, and
    change nothing; they need the rights of the ClusterRole kvplace-viewer.
    """
    import asyncio

    from kvplace.service.process import kvplace_error_in
    from kvplace.web.application import MapSettings, web_map

    async def serve(live: LiveCluster) -> None:
        await _check_rights(live)
        name = _context_name(flags) if cluster_name is None else cluster_name
        settings = MapSettings(port, cluster_name=name)
        if no_token:
            settings = MapSettings(port, secret="", cluster_name=name)
        try:
            async with web_map(live.api, settings) as url:
                say(f"the map of {live.session.server} is at {url} until Ctrl-C")
                with contextlib.ExitStack() as opened:
                    if not no_browser:
                        opened.enter_context(await asyncio.to_thread(in_browser, url))
                    await asyncio.get_running_loop().create_future()
        except BaseExceptionGroup as group:
            raise kvplace_error_in(group) or group from group

    flags.run(serve)


def in_browser(url: str) -> contextlib.AbstractContextManager[object]:
    """Open a URL in the user's browser; the context holds the file that leads the browser there.

    A browser is started with a file that only this user can read. Other users can read the arguments of its
    process, and the URL among them would give the map away.
    """
    import tempfile
    import webbrowser
    from pathlib import Path

    folder = tempfile.TemporaryDirectory(prefix="kvplace-web-")
    file = Path(folder.name, "map.html")
    file.write_text(_OPENING_FILE.format(url=url), encoding="ascii")
    if not has_screen() or not webbrowser.open(file.as_uri()):
        say("no browser was found; open the URL yourself")
    return folder


def has_screen() -> bool:
    """Return whether a browser would have a window; a text browser would take the terminal instead."""
    import os
    import sys

    named = ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY")
    return sys.platform != "linux" or any(os.environ.get(name) for name in named)


async def _check_rights(live: LiveCluster) -> None:
    """Read one object of each kind; without the right, a watch would retry without end."""
    from kvplace.kube.api_cluster import ApiCluster
    from kvplace.kube.watches import LEDGERS, NODES, PLACED_PODS, PODS, TOPOLOGIES

    cluster = ApiCluster(live.session, page_size=1)
    await cluster.list_watch(LEDGERS).list_page("")
    await cluster.list_watch(TOPOLOGIES).list_page("")
    await cluster.list_watch(NODES).list_page("")
    await cluster.list_watch(PODS, PLACED_PODS).list_page("")


def _context_name(flags: ClusterFlags) -> str:
    """Name the context that was opened; empty in a pod, which has none."""
    from kvplace.kube.kubeconfig import kubeconfig_files, read_context

    files = kubeconfig_files(flags.kubeconfig)
    return "" if files is None else read_context(files, flags.context).name
