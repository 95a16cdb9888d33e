"""`kvplace agent`: the component that runs on every node."""

from __future__ import annotations

from pathlib import Path

import click

from kvplace.cli.parameters import Words, process_options

_PATH = click.Path(path_type=Path)


@click.command("agent", short_help="Run the agent of a node.")
@click.option(
    "--node-name",
    required=True,
    envvar="NODE_NAME",
    metavar="NAME",
    help="Node that it runs on; default: NODE_NAME of the environment.",
)
@click.option(
    "--reserved-cpus",
    metavar="LIST",
    help="CPUs that are never given out, such as 0,32; default: the kubelet's reservedSystemCPUs, else the"
    " core of the lowest online CPU.",
)
@click.option(
    "--enforcement",
    type=Words(["auto", "nri", "cgroup", "none", "dra"]),
    default="auto",
    show_default=True,
    help="How containers are kept off the CPUs of others; auto: nri where the container runtime offers"
    " it. none and dra only observe; dra is experimental.",
)
@click.option("--nri-socket", type=_PATH, default="/var/run/nri/nri.sock", show_default=True, metavar="PATH")
@click.option("--kubelet-folder", type=_PATH, default="/var/lib/kubelet", show_default=True, metavar="PATH")
@click.option(
    "--kubelet-config",
    type=_PATH,
    default="/var/lib/kubelet/config.yaml",
    show_default=True,
    metavar="PATH",
    help="Configuration file of the kubelet; may be missing.",
)
@process_options(health_address=":8082")
def command(
    node_name: str,
    reserved_cpus: str | None,
    enforcement: str,
    nri_socket: Path,
    kubelet_folder: Path,
    kubelet_config: Path,
    kubeconfig: Path | None,
    health_address: str,
    log_level: str,
) -> None:
    """Publish the machine of a node, keep the CPUs of its VMs for them, and report what the kernel measures.

    Runs until SIGTERM, once on every node.
    """
    from kvplace.agent.process import run
    from kvplace.agent.this_machine import AgentSettings
    from kvplace.core.cpuset import parse_cpu_list
    from kvplace.core.errors import Misconfigured
    from kvplace.core.node_topology import Enforcement
    from kvplace.core.scalars import NodeName
    from kvplace.service.connections import Address

    for flag, path in (
        ("--nri-socket", nri_socket),
        ("--kubelet-folder", kubelet_folder),
        ("--kubelet-config", kubelet_config),
    ):
        if not path.is_absolute():
            raise Misconfigured(f"{flag} is {path}; write an absolute path")
    try:
        reserved = parse_cpu_list(reserved_cpus or "", what="--reserved-cpus")
    except ValueError as error:
        raise Misconfigured(str(error)) from None
    run(
        AgentSettings(
            node=NodeName(node_name),
            health_address=Address.parse(health_address),
            reserved=reserved or None,
            enforcement=None if enforcement == "auto" else Enforcement(enforcement),
            nri_socket=nri_socket,
            kubelet_folder=kubelet_folder,
            kubelet_config=kubelet_config,
            kubeconfig=kubeconfig,
            log_level=log_level,
        )
    )
