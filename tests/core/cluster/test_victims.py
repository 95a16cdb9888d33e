"""Violations of disruption budgets are counted as kube-scheduler counts them."""

from __future__ import annotations

from kvplace.core.cluster.victims import DisruptionBudget, budgets_taken, violations
from kvplace.core.label_terms import LabelTerm, Operator

ANY = (LabelTerm("app", Operator.EXISTS),)
NONE_LEFT = DisruptionBudget("shop", "none-left", ANY, allowed=0)
ONE_LEFT = DisruptionBudget("shop", "one-left", ANY, allowed=1)


def test_each_pod_takes_one_and_counts_when_nothing_is_left() -> None:
    assert violations([]) == 0
    assert violations([(ONE_LEFT,)]) == 0
    assert violations([(ONE_LEFT,), (ONE_LEFT,), (ONE_LEFT,)]) == 2
    assert violations([(), (NONE_LEFT,), ()]) == 1


def test_a_pod_that_violates_two_budgets_counts_once() -> None:
    assert violations([(NONE_LEFT, ONE_LEFT), (ONE_LEFT,)]) == 2
    assert violations([(NONE_LEFT, NONE_LEFT)]) == 1


def test_budgets_of_equal_names_in_other_namespaces_are_others() -> None:
    elsewhere = DisruptionBudget("bank", "one-left", ANY, allowed=1)
    assert violations([(ONE_LEFT,), (elsewhere,)]) == 0


def test_a_pod_whose_eviction_is_counted_already_takes_nothing() -> None:
    budget = DisruptionBudget("shop", "counted", ANY, allowed=0, disrupted=frozenset({"gone"}))
    assert budgets_taken([budget], "shop", "gone", {"app": ""}) == ()
    assert budgets_taken([budget], "shop", "here", {"app": ""}) == (budget,)
