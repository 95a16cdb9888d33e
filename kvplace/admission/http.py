"""The three webhook addresses, for an aiohttp application; `serve` adds TLS and the process.

A body that is no AdmissionReview gets 400 and one sentence. Everything else gets an AdmissionReview with
the UID of the question: a yes, perhaps with a patch, or a no with one sentence.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from aiohttp import web

from kvplace.admission.json_patch import difference
from kvplace.admission.pod import admit_pod, needed_vmi
from kvplace.admission.review import MAX_BODY_BYTES, AdmissionRequest, allow, deny, read_object, read_review
from kvplace.admission.settings import AdmissionSettings
from kvplace.admission.verdict import Admitted
from kvplace.admission.vm import review_vm
from kvplace.admission.vmi import admit_vmi
from kvplace.core.errors import BadBody, KvplaceError

_log = logging.getLogger(__name__)


class VmiReader(Protocol):
    """What admission must be able to look up."""

    async def read_vmi(self, namespace: str, name: str) -> Mapping[str, Any] | None:
        """Read a VirtualMachineInstance as it is now; None when there is none."""
        ...


Observe = Callable[[AdmissionRequest, bool], None]
"""Hears of every answer: the question, and whether it was a yes."""
_Decide = Callable[[AdmissionRequest], Awaitable[Admitted]]


def admission_routes(
    vmis: VmiReader,
    settings: AdmissionSettings,
    largest_node: Callable[[], int | None] = lambda: None,
    observe: Observe = lambda request, allowed: None,
) -> list[web.RouteDef]:
    """Make the routes POST /admit/vmi, /admit/vm and /admit/pod.

    `largest_node` answers the number of CPUs that the largest known machine may give out, None while no
    machine is known. `observe` is for metrics.
    """

    async def of_vmi(request: AdmissionRequest) -> Admitted:
        return admit_vmi(
            read_object(request.object, "object"),
            namespace=request.namespace,
            settings=settings,
            largest_node=largest_node(),
        )

    async def of_vm(request: AdmissionRequest) -> Admitted:
        old = read_object(request.old_object, "oldObject") if request.operation == "UPDATE" else None
        return review_vm(
            read_object(request.object, "object"),
            namespace=request.namespace,
            old=old,
            largest_node=largest_node(),
        )

    async def of_pod(request: AdmissionRequest) -> Admitted:
        pod = read_object(request.object, "object")
        name = needed_vmi(pod)
        vmi = await vmis.read_vmi(request.namespace, name) if name is not None else None
        return admit_pod(pod, namespace=request.namespace, settings=settings, vmi=vmi)

    return [
        _route("/admit/vmi", "VirtualMachineInstance", {"CREATE"}, of_vmi, observe),
        _route("/admit/vm", "VirtualMachine", {"CREATE", "UPDATE"}, of_vm, observe),
        _route("/admit/pod", "Pod", {"CREATE"}, of_pod, observe),
    ]


def _route(path: str, kind: str, operations: set[str], decide: _Decide, observe: Observe) -> web.RouteDef:
    async def handle(request: web.Request) -> web.Response:
        try:
            review = read_review(await _body(request))
            if review.kind.kind != kind or review.operation not in operations or review.sub_resource:
                asked = f"{review.operation} of {review.kind.kind} {review.sub_resource}".rstrip()
                raise BadBody(
                    f"{path} answers for {' and '.join(sorted(operations))} of {kind}, not for {asked}"
                )
        except BadBody as error:
            return web.Response(status=400, text=f"{error}\n")
        return web.json_response(body=await _answer(review, decide, observe))

    return web.post(path, handle)


async def _answer(review: AdmissionRequest, decide: _Decide, observe: Observe) -> bytes:
    try:
        admitted = await decide(review)
        patch = difference(read_object(review.object, "object"), admitted.object)
        answer = allow(review.uid, patch, admitted.warnings)
        observe(review, True)
        return answer
    except RecursionError:
        error: KvplaceError = BadBody("the object is nested too deeply")
    except KvplaceError as refusal:
        error = refusal
    _log.info("refused %s of a %s: %s", review.operation, review.kind.kind, error)
    observe(review, False)
    return deny(review.uid, error)


async def _body(request: web.Request) -> bytes:
    """Read the whole body, or raise BadBody as soon as it is longer than a review may be."""
    body = bytearray()
    async for chunk in request.content.iter_any():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise BadBody(f"the body is longer than {MAX_BODY_BYTES} bytes, which no AdmissionReview is")
    return bytes(body)
