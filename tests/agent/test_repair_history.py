"""When repairs are made, and when they are given up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvplace.agent.back_off import MOST_REPAIRS, PERIOD_S, RepairHistory


def test_a_few_repairs_are_made_at_once() -> None:
    history = RepairHistory()
    for moment in range(MOST_REPAIRS):
        assert history.may_repair(moment)
        history = history.repaired(moment)
    assert history.given_up


def test_after_too_many_it_is_tried_once_in_a_period_until_a_repair_lasts() -> None:
    history = RepairHistory()
    for moment in range(MOST_REPAIRS):
        history = history.repaired(moment)
    last = MOST_REPAIRS - 1
    assert not history.may_repair(last + PERIOD_S - 1)
    assert history.may_repair(last + PERIOD_S)
    history = history.repaired(last + PERIOD_S)
    assert not history.may_repair(last + PERIOD_S + 1)
    assert history.intact(last + PERIOD_S + 1).given_up
    assert history.intact(last + 2 * PERIOD_S) == RepairHistory()


def test_rare_repairs_never_add_up() -> None:
    history = RepairHistory()
    for moment in range(0, 10_000, int(PERIOD_S / (MOST_REPAIRS - 1)) + 1):
        assert history.may_repair(moment)
        history = history.repaired(moment)
    assert not history.given_up


@given(st.lists(st.tuples(st.floats(0.1, 100), st.booleans()), max_size=200))
def test_there_are_never_more_repairs_than_the_rule_allows(looks: list[tuple[float, bool]]) -> None:
    now, history, made = 0.0, RepairHistory(), list[float]()
    for pause, undone in looks:
        now += pause
        if not undone:
            history = history.intact(now)
        elif history.may_repair(now):
            history = history.repaired(now)
            made.append(now)
    for moment in made:
        assert sum(moment <= other < moment + PERIOD_S for other in made) <= MOST_REPAIRS
