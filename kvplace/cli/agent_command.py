"""`kvplace agent`: the component that runs on every node."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvplace.cli.parameters import Words, process_options, read_cpus
from kvplace.core.errors import Misconfigured

if TYPE_CHECKING:
    from kvplace.core.node_topology import Enforcement

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _path_option(
    name: str,
    default: str,
    help: str | None = None,  # noqa: A002
) -> Callable[[_Function], _Function]:
    def absolute(_context: click.Context, option: click.Parameter, path: Path) -> Path:
        if not path.is_absolute():
            raise Misconfigured(f"{option.opts[0]} is {path}; write an absolute path")
        return path

    return click.option(
        name,
        type=click.Path(path_type=Path),
        default=default,
        show_default=True,
        metavar="PATH",
        callback=absolute,
        help=help,
    )


def _read_enforcement(_context: click.Context, _option: click.Parameter, word: str) -> Enforcement | None:
    from kvplace.core.node_topology import Enforcement

    return None if word == "auto" else Enforcement(word)


@click.command("agent", short_help="Run the agent of a node.")
@click.option(
    "--node-name",
    "node",
    required=True,
    envvar="NODE_NAME",
    metavar="NAME",
    help="Node that it runs on; default: NODE_NAME of the environment.",
)
@click.option(
    "--reserved-cpus",
    "reserved",
    metavar="LIST",
    callback=lambda _context, _option, text: read_cpus(text or "", "--reserved-cpus") or None,
    help="CPUs that are never given out, such as 0,32; default: the kubelet's reservedSystemCPUs, else the"
    " core of the lowest online CPU.",
)
@click.option(
    "--enforcement",
    type=Words(["auto", "nri", "cgroup", "none", "dra"]),
    default="auto",
    show_default=True,
    callback=_read_enforcement,
    help="How containers are kept off the CPUs of others; auto: nri where the container runtime offers"
    " it. none and dra only observe; dra is experimental.",
)
@_path_option("--nri-socket", "/var/run/nri/nri.sock")
@_path_option("--kubelet-folder", "/var/lib/kubelet")
@_path_option(
    "--kubelet-config", "/var/lib/kubelet/config.yaml", "Configuration file of the kubelet; may be missing."
)
@process_options(health_address=":8082")
def command(**settings: Any) -> None:
    """Publish the machine of a node, keep the CPUs of its VMs for them, and report the kernel's measurements.

    Runs until SIGTERM, once on every node.
    """
    from kvplace.agent.process import run
    from kvplace.agent.this_machine import AgentSettings

    run(AgentSettings(**settings))
