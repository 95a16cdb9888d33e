"""Processes killed (SIGKILL) at every step of bind and release, and started again at once."""

from __future__ import annotations

import time
from collections.abc import Callable

from harness.faults.script import After, Answer, Before, Rule
from harness.kvplace_cluster.machines import two_socket_machine
from tests.faults.faulty_cluster import Outcome, Scene
from tests.faults.observer import Json
from tests.faults.scenario import OwnStory, Scenario

LEDGER = "nodeledgers"
BINDING = "pods/binding"
FIT = 60
"""Pods of two CPUs that the nodes of a scene can hold."""

Moment = type[Before] | type[After]


def _at(verb: str, resource: str, nth: int, moment: Moment) -> Callable[[Scene], list[Rule]]:
    return lambda on: [Rule(verb, resource, moment(on.stage.kill_serve), nth)]


def _after_a_conflict(moment: Moment) -> Callable[[Scene], list[Rule]]:
    """The pod is read only after a binding was refused."""
    return lambda on: [
        Rule("create", BINDING, Answer(409, "Conflict"), 3),
        Rule("get", "pods", moment(on.stage.kill_serve)),
    ]


def _of_binding() -> list[Scenario]:
    found = []
    for word, moment in (("before", Before), ("after", After)):
        found += [
            Scenario(
                f"kill-{word}-new-ledger",
                f"serve killed {word} it creates a ledger",
                binding=_at("create", LEDGER, 1, moment),
            ),
            Scenario(
                f"kill-{word}-claim",
                f"serve killed {word} it writes a claim",
                binding=_at("update", LEDGER, 2, moment),
                quick=moment is After,
            ),
            Scenario(
                f"kill-{word}-binding",
                f"serve killed {word} it binds a pod",
                binding=_at("create", BINDING, 5, moment),
                quick=True,
            ),
            Scenario(
                f"kill-{word}-read-in-bind",
                f"serve killed {word} it reads a pod whose binding was refused",
                binding=_after_a_conflict(moment),
            ),
        ]
    return found


def _of_release() -> list[Scenario]:
    found = []
    for word, moment in (("before", Before), ("after", After)):
        found += [
            Scenario(
                f"kill-{word}-read-in-release",
                f"serve killed {word} it reads a pod that is gone",
                releasing=_at("get", "pods", 2, moment),
            ),
            Scenario(
                f"kill-{word}-release",
                f"serve killed {word} it writes a release",
                releasing=_at("update", LEDGER, 1, moment),
                quick=moment is Before,
            ),
        ]
    return found


def _of_nominating() -> list[OwnStory]:
    """The nodes of planned pods are nominated, as in a large cluster, before kube-scheduler may bind any."""

    def story(moment: Moment, nth: int) -> Callable[[Scene, Outcome], None]:
        def tell(on: Scene, outcome: Outcome) -> None:
            outcome.pods = 40
            script = on.stage.proxy.script
            when_killed: list[Json] = []

            def kill() -> None:
                when_killed.extend(on.plane.request("GET", on.pods_path)["items"])
                on.stage.kill_serve()

            with on.burst(outcome.pods):
                script.play([Rule("patch", "pods/status", moment(kill), nth)])
            script.wait_until_played()
            outcome.bound_s = on.after_fault(on.observer.wait_until_bound(outcome.pods))
            outcome.agree_s = on.after_fault(on.wait_until_agreed())
            nominated = [pod for pod in when_killed if pod["status"].get("nominatedNodeName")]
            assert nominated or moment is Before
            assert not [pod for pod in nominated if pod["spec"].get("nodeName")]

        return tell

    return [
        OwnStory(
            f"kill-{word}-nomination",
            f"serve killed {word} it nominates the node of a planned pod",
            story(moment, nth),
            flags=("--nominate-from-nodes=1",),
            quick=moment is After,
        )
        for word, moment, nth in (("before", Before, 1), ("after", After, 3))
    ]


def _a_claim_given_back(moment: Moment) -> Callable[[Scene], list[Rule]]:
    """A bind that is refused releases its claim: with one pod, the second write of a ledger."""
    return lambda on: [
        Rule("create", BINDING, Answer(409, "Conflict")),
        Rule("update", LEDGER, moment(on.stage.kill_serve), 2),
    ]


def _of_giving_back() -> list[Scenario]:
    return [
        Scenario(
            f"kill-{word}-giving-back",
            f"serve killed {word} it gives back the claim of a refused bind",
            pods=1,
            binding=_a_claim_given_back(moment),
        )
        for word, moment in (("before", Before), ("after", After))
    ]


