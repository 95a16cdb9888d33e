"""The webhook addresses on a real server, asked without await."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from kvplace.admission.http import admission_application
from tests.admission.reviewed_objects import SETTINGS, Json, Vmis

PATHS = {
    "VirtualMachineInstance": "/admit/vmi",
    "VirtualMachine": "/admit/vm",
    "Pod": "/admit/pod",
}
Ask = Callable[[str, Any, Mapping[str, str]], tuple[int, bytes]]


class Webhooks:
    """The routes on a real server, asked without await."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self.vmis = Vmis()
        self.largest: int | None = None
        self.note_decision: Callable[[], None] = lambda: None

        def largest() -> int | None:
            self.note_decision()
            return self.largest

        application = admission_application(self.vmis, SETTINGS, largest)
        self._runner = runner
        self._client = runner.run(self._connected(application))

    async def _connected(self, application: web.Application) -> TestClient[web.Request, web.Application]:
        client = TestClient(TestServer(application))
        await client.start_server()
        return client

    def post(self, path: str, body: bytes, **headers: str) -> tuple[int, bytes]:
        async def posted() -> tuple[int, bytes]:
            async with self._client.post(path, data=io.BytesIO(body), headers=headers) as answer:
                return answer.status, await answer.read()

        return self._runner.run(posted())

    def turns_of_reviews(self, body: bytes, count: int) -> list[int]:
        """Send reviews of a VMI at once; list the turns of the event loop in which they were decided."""
        turn, seen = 0, []

        async def count_turns() -> None:
            nonlocal turn
            while True:
                await asyncio.sleep(0)
                turn += 1

        async def send() -> None:
            counting = asyncio.create_task(count_turns())
            await asyncio.gather(*(self._client.post("/admit/vmi", data=body) for _ in range(count)))
            counting.cancel()

        self.note_decision = lambda: seen.append(turn)
        self._runner.run(send())
        self.note_decision = lambda: None
        return seen

    def answered_in_order(self, bodies: list[bytes]) -> list[int]:
        """Send reviews of pods; the first one needs a VMI. List positions in the order of the answers.

        The API server shows the VMI after the first answer.
        """
        order: list[int] = []

        async def send(position: int) -> None:
            async with self._client.post("/admit/pod", data=bodies[position]) as answer:
                assert answer.status == 200
            order.append(position)
            self.vmis.may_answer.set()

        async def send_all() -> None:
            self.vmis.may_answer.clear()
            first = asyncio.create_task(send(0))
            await self.vmis.asked.wait()
            await asyncio.gather(first, *(send(position) for position in range(1, len(bodies))))

        self._runner.run(send_all())
        return order

    def answered_before(self, bodies: list[bytes], late: bytes) -> int:
        """Send reviews at once, `late` after the first answer; count the answers until its own."""
        answered = 0

        async def send(body: bytes) -> None:
            nonlocal answered
            async with self._client.post("/admit/pod", data=body) as answer:
                assert answer.status == 200
            answered += 1

        async def send_all() -> int:
            others = [asyncio.create_task(send(body)) for body in bodies]
            await asyncio.wait(others, return_when=asyncio.FIRST_COMPLETED)
            await send(late)
            before = answered
            await asyncio.gather(*others)
            return before

        return self._runner.run(send_all())

    def answered_beside(self, body: bytes, callers: int, late: bytes) -> int:
        """Have callers send a review again and again, and one `late`; count the answers until its own."""
        answered, is_done = 0, False

        async def send_again() -> None:
            nonlocal answered
            while not is_done and answered < 100 * callers:
                async with self._client.post("/admit/pod", data=body):
                    answered += 1

        async def send_all() -> int:
            nonlocal is_done
            others = [asyncio.create_task(send_again()) for _ in range(callers)]
            await asyncio.sleep(0.05)
            before = answered
            async with self._client.post("/admit/pod", data=late):
                until = answered - before
            is_done = True
            await asyncio.gather(*others)
            return until

        return self._runner.run(send_all())

    def ask(self, raw: Json, operation: str = "CREATE", old: Json | None = None, **more: Any) -> Json:
        """Ask about an object and return the answer's `response`."""
        status, body = self.post(PATHS[raw["kind"]], question(raw, operation, old, **more))
        assert status == 200, body
        answer = json.loads(body)
        assert (answer["apiVersion"], answer["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
        response: Json = answer["response"]
        assert response["uid"] == "705ab4f5-6393-11e8-b7cc-42010a800002"
        return response

    def close(self) -> None:
        self._runner.run(self._client.close())


def question(raw: Any, operation: str = "CREATE", old: Json | None = None, **more: Any) -> bytes:
    """Write an AdmissionReview as the API server does, with all that it reports and we do not read."""
    kind = raw.get("kind", "Pod") if isinstance(raw, dict) else "Pod"
    request = {
        "uid": "705ab4f5-6393-11e8-b7cc-42010a800002",
        "kind": {"group": "", "version": "v1", "kind": kind},
        "resource": {"group": "", "version": "v1", "resource": f"{kind.lower()}s"},
        "requestKind": {"group": "", "version": "v1", "kind": kind},
        "namespace": "default",
        "operation": operation,
        "userInfo": {"username": "admin", "groups": ["system:masters"]},
        "object": raw,
        "oldObject": old,
        "dryRun": False,
        "options": {"kind": "CreateOptions", "apiVersion": "meta.k8s.io/v1"},
        **more,
    }
    review = {"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1", "request": request}
    return json.dumps(review).encode()


def patch_of(response: Json) -> list[Json]:
    assert response["patchType"] == "JSONPatch"
    operations: list[Json] = json.loads(base64.b64decode(response["patch"], validate=True))
    return operations
