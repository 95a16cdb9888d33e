"""The admission webhooks: AdmissionReview v1 in an aiohttp application; `serve` adds TLS.

A body that is not an AdmissionReview gets an HTTP error and one sentence. The answer to an
AdmissionReview is an AdmissionReview with the UID of the request: allowed, perhaps with a patch, or denied
with one sentence. A decision is an `Admitted`, a refusal a raised KvplaceError. The object under review stays
raw JSON until it is needed.

Every client that reaches the port may send reviews (docs/security.md). So each one is bounded, and they take
turns, usual ones before large ones: other work of the process runs after each, large reviews together take at
most half of the time, and a usual review waits for two large ones at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Literal, Protocol

import msgspec
from aiohttp import web
from prometheus_client import Histogram

from kvplace.admission.edits import Admitted, Operation
from kvplace.admission.objects import AdmissionSettings
from kvplace.admission.pod import NewPod, admit_new_pod
from kvplace.admission.vmi import admit_vmi, admit_vmi_edit, review_vm
from kvplace.core.errors import BadBody, KvplaceError, http_status_of

MAX_BODY_BYTES = 2 * 1024 * 1024
"""More than etcd stores of an object (1.5 MiB). An update shows the object twice; VMIs have some 10 KiB."""

_REASONS = {
    HTTPStatus.BAD_REQUEST: "BadRequest",
    HTTPStatus.CONFLICT: "Conflict",
    HTTPStatus.UNPROCESSABLE_ENTITY: "Invalid",
    HTTPStatus.SERVICE_UNAVAILABLE: "ServiceUnavailable",
}


class GroupVersionKind(msgspec.Struct, frozen=True):
    """The type of the object under review."""

    kind: str


class UserInfo(msgspec.Struct, frozen=True):
    """The sender of the request that is reviewed."""

    username: str = ""


class AdmissionRequest(msgspec.Struct, frozen=True, rename="camel"):
    """One request of the API server."""

    uid: str
    kind: GroupVersionKind
    operation: str
    name: str = ""
    """Empty where the API server is still to make it up (`generateName`)."""
    namespace: str = ""
    sub_resource: str = ""
    user_info: UserInfo = UserInfo()
    object: msgspec.Raw = msgspec.Raw(b"null")
    old_object: msgspec.Raw = msgspec.Raw(b"null")

    @property
    def object_bytes(self) -> int:
        """The size of both objects as they are written."""
        return memoryview(self.object).nbytes + memoryview(self.old_object).nbytes


class _Review(msgspec.Struct, frozen=True, rename="camel"):
    api_version: Literal["admission.k8s.io/v1"]
    kind: Literal["AdmissionReview"]
    request: AdmissionRequest


def read_review(body: bytes) -> AdmissionRequest:
    """Decode the request of a body; raises BadBody, which names the fault."""
    try:
        return msgspec.json.decode(body, type=_Review).request
    except RecursionError:
        raise BadBody("the body is nested too deeply for an AdmissionReview") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadBody(f"the body is not an AdmissionReview of admission.k8s.io/v1: {error}") from None


def read_object(text: msgspec.Raw, field: str) -> dict[str, Any]:
    """Decode the object under review; raises BadBody that names `field`."""
    try:
        value = msgspec.json.decode(text)
    except RecursionError:
        raise BadBody(f"request.{field} is nested too deeply for a Kubernetes object") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadBody(f"request.{field}: {error}") from None
    if not isinstance(value, dict):
        raise BadBody(f"request.{field} must be a JSON object")
    return value


def allow(uid: str, patch: Sequence[Operation], warnings: Sequence[str]) -> bytes:
    """Encode the response that allows a request; without operations the object stays unchanged."""
    response: dict[str, Any] = {"uid": uid, "allowed": True}
    if patch:
        # msgspec writes bytes as base64, as `patch` needs them.
        response |= {"patchType": "JSONPatch", "patch": msgspec.json.encode(patch)}
    if warnings:
        response["warnings"] = list(warnings)
    return _encode(response)


def deny(uid: str, code: int, sentence: str) -> bytes:
    """Encode a refusal; the user reads its sentence after "admission webhook denied the request"."""
    status = {
        "status": "Failure",
        "code": code,
        "reason": _REASONS.get(HTTPStatus(code), "InternalError"),
        "message": sentence,
    }
    return _encode({"uid": uid, "allowed": False, "status": status})


def _encode(response: dict[str, Any]) -> bytes:
    return msgspec.json.encode(
        {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}
    )


REVIEWS = Histogram(
    "kvplace_admission_review_seconds",
    "Time to answer an AdmissionReview, by kind of object and decision: allowed, denied, malformed.",
    ["kind", "decision"],
    buckets=(0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 10.0),
)


_log = logging.getLogger(__name__)
_LONGEST = 2000
"""Most characters of a sentence in an answer and in the log; with valid names none is nearly as long."""
_USUAL_BYTES = 64 * 1024
"""Reviews up to this size take turns in their order, so that none waits for all smaller ones."""
_SHORT_S = 0.005
"""No pause follows a shorter review; the review of a usual VM takes a tenth of this."""

_Decide = Callable[[AdmissionRequest], Awaitable[Admitted]]


class VmiReader(Protocol):
    """The objects that admission must be able to find."""

    async def read_vmi(self, namespace: str, name: str) -> Mapping[str, Any] | None:
        """Read a VirtualMachineInstance as it is now; None when there is none."""
        ...


class _ReviewTurns:
    """One review in each turn of the event loop, usual ones first, and a pause after a long one.

    It counts seconds, not the steps of `kube/concurrency.py`: the sender of a review chooses what it costs.
    """

    def __init__(self) -> None:
        self._is_taken = False
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    @contextlib.asynccontextmanager
    async def turn(self, review_bytes: int) -> AsyncIterator[None]:
        """Wait for a turn; the block must not wait for anything."""
        await self._take(review_bytes)
        try:
            await asyncio.sleep(0)
            started = time.perf_counter()
            yield
            taken = time.perf_counter() - started
            if taken > _SHORT_S:
                await asyncio.sleep(taken)
        finally:
            self._pass_on()

    async def _take(self, review_bytes: int) -> None:
        if not self._is_taken:
            self._is_taken = True
            return
        mine = asyncio.get_running_loop().create_future()
        size = max(review_bytes, _USUAL_BYTES)
        heapq.heappush(self._waiting, (size, next(self._numbers), mine))
        try:
            await mine
        except asyncio.CancelledError:
            if not mine.cancelled():  # the turn has come at the same moment
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        while self._waiting:
            _, _, next_one = heapq.heappop(self._waiting)
            if not next_one.done():
                next_one.set_result(None)
                return
        self._is_taken = False


def admission_application(
    vmis: VmiReader, settings: AdmissionSettings, largest_node: Callable[[], int | None]
) -> web.Application:
    """Serve POST /admit/vmi, /admit/vm and /admit/pod.

    `largest_node` returns the number of allocatable CPUs of the largest known machine, None while no machine
    is known.
    """
    turns = _ReviewTurns()

    def decide_vmi(request: AdmissionRequest) -> Admitted:
        vmi = read_object(request.object, "object")
        if request.operation == "UPDATE":
            return admit_vmi_edit(
                vmi,
                read_object(request.old_object, "oldObject"),
                namespace=request.namespace,
                largest_node=largest_node(),
            )
        return admit_vmi(
            vmi,
            namespace=request.namespace,
            settings=settings,
            largest_node=largest_node(),
        )

    def decide_vm(request: AdmissionRequest) -> Admitted:
        old = read_object(request.old_object, "oldObject") if request.operation == "UPDATE" else None
        return review_vm(
            read_object(request.object, "object"),
            namespace=request.namespace,
            old=old,
            largest_node=largest_node(),
        )

    def read_pod(request: AdmissionRequest) -> NewPod:
        pod = read_object(request.object, "object")
        return NewPod.read(pod, settings=settings, author=request.user_info.username)

    async def decide_pod(request: AdmissionRequest) -> Admitted:
        async with turns.turn(request.object_bytes):
            new = read_pod(request)
            name = new.needed_vmi
            if name is None:
                return admit_new_pod(new, namespace=request.namespace, settings=settings)
            del new  # read, it takes many times the memory, and many may wait
        vmi = await vmis.read_vmi(request.namespace, name)
        async with turns.turn(request.object_bytes):
            return admit_new_pod(read_pod(request), namespace=request.namespace, settings=settings, vmi=vmi)

    def in_a_turn(decide: Callable[[AdmissionRequest], Admitted]) -> _Decide:
        async def decide_then(request: AdmissionRequest) -> Admitted:
            async with turns.turn(request.object_bytes):
                return decide(request)

        return decide_then

    application = web.Application(client_max_size=MAX_BODY_BYTES)
    application.add_routes(
        [
            _route(
                "/admit/vmi", "VirtualMachineInstance", {"CREATE", "UPDATE"}, turns, in_a_turn(decide_vmi)
            ),
            _route("/admit/vm", "VirtualMachine", {"CREATE", "UPDATE"}, turns, in_a_turn(decide_vm)),
            _route("/admit/pod", "Pod", {"CREATE"}, turns, decide_pod),
        ]
    )
    return application


def _route(path: str, kind: str, operations: set[str], turns: _ReviewTurns, decide: _Decide) -> web.RouteDef:
    async def handle(request: web.Request) -> web.Response:
        body = await request.read()
        started = time.perf_counter()
        try:
            async with turns.turn(len(body)):
                review = read_review(body)
            if review.kind.kind != kind or review.operation not in operations or review.sub_resource:
                given = f"{review.operation} of {review.kind.kind} {review.sub_resource}".rstrip()
                raise BadBody(f"{path} serves {' and '.join(sorted(operations))} of {kind}, not {given}")
        except BadBody as error:
            _count(kind, "malformed", started)
            return web.Response(status=400, text=f"{error}\n")
        is_allowed, answer = await _answer(review, decide)
        _count(kind, "allowed" if is_allowed else "denied", started)
        return web.json_response(body=answer)

    return web.post(path, handle)


def _count(kind: str, decision: str, started: float) -> None:
    REVIEWS.labels(kind, decision).observe(time.perf_counter() - started)


async def _answer(review: AdmissionRequest, decide: _Decide) -> tuple[bool, bytes]:
    """Return whether the request is allowed, and the answer."""
    try:
        admitted = await decide(review)
        return True, allow(review.uid, admitted.patch, admitted.warnings)
    except RecursionError:
        error: KvplaceError = BadBody("the object is nested too deeply")
    except KvplaceError as refusal:
        error = refusal
    what = "pod" if review.kind.kind == "Pod" else "vm"
    # The API server checks names and other quoted values only after this answer.
    sentence = _cut(str(error))
    about = {"review": _cut(review.uid), what: _cut(f"{review.namespace}/{review.name}")}
    _log.info("refused %s of a %s: %s", review.operation, review.kind.kind, sentence, extra=about)
    return False, deny(review.uid, http_status_of(error), sentence)


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