def _of_gone_nodes() -> list[OwnStory]:
    """The last pod of a node that is gone ends, and the ledger of the node goes."""

    def story(moment: Moment) -> Callable[[Scene, Outcome], None]:
        def tell(on: Scene, outcome: Outcome) -> None:
            outcome.pods = 40
            with on.burst(outcome.pods):
                pass
            on.observer.wait_until_bound(outcome.pods)
            on.wait_until_agreed()
            gone = on.observer.bound[0]["spec"]["nodeName"]
            on.stage.proxy.script.play([Rule("delete", LEDGER, moment(on.stage.kill_serve))])
            on.plane.request("DELETE", f"/api/v1/nodes/{gone}")
            on.delete([pod for pod in on.observer.bound if pod["spec"]["nodeName"] == gone])
            on.stage.proxy.script.wait_until_played()
            deleted = on.observer.wait_until(
                lambda: gone not in on.observer.ledgers, "that the ledger of the node is gone"
            )
            on.plane.request("DELETE", f"/apis/kvplace.io/v1alpha1/nodetopologies/{gone}")
            del on.nodes[gone]
            outcome.agree_s = on.after_fault(deleted)
            on.wait_until_agreed()

        return tell

    return [
        OwnStory(
            f"kill-{word}-ledger-deletion",
            f"serve killed {word} it deletes the ledger of a gone node",
            story(moment),
        )
        for word, moment in (("before", Before), ("after", After))
    ]


def _of_waking() -> list[OwnStory]:
    """More pods than fit: the waiting ones are tried again because a node was annotated."""

    def story(moment: Moment) -> Callable[[Scene, Outcome], None]:
        def tell(on: Scene, outcome: Outcome) -> None:
            outcome.pods = FIT + 10
            with on.burst(outcome.pods):
                pass
            on.observer.wait_until_bound(FIT)
            on.observer.wait_until(on.observer.all_are_settled, "that pods without a node report why")
            on.wait_until_agreed()
            script = on.stage.proxy.script
            script.play([Rule("patch", "nodes", moment(on.stage.kill_serve))])
            # Of one node, so that nothing is released after the restart that would wake them, too.
            node = on.observer.bound[0]["spec"]["nodeName"]
            on.delete([pod for pod in on.observer.bound if pod["spec"]["nodeName"] == node][:10])
            script.wait_until_played()
            outcome.bound_s = on.after_fault(on.observer.wait_until_bound(FIT))
            outcome.agree_s = on.after_fault(on.wait_until_agreed())

        return tell

    return [
        OwnStory(
            f"kill-{word}-annotation",
            f"serve killed {word} it annotates a node for waiting pods",
            story(moment),
            quick=moment is Before,
        )
        for word, moment in (("before", Before), ("after", After))
    ]


def _when_some_are_bound(kill: Callable[[Scene], None]) -> Callable[[Scene], None]:
    def during(on: Scene) -> None:
        on.observer.wait_until_bound(10)
        kill(on)
        on.fault_is_over()

    return during


def _kill_scheduler(on: Scene) -> None:
    on.stage.scheduler.process.kill()
    on.stage.scheduler.process.start_again()


def _kill_api_server(on: Scene) -> None:
    server = on.plane.server("kube-apiserver")
    server.kill()
    server.start_again()
    on.plane.wait_until_ready()


def _restart_api_server(on: Scene) -> None:
    server = on.plane.server("kube-apiserver")
    server.stop()
    server.start_again()
    on.plane.wait_until_ready()


def _kill_etcd(on: Scene) -> None:
    etcd = on.plane.server("etcd")
    etcd.kill()
    etcd.start_again()
    on.plane.wait_until_ready()


def _pause_etcd(on: Scene) -> None:
    with on.plane.server("etcd").paused():
        # The length of this fault: above the limit of one answer, so that calls end without one.
        time.sleep(12)


def _kill_in_the_middle(on: Scene) -> None:
    on.observer.wait_until_bound(on.expected // 2)
    _kill_scheduler(on)
    on.fault_is_over()


_OTHERS = [
    Scenario(
        "kill-scheduler",
        "kube-scheduler killed",
        during=_when_some_are_bound(_kill_scheduler),
        quick=True,
    ),
    Scenario(
        "kill-api-server", "API server killed", during=_when_some_are_bound(_kill_api_server), quick=True
    ),
    Scenario("restart-api-server", "API server restarted", during=_when_some_are_bound(_restart_api_server)),
    Scenario("kill-etcd", "etcd killed", during=_when_some_are_bound(_kill_etcd), quick=True),
    Scenario("pause-etcd", "etcd paused for 12 s", during=_when_some_are_bound(_pause_etcd)),
    Scenario(
        "kill-scheduler-500",
        "kube-scheduler killed in the middle of 500 pods",
        pods=500,
        cpus=1,
        machine=lambda: two_socket_machine(cores_per_socket=64),
        during=_kill_in_the_middle,
    ),
]


KILLS: tuple[Scenario | OwnStory, ...] = (
    *_of_binding(),
    *_of_nominating(),
    *_of_giving_back(),
    *_of_release(),
    *_of_gone_nodes(),
    *_of_waking(),
    *_OTHERS,
)
