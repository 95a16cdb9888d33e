"""The pods with an address, in memory and behind an API server."""

from __future__ import annotations

import asyncio

import pytest

from harness.waiting import PATIENCE_S
from tests.kube.worlds import ApiWorld, MemoryWorld, World


async def test_the_pods_with_an_address_are_found_in_memory(memory_world: MemoryWorld) -> None:
    await _are_found_until_they_end(memory_world)


@pytest.mark.control_plane
async def test_the_pods_with_an_address_are_found_behind_an_api_server(api_world: ApiWorld) -> None:
    await _are_found_until_they_end(api_world)


async def _are_found_until_they_end(world: World) -> None:
    async def until_there_are(*names: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while await world.cluster.pods_at("10.9.8.7", in_host_network=False) != names:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    world.create_pod("client")
    world.give_address("client", "10.9.8.7")
    await until_there_are(f"{world.namespace}/client")
    assert await world.cluster.pods_at("10.9.8.7", in_host_network=True) == ()
    assert await world.cluster.pods_at("10.9.8.8", in_host_network=False) == ()
    world.give_address("client", "10.9.8.7", phase="Succeeded")
    await until_there_are()
