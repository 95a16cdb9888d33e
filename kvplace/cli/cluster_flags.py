"""The flags of kubectl that choose a cluster, and the objects there; and names for the completion of words.

Only click is imported here; `live_cluster` opens the cluster that the flags name. For completion one short
request reads the metadata of a bounded number of objects, with the flags that stand on the line already.
Where no cluster answers in time nothing is offered, and nothing is printed: a shell waits while a user types.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from kvplace.cli.parameters import complete_machine
from kvplace.core.errors import KvplaceError, Misconfigured
from kvplace.core.well_known_names import PLACED_LABEL, ROLLOUT_LABEL

if TYPE_CHECKING:
    from kvplace.cli.live_cluster import LiveCluster
    from kvplace.core.label_terms import LabelTerms

_LONGEST_WAIT_S = 2.0
_MOST_NAMES = 500
_VMI = "VirtualMachineInstance"
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class ClusterFlags:
    """The user's choice; None and empty values stand for kubectl's defaults."""

    kubeconfig: str | None = None
    context: str | None = None
    request_timeout: float | None = None
    """Seconds for one answer of the API server."""
    as_user: str | None = None
    as_groups: tuple[str, ...] = ()
    namespace: str | None = None
    all_namespaces: bool = False
    selector: LabelTerms = ()

    def run(self, body: Callable[[LiveCluster], Awaitable[_Answer]]) -> _Answer:
        """Open the cluster, await the body with it and close it again, also after SIGINT and SIGTERM."""
        from kvplace.cli.live_cluster import run_until_interrupt

        async def run() -> _Answer:
            async with self.open() as cluster:
                return await body(cluster)

        return run_until_interrupt(run())

    def open(self) -> AbstractAsyncContextManager[LiveCluster]:
        """Open the cluster while a block runs; raises Misconfigured for flags that exclude each other."""
        from kvplace.cli.live_cluster import open_cluster
        from kvplace.kube.credentials import CredentialOptions

        if self.all_namespaces and self.namespace is not None:
            raise Misconfigured("-n and -A exclude each other: name one namespace, or ask for all")
        if self.as_groups and self.as_user is None:
            raise Misconfigured("--as-group needs --as: a group is impersonated together with a user")
        return open_cluster(
            CredentialOptions(self.kubeconfig, self.context, user=self.as_user, groups=self.as_groups),
            timeout_s=self.request_timeout,
            namespace="" if self.all_namespaces else self.namespace,
            label_terms=self.selector,
        )

    @property
    def are_given(self) -> bool:
        """Whether the user named any of them, and so asked for a cluster."""
        return self != ClusterFlags()


FLAG_NAMES = tuple(field.name for field in fields(ClusterFlags))
"""The arguments of a command that are its flags."""


def complete_node(context: click.Context, _argument: click.Parameter, begun: str) -> list[CompletionItem]:
    """Complete the name of a node."""
    return _items([each["name"] for each in _metadata(context, "nodes")], begun)


def complete_namespace(
    context: click.Context, _argument: click.Parameter, begun: str
) -> list[CompletionItem]:
    """Complete the name of a namespace."""
    return _items([each["name"] for each in _metadata(context, "namespaces")], begun)


def complete_rollout(context: click.Context, _argument: click.Parameter, begun: str) -> list[CompletionItem]:
    """Complete the name of a rollout."""
    documents = _metadata(context, "configmaps", ROLLOUT_LABEL)
    return _items([each["labels"][ROLLOUT_LABEL] for each in documents], begun)


def complete_context(context: click.Context, _argument: click.Parameter, begun: str) -> list[CompletionItem]:
    """Complete the name of a context, from the kubeconfig and without a cluster."""
    from kvplace.kube.kubeconfig import context_names, kubeconfig_files

    files = kubeconfig_files(context.params.get("kubeconfig"))
    try:
        return _items([] if files is None else list(context_names(files)), begun)
    except KvplaceError:
        return []


def complete_drawn(context: click.Context, argument: click.Parameter, begun: str) -> list[CompletionItem]:
    """Complete a machine that can be drawn: a server type or file, else a node of the cluster."""
    found = complete_machine(context, argument, begun)
    asks = any(context.params.get(name) for name in ("live", *FLAG_NAMES))
    if asks or (begun and all(item.type != "plain" for item in found)):
        found += complete_node(context, argument, begun)
    return found


def complete_vm(context: click.Context, _argument: click.Parameter, begun: str) -> list[CompletionItem]:
    """Complete the name of a VM, or plain pod, with a request for cores."""
    return _items([name for _, name in _vms(context)], begun)


def complete_target(context: click.Context, _argument: click.Parameter, begun: str) -> list[CompletionItem]:
    """Complete vmi/NAME and pod/NAME; vm/NAME or the NAME of a VM where a user began so, and `vm NAME`."""
    words = context.params.get("words") or ("",)
    if "/" in words[0] or len(words) > 1:
        return []
    found = _vms(context)
    if words[0]:
        is_pod = words[0].startswith("po")
        return _items([name for kind, name in found if (kind != _VMI) == is_pod], begun)
    vm = "vm" if begun.startswith("vm/") else "vmi"
    bare = [name for kind, name in found if kind == _VMI] if begun else []
    return _items([*bare, *(f"{vm if kind == _VMI else 'pod'}/{name}" for kind, name in found)], begun)


def _items(names: list[str], begun: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in sorted(set(names)) if name.startswith(begun)]


def _vms(context: click.Context) -> list[tuple[str, str]]:
    """List the VMs by the VMIs of their pods, and plain pods."""
    found = []
    for pod in _metadata(context, "pods", f"{PLACED_LABEL}=true"):
        owners = [owner["name"] for owner in pod.get("ownerReferences", ()) if owner["kind"] == _VMI]
        found.append((_VMI, owners[0]) if owners else ("Pod", pod["name"]))
    return found


def _metadata(context: click.Context, resource: str, selector: str = "") -> list[Mapping[str, Any]]:
    """List metadata from the cluster that the flags on the line name; with a selector in one namespace.

    Empty when the cluster does not answer in time.
    """
    import asyncio

    from kvplace.cli.live_cluster import run_until_interrupt
    from kvplace.core.strict_json import json_object
    from kvplace.kube.calls import METADATA_LIST, ApiCall
    from kvplace.kube.watches import ApiKind

    flags = ClusterFlags(**{name: context.params[name] for name in FLAG_NAMES if context.params.get(name)})
    query = {"limit": str(_MOST_NAMES)} | ({"labelSelector": selector} if selector else {})

    async def answer() -> bytes:
        async with flags.open() as live:
            path = ApiKind(resource).path(namespace=live.namespace if selector else "")
            call = ApiCall("list", resource, path, query=query, accept=METADATA_LIST)
            return await live.session.request(call, limit=1 << 24)

    try:
        text = run_until_interrupt(asyncio.wait_for(answer(), _LONGEST_WAIT_S))
    except (KvplaceError, TimeoutError):
        return []
    return [each["metadata"] for each in json_object(text.decode(), what="names")["items"]]


_Function = TypeVar("_Function", bound=Callable[..., Any])


def cluster_flags(
    *, namespaced: bool = True, everywhere: bool = True, selector: bool = True
) -> Callable[[_Function], _Function]:
    """Add kubectl's flags to a command, as its argument `flags`, a ClusterFlags.

    `namespaced` adds -n, `everywhere` also -A, `selector` adds -l.
    """
    chosen = [
        *_CLUSTER,
        *((_NAMESPACE,) if namespaced else ()),
        *((_EVERYWHERE,) if namespaced and everywhere else ()),
        *((_SELECTOR,) if selector else ()),
    ]

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def command(**arguments: Any) -> Any:
            given = {name: arguments.pop(name) for name in FLAG_NAMES if name in arguments}
            return function(flags=ClusterFlags(**given), **arguments)

        for option in reversed(chosen):
            option(command)
        return command  # type: ignore[return-value]

    return decorate


def read_selector(_context: click.Context, _option: click.Parameter, text: str | None) -> LabelTerms:
    """Read the value of a flag for a label selector."""
    if text is None:
        return ()
    from kvplace.core.label_terms import read_label_terms

    return read_label_terms(text)


def _read_namespace(_context: click.Context, _option: click.Parameter, name: str | None) -> str | None:
    if name is not None and not name:
        raise click.BadParameter("is empty; name a namespace")
    return name


def _read_seconds(_context: click.Context, _option: click.Parameter, text: str | None) -> float | None:
    """Read a duration as kubectl writes it: 0 for none, else a number with or without ms, s, m or h."""
    if text is None or text == "0":
        return None
    number = text.rstrip("hms")
    factor = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0}.get(text[len(number) :])
    try:
        seconds = float(number) * (factor or 0)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise click.BadParameter(f"{text!r} is not a duration such as 10s, 500ms or 2m")
    return seconds


_CLUSTER = (
    click.option(
        "--kubeconfig", type=click.Path(), metavar="FILE", help="Default: KUBECONFIG, else ~/.kube/config."
    ),
    click.option(
        "--context",
        metavar="NAME",
        shell_complete=complete_context,
        help="Context of the kubeconfig (default: the current one).",
    ),
    click.option(
        "--request-timeout",
        metavar="TIME",
        callback=_read_seconds,
        help="Longest wait for one answer of the API server, for example 30s.",
    ),
    click.option("--as", "as_user", metavar="USER", help="Act as this user, if you may."),
    click.option(
        "--as-group", "as_groups", metavar="GROUP", multiple=True, help="Act as a member of this group, too."
    ),
)
_NAMESPACE = click.option(
    "-n",
    "--namespace",
    metavar="NAME",
    callback=_read_namespace,
    shell_complete=complete_namespace,
    help="Default: the namespace of the context, else default.",
)
_EVERYWHERE = click.option("-A", "--all-namespaces", is_flag=True, help="All namespaces.")
_SELECTOR = click.option(
    "-l",
    "--selector",
    metavar="LABELS",
    callback=read_selector,
    help="Only objects with these labels, for example app=web,tier!=db.",
)
