"""Opens a cluster for a command, and runs the command until it ends or is interrupted.

Errors are one sentence. A missing right is named together with its role. A cluster without kvplace, or with
another version of its objects, gets another error than a cluster that does not answer.

While commands watch, an outage of the API server is reported in one sentence. Each watch logs each failed
attempt, as a service needs it; a person gets one message, and another one when the outage lasts.

SIGINT and SIGTERM act only between two steps. `asyncio.run` cancels in the signal handler itself, between
any two instructions of the program. Where that is within a library's callback, the connection breaks under
the clean-up that the cancellation is to run. A signal cancels the command, or calls the action of
`on_interrupt` while its block runs. A second one ends the program at once. A signal that is ignored, as a
shell does for background jobs, stays ignored.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import click

from kvplace import __version__
from kvplace.cli.output import say
from kvplace.core.errors import Absent, Forbidden, KvplaceError, Unavailable
from kvplace.core.label_terms import LabelTerms
from kvplace.core.node_topology import GROUP, VERSION
from kvplace.core.strict_json import json_object
from kvplace.kube import list_watch
from kvplace.kube.api_cluster import ApiCluster
from kvplace.kube.api_errors import ApiUnavailable, Denied, Expired, NotFound, Unauthenticated, unanswered
from kvplace.kube.calls import ApiCall
from kvplace.kube.credentials import CredentialOptions
from kvplace.kube.object_client import ObjectClient
from kvplace.kube.session import Limits, Session, open_session
from kvplace.kube.watches import PLACED_PODS, Selector

REPEATED_S = 60.0
"""How long nothing more is reported of an outage."""


class OneSentence(logging.Handler):
    """Takes the log lines of all watches, and passes on the first of an outage."""

    def __init__(self, server: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`server` is the API server's URL."""
        super().__init__(logging.WARNING)
        self._server = server
        self._clock = clock
        self._said_at = float("-inf")

    def emit(self, record: logging.LogRecord) -> None:
        """State why a watch was interrupted, unless that has been reported a moment ago."""
        arguments = record.args if isinstance(record.args, tuple) else ()
        failure = next((value for value in arguments if isinstance(value, KvplaceError)), None)
        if isinstance(failure, Expired) or self._clock() - self._said_at < REPEATED_S:
            return
        self._said_at = self._clock()
        why = failure if failure is not None else record.getMessage()
        say(f"{self._server} cannot be watched at the moment ({why}); retrying")


@contextlib.contextmanager
def outages_in_one_sentence(server: str) -> Iterator[None]:
    """Report outages of the watches that run in the block, instead of their log lines."""
    logger = logging.getLogger(list_watch.__name__)
    handler, propagates = OneSentence(server), logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = propagates
        logger.removeHandler(handler)


T = TypeVar("T")

OUR_RESOURCES = ("nodeledgers", "nodetopologies")
_KUBEVIRT = ("virtualmachines", "virtualmachineinstances")
_PAGE = 500
_VIEWED = ("nodes", "pods", "events", "virtualmachines", "virtualmachineinstances", *OUR_RESOURCES)
_READING = ("get", "list", "watch")
_MIGRATIONS = "virtualmachineinstancemigrations"
_ROLES = {
    **{(verb, resource): "kvplace-viewer" for verb in _READING for resource in _VIEWED},
    **{
        (verb, resource): "kvplace-rollout"
        for verb in ("create", "patch", "delete")
        for resource in ("virtualmachines", "virtualmachineinstances")
    },
    ("list", _MIGRATIONS): "kvplace-viewer",
    **{(verb, _MIGRATIONS): "kubevirt.io:migrate" for verb in ("create", "delete")},
    **{(verb, "configmaps"): "kvplace-rollout" for verb in ("get", "list", "create", "delete")},
    **{(verb, "resourcequotas"): "kvplace-rollout" for verb in ("get", "list")},
}
"""The ClusterRole for people that grants a right on a resource."""
_APPLY = "apply the installation again: kubectl apply --server-side -k FOLDER"


@dataclass(frozen=True)
class LiveCluster:
    """An open cluster, and the namespace and labels that the user has chosen."""

    session: Session
    api: ApiCluster
    namespace: str
    """The chosen namespace; empty for all."""
    label_terms: LabelTerms

    @property
    def objects(self) -> ObjectClient:
        """The objects of any kind."""
        return ObjectClient(self.session)

    @property
    def vms(self) -> Selector:
        """The pods that opted in in the chosen namespace, with the chosen labels."""
        return replace(PLACED_PODS, namespace=self.namespace, label_terms=self.label_terms)


