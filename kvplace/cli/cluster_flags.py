"""The flags of kubectl that choose a cluster, and the objects there.

Only click is imported here; `live_cluster` opens what the flags name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvplace.cli.cluster_names import complete_context, complete_namespace

if TYPE_CHECKING:
    from kvplace.core.label_terms import LabelTerms

_Function = TypeVar("_Function", bound=Callable[..., Any])


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

    @property
    def are_given(self) -> bool:
        """Whether the user named any of them, and so asked for a cluster."""
        return self != ClusterFlags()


def cluster_flags(
    *, namespaced: bool = True, everywhere: bool = True, selector: bool = True
) -> Callable[[_Function], _Function]:
    """Add kubectl's flags to a command, as its argument `flags`, a ClusterFlags.

    `namespaced` adds -n, `everywhere` also -A, `selector` adds -l.
    """
    chosen = [
        *_CLUSTER,
        *(_NAMESPACED if namespaced else ()),
        *(_EVERYWHERE if namespaced and everywhere else ()),
        *(_SELECTOR if selector else ()),
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


def _read_selector(_context: click.Context, _option: click.Parameter, text: str | None) -> LabelTerms:
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
    click.option("--as-group", "as_groups", metavar="GROUP", multiple=True, help="And as of this group."),
)
_NAMESPACED = (
    click.option(
        "-n",
        "--namespace",
        metavar="NAME",
        callback=_read_namespace,
        shell_complete=complete_namespace,
        help="Default: that of the context, else default.",
    ),
)
_EVERYWHERE = (click.option("-A", "--all-namespaces", is_flag=True, help="All namespaces."),)
_SELECTOR = (
    click.option(
        "-l",
        "--selector",
        metavar="LABELS",
        callback=_read_selector,
        help="Only objects with these labels, for example app=web,tier!=db.",
    ),
)
FLAG_NAMES = tuple(field.name for field in fields(ClusterFlags))
"""The arguments of a command that are its flags."""
