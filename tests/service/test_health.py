"""The health port: alive always, ready only without an obstacle, metrics as Prometheus reads them."""

from __future__ import annotations

import aiohttp
import pytest
from prometheus_client import Counter

from kvplace.core.errors import Misconfigured
from kvplace.service.connections import Address
from kvplace.service.listening import listening
from kvplace.service.process import Readiness, health_application

LOOPBACK = Address("127.0.0.1", 0)
COUNTED = Counter("kvplace_test_health", "Counts for the test of the metrics page.")


async def get(address: Address, path: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(f"http://{address}{path}") as answer:
        return answer.status, await answer.text()


async def test_readyz_fails_with_the_obstacle_until_there_is_none_and_healthz_never_fails() -> None:
    readiness = Readiness("the caches are empty")
    async with listening("health", health_application("agent", readiness), LOOPBACK) as address:
        assert await get(address, "/readyz") == (503, "the caches are empty\n")
        assert '\nkvplace_process_ready{process="agent"} 0.0\n' in (await get(address, "/metrics"))[1]
        assert await get(address, "/healthz") == (200, "ok\n")
        readiness.obstacle = ""
        assert await get(address, "/readyz") == (200, "ok\n")
        assert '\nkvplace_process_ready{process="agent"} 1.0\n' in (await get(address, "/metrics"))[1]
        readiness.obstacle = "stopping"
        assert await get(address, "/readyz") == (503, "stopping\n")
        assert await get(address, "/healthz") == (200, "ok\n")


async def test_metrics_are_those_of_this_process_at_this_moment() -> None:
    async with listening("health", health_application("agent", Readiness("")), LOOPBACK) as address:
        COUNTED.inc()
        before = await get(address, "/metrics")
        COUNTED.inc()
        after = await get(address, "/metrics")
    assert before[0] == after[0] == 200
    assert "\nkvplace_test_health_total 1.0\n" in before[1]
    assert "\nkvplace_test_health_total 2.0\n" in after[1]


async def test_a_port_that_is_in_use_is_named() -> None:
    application = health_application("agent", Readiness(""))
    async with listening("health", application, LOOPBACK) as address:
        with pytest.raises(Misconfigured, match=f"cannot listen on {address}: .*in use"):
            async with listening("health", health_application("agent", Readiness("")), address):
                pass