@contextlib.asynccontextmanager
async def open_cluster(
    options: CredentialOptions, *, timeout_s: float | None, namespace: str | None, label_terms: LabelTerms
) -> AsyncIterator[LiveCluster]:
    """Open the cluster while the block runs; errors of the API server leave it in words for people.

    `timeout_s` limits each answer. Without a `namespace` the context's is chosen.
    """
    limits = Limits()
    if timeout_s is not None:
        limits = replace(limits, answer_s=timeout_s, page_s=timeout_s)
    session = await open_session(options, limits)
    try:
        with outages_in_one_sentence(session.server):
            chosen = session.namespace if namespace is None else namespace
            yield LiveCluster(session, ApiCluster(session, page_size=_PAGE), chosen, label_terms)
    except KvplaceError as error:
        raise await _for_people(error, session) from error
    finally:
        await session.close()


async def _for_people(error: KvplaceError, session: Session) -> KvplaceError:
    match error:
        case Unauthenticated():
            return Forbidden(
                f"{session.server} does not accept the credentials of the kubeconfig; they may have expired: "
                "log in again, or choose another user with --context"
            )
        case Denied():
            return Forbidden(missing_right(error))
        case NotFound() if error.resource in OUR_RESOURCES:
            return await _not_installed(error, session) or error
        case NotFound() if error.resource in _KUBEVIRT:
            return Absent(
                f"{session.server} serves no {error.resource}: install KubeVirt, or choose another cluster"
            )
        case NotFound():
            return Absent(str(error))
        case ApiUnavailable() if sentence := unanswered(str(error)):
            return Unavailable(sentence)
        case ApiUnavailable(status=0):
            return Unavailable(f"{session.server} does not answer ({error}); check the network and --context")
        case _:
            return error


def missing_right(error: Denied) -> str:
    """State the missing right, and the role that grants it."""
    if not error.lacks_right:
        return f"the API server does not let you {error.verb} {error.resource}: {error.said}"
    role = _ROLES.get((error.verb, error.resource))
    fix = (
        f"the ClusterRole {role} grants this right"
        if role is not None
        else "ask the cluster's administrator for this right"
    )
    return f"you may not {error.verb} {error.resource} ({error.said}); {fix}"


async def _not_installed(error: NotFound, session: Session) -> Absent | None:
    """State why the cluster does not serve one of our kinds."""
    try:
        body = await session.request(ApiCall("get", GROUP, f"/apis/{GROUP}"))
    except NotFound:
        return Absent(
            f"{session.server} has no kvplace: its objects are not installed; "
            "install it with kubectl apply --server-side -k FOLDER"
        )
    except KvplaceError:
        return None
    versions = [found["version"] for found in json_object(body.decode(), what=GROUP)["versions"]]
    if VERSION not in versions:
        return Absent(
            f"{session.server} serves {GROUP} in {', '.join(versions)}, and kvplace {__version__} reads "
            f"{VERSION}: use the kvplace of the cluster's version"
        )
    return Absent(f"{session.server} does not serve {error.resource}: {_APPLY}")


_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ACTION: ContextVar[Callable[[], None] | None] = ContextVar("action", default=None)
"""The action of a signal at the moment; None where the loop does not take signals."""


def run_until_interrupt(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end; raises KeyboardInterrupt when a signal cancelled it, after its clean-up."""
    interrupted = False

    async def run() -> T:
        task = asyncio.current_task()
        assert task is not None

        def cancel() -> None:
            nonlocal interrupted
            interrupted = True
            task.cancel()

        with on_interrupt(cancel):
            return await main

    try:
        return asyncio.run(run())
    except asyncio.CancelledError:
        if not interrupted:
            raise
        raise KeyboardInterrupt from None


@contextlib.contextmanager
def on_interrupt(action: Callable[[], None] | None) -> Iterator[None]:
    """Let the first signal call `action` while the block runs; with None it ends the program at once.

    None is for a block that keeps the loop from running, which could not act on a signal.
    """
    token = _ACTION.set(action)
    _listen(action)
    try:
        yield
    finally:
        _ACTION.reset(token)
        _listen(_ACTION.get())


def _listen(action: Callable[[], None] | None) -> None:
    loop = asyncio.get_running_loop()
    heard = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]

    def stop_listening() -> None:
        for number in heard:
            loop.remove_signal_handler(number)

    def act(of: Callable[[], None]) -> None:
        stop_listening()
        of()

    stop_listening()
    if action is not None:
        for number in heard:
            loop.add_signal_handler(number, act, action)


def ask(question: str) -> None:
    """Ask for a yes; raises Abort without one, and on Ctrl-C."""
    with on_interrupt(None):
        click.confirm(question, abort=True, err=True)
