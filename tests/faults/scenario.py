"""One scenario: a burst of pods, a fault, and the same checks for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.faults.script import Rule
from harness.kvplace_cluster.machines import two_socket_machine
from kvplace.core.topology import Topology
from tests.faults.faulty_cluster import Outcome, Scene, Stage, scene


@dataclass(frozen=True)
class Scenario:
    """A fault, and the moment at which it comes."""

    name: str
    sentence: str
    pods: int = 40
    cpus: int = 2
    machine: Callable[[], Topology] = two_socket_machine
    binding: Callable[[Scene], Sequence[Rule]] = lambda _: ()
    """Faults of calls while the pods are bound."""
    during: Callable[[Scene], None] = lambda _: None
    """Carried out when kube-scheduler has begun; returns when the fault has ended."""
    releasing: Callable[[Scene], Sequence[Rule]] = lambda _: ()
    """Faults of calls from the deletion of the pods on."""
    quick: bool = False
    """Part of every test run."""

    def play(self, stage: Stage) -> Outcome:
        """Play it; returns how long it took to go on.

        1. Create the pods, let kube-scheduler see them, and let the fault come.
        2. Wait until all are bound and the ledgers hold just their cores.
        3. Delete all and wait until every core is free.
        """
        script = stage.proxy.script
        outcome = Outcome(self.name, self.pods)
        with scene(stage, self.name, machine=self.machine()) as on:
            with on.burst(self.pods, self.cpus):
                script.play(self.binding(on))
            self.during(on)
            script.wait_until_played()
            outcome.bound_s = on.after_fault(on.observer.wait_until_bound(self.pods))
            outcome.agree_s = on.after_fault(on.wait_until_agreed())
            script.play(self.releasing(on))
            on.delete_all()
            script.wait_until_played()
            outcome.freed_s = on.after_fault(on.wait_until_freed())
        return outcome


@dataclass(frozen=True)
class OwnStory:
    """A scenario whose steps are its own; the checks are the same."""

    name: str
    sentence: str
    tell: Callable[[Scene, Outcome], None]
    quick: bool = False
    kubelets: bool = False
    """Whether nodes play the kubelet's admission."""
    flags: Sequence[str] = ()
    """Flags of `serve`, beyond the flags of every scenario."""

    def play(self, stage: Stage) -> Outcome:
        """Play it; returns how long it took to go on."""
        outcome = Outcome(self.name, 0)
        with (
            stage.serving_with(*self.flags),
            scene(stage, self.name, kubelets=self.kubelets) as on,
        ):
            self.tell(on, outcome)
            on.delete_all()
            outcome.freed_s = on.after_fault(on.wait_until_freed())
        return outcome
