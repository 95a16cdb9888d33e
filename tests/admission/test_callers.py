"""A pod may not call, unless API servers call through pods of its namespace; every doubt lets a caller in."""

from __future__ import annotations

import asyncio

import pytest

from kvplace.admission.callers import Callers
from kvplace.core.errors import Unavailable

TENANT, NODE, AGENT = "10.1.0.7", "192.0.2.1", "10.1.0.9"


class PlayedPods:
    """Addresses of pods, and the number of questions about them."""

    def __init__(self) -> None:
        self.in_pod_network: dict[str, tuple[str, ...]] = {
            TENANT: ("team-a/shell",),
            AGENT: ("kube-system/konnectivity-agent",),
            "fd00::7": ("team-a/shell-of-ipv6",),
        }
        self.in_host_network: dict[str, tuple[str, ...]] = {
            NODE: ("kube-system/kube-apiserver", "kube-system/kube-proxy")
        }
        self.asked: list[str] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.failure: Exception | None = None

    async def pods_at(self, address: str, *, in_host_network: bool) -> tuple[str, ...]:
        self.asked.append(address)
        await self.may_answer.wait()
        if self.failure is not None:
            raise self.failure
        return (self.in_host_network if in_host_network else self.in_pod_network).get(address, ())


@pytest.fixture
async def pods() -> PlayedPods:
    return PlayedPods()


@pytest.mark.parametrize("address", [TENANT, f"::ffff:{TENANT}", "fd00::7", "fd00:0::7%eth0"])
async def test_a_pod_is_refused_and_named_in_the_log(
    pods: PlayedPods, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert not await Callers(pods, ["kube-system"]).may_call(address)
    assert "admission refuses the pod team-a/shell" in caplog.text
    assert "--admission-client-namespace" in caplog.text


@pytest.mark.parametrize("address", [NODE, "10.1.0.0", "198.51.100.3", "::1", "127.0.0.1"])
async def test_nodes_tunnels_and_machines_elsewhere_may_call(pods: PlayedPods, address: str) -> None:
    assert await Callers(pods, ["kube-system"]).may_call(address)


async def test_an_api_server_may_call_through_a_pod_of_a_named_namespace(pods: PlayedPods) -> None:
    assert await Callers(pods, ["kube-system"]).may_call(AGENT)
    assert not await Callers(pods, ["team-b"]).may_call(AGENT)
    assert await Callers(pods, ["team-b", "team-a"]).may_call(TENANT)


async def test_an_address_that_a_node_has_is_the_nodes_whatever_a_pod_reports(pods: PlayedPods) -> None:
    pods.in_pod_network[NODE] = ("team-a/played-by-kwok",)
    assert await Callers(pods, ["kube-system"]).may_call(NODE)


async def test_an_answer_counts_for_30_seconds(pods: PlayedPods, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, began = asyncio.get_running_loop(), asyncio.get_running_loop().time()
    callers = Callers(pods, ["kube-system"])
    pods.in_pod_network["10.1.0.8"] = ()  # a new pod, with an address that no kubelet has reported yet
    for after, is_let_in in ((0, True), (29, True), (31, False), (60, False)):
        monkeypatch.setattr(loop, "time", lambda after=after: began + after)
        assert await callers.may_call("10.1.0.8") is is_let_in
        pods.in_pod_network["10.1.0.8"] = ("team-a/new",)
    assert len(pods.asked) == 3  # once, and twice for the refusal


async def test_the_api_server_is_asked_once_for_many_connections_of_one_address(pods: PlayedPods) -> None:
    callers = Callers(pods, ["kube-system"])
    assert not any(await asyncio.gather(*(callers.may_call(TENANT) for _ in range(500))))
    assert pods.asked == [TENANT, TENANT]


@pytest.mark.parametrize("is_slow", [True, False], ids=["no answer", "an error"])
async def test_a_caller_is_let_in_while_the_api_server_does_not_answer(
    pods: PlayedPods, is_slow: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvplace.admission.callers._PATIENCE_S", 0.05)
    if is_slow:
        pods.may_answer.clear()
    else:
        pods.failure = Unavailable("the API server has answered 503")
    assert await Callers(pods, ["kube-system"]).may_call(TENANT)
    assert f"admission lets {TENANT} in without knowing its pod" in caplog.text


async def test_the_answers_about_many_addresses_take_a_bounded_room(pods: PlayedPods) -> None:
    callers = Callers(pods, ["kube-system"])
    for count in range(5000):
        await callers.may_call(f"10.2.{count // 250}.{count % 250}")
    assert len(callers._known) == 4096
