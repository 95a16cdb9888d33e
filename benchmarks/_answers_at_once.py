"""A server that answers the API server and kube-scheduler at once: what any webhook and extender cost.

    python -m benchmarks._answers_at_once --kubeconfig FILE ... [--patches-for SCHEDULER] [--watches]

Admission allows everything, or with `--patches-for` patches as kvplace does. Filter answers with the first
node of the call, bind writes the binding with annotations as long as kvplace's; nothing is decided,
remembered or claimed. HTTP, TLS and the client of the API server are kvplace's own.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from aiohttp import web

from kvplace.admission import pod, vmi
from kvplace.admission.http import admission_application, allow, read_review
from kvplace.admission.objects import AdmissionSettings
from kvplace.core.allocator.allocate import place
from kvplace.core.free_resources import free_of
from kvplace.core.ledger import Ledger
from kvplace.core.placement import Placement, PodPlacement, result_annotations
from kvplace.core.request import PinningOptions, Request
from kvplace.core.request_json import PodRequest
from kvplace.core.scalars import Bytes, NodeName
from kvplace.kube.api_cluster import ApiCluster
from kvplace.kube.credentials import CredentialOptions
from kvplace.kube.session import open_session
from kvplace.machines.server_types import read_machine
from kvplace.nodes.node_cache import running_node_cache
from kvplace.scheduler.extender_protocol import (
    BindingArgs,
    BindingResult,
    ExtenderArgs,
    FilterResult,
    HostPriority,
    NodeVictims,
    PreemptionArgs,
)
from kvplace.scheduler.http import Routes
from kvplace.scheduler.listener import ALPN_PROTOCOLS, extender_listening
from kvplace.service.connections import Address
from kvplace.service.listening import RenewedTls, TlsFiles, listening
from kvplace.service.process import run_until_signal

_MACHINE = "2x-epyc-9354-nps2"


class FirstNode:
    """An extender that decides nothing."""

    def __init__(self, cluster: ApiCluster, vcpus: int) -> None:
        self._cluster = cluster
        self._topology = read_machine(_MACHINE)
        self._request = PodRequest(Request(vcpus, PinningOptions(), memory=Bytes(1 << 30)))
        placement = place(self._topology, free_of(self._topology, Ledger()), self._request.request)
        assert isinstance(placement, Placement)
        self._placement = placement

    async def filter(self, args: ExtenderArgs) -> FilterResult:
        """Answer with the first node."""
        return FilterResult.passing(args, args.names[:1])

    async def prioritize(self, args: ExtenderArgs) -> list[HostPriority]:
        """Find all nodes equally good."""
        return [HostPriority(name, 0) for name in args.names]

    async def preempt(self, args: PreemptionArgs) -> Mapping[NodeName, NodeVictims]:
        """Leave the victims as they are."""
        return args.victims

    async def bind(self, args: BindingArgs) -> BindingResult:
        """Bind the pod with results that are those of an empty machine."""
        bound = PodPlacement(
            args.uid,
            args.node,
            self._topology.fingerprint,
            self._request.request.options.on_failure,
            self._placement,
        )
        annotations = result_annotations(self._topology, bound)
        await self._cluster.bind(args.namespace, args.name, args.uid, args.node, annotations)
        return BindingResult()


class _NoVmis:
    async def read_vmi(self, namespace: str, name: str) -> Mapping[str, Any] | None:
        raise LookupError(f"the size of {namespace}/{name} stands on its pod")


def _allowing() -> web.Application:
    async def allow_it(request: web.Request) -> web.Response:
        review = read_review(await request.read())
        return web.json_response(body=allow(review.uid, (), ()))

    application = web.Application(client_max_size=1 << 24)
    application.add_routes([web.post("/admit/{kind}", allow_it)])
    return application


@contextlib.asynccontextmanager
async def _serving(given: argparse.Namespace) -> AsyncIterator[None]:
    if given.keeps_managed_fields:
        for module in (pod, vmi):
            mock.patch.object(module, "drop_managed_fields").start()
    session = await open_session(CredentialOptions(kubeconfig=str(given.kubeconfig)))
    cluster = ApiCluster(session)
    files = TlsFiles(given.tls_cert, given.tls_key, given.client_ca)
    admission = _allowing()
    if given.patches_for:
        settings = AdmissionSettings(given.sidecar_image, scheduler_name=given.patches_for)
        admission = admission_application(_NoVmis(), settings, lambda: None)
    routes = Routes(FirstNode(cluster, given.vcpus))
    extender_tls = RenewedTls(files, alpn=ALPN_PROTOCOLS).context
    admission_tls = RenewedTls(TlsFiles(given.tls_cert, given.tls_key)).context
    try:
        async with contextlib.AsyncExitStack() as stack:
            if given.watches:
                await stack.enter_async_context(running_node_cache(cluster))
            await stack.enter_async_context(extender_listening(routes, given.extender_address, extender_tls))
            await stack.enter_async_context(
                listening("admission", admission, given.admission_address, admission_tls)
            )
            yield
    finally:
        await cluster.close()


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name in ("kubeconfig", "tls-cert", "tls-key", "client-ca"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("extender-address", "admission-address"):
        parser.add_argument(f"--{name}", type=Address.parse, required=True)
    parser.add_argument("--patches-for", metavar="SCHEDULER", help="patch, and name this scheduler on pods")
    parser.add_argument("--keeps-managed-fields", action="store_true", help="patch everything else")
    parser.add_argument("--sidecar-image", default="kvplace.test/hook")
    parser.add_argument("--vcpus", type=int, default=4)
    parser.add_argument("--watches", action="store_true", help="watch what `serve` watches")
    logging.basicConfig(level=logging.INFO)
    run_until_signal(_serving(parser.parse_args()))


if __name__ == "__main__":
    main()
