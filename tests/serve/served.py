"""Settings under which tests run `kvplace serve`, and its readiness."""

from __future__ import annotations

import aiohttp

from harness.certificates import Certificates
from kvplace.admission.objects import AdmissionSettings
from kvplace.serve.process import ServeSettings
from kvplace.service.connections import Address
from kvplace.service.listening import TlsFiles

LOOPBACK = Address("127.0.0.1", 0)


def settings_for(certificates: Certificates) -> ServeSettings:
    return ServeSettings(
        tls=TlsFiles(*certificates.serve, client_ca=certificates.ours.file, check_every_s=0.01),
        admission=AdmissionSettings("hook"),
        extender_address=LOOPBACK,
        admission_address=LOOPBACK,
        health_address=LOOPBACK,
    )


async def ready(session: aiohttp.ClientSession, address: str) -> tuple[int, str]:
    async with session.get(f"http://{address}/readyz") as answer:
        return answer.status, await answer.text()
