"""Every example of the pages is run by a test, or has a reason why not."""

from __future__ import annotations

from tests.docs.blocks import PAGES, Newcomer, QuickStart, Taker, blocks, takers
from tests.docs.not_run import NOT_RUN
from tests.docs.reading import PROJECT

TAKERS = [*takers(), Newcomer(), QuickStart()]
EXCUSED = [Taker("tests/docs/not_run.py", page, beginning) for page, beginning in NOT_RUN]
EXAMPLES = [one for page in PAGES for one in blocks(page)]


def test_every_block_is_taken_by_a_test_or_has_a_reason() -> None:
    missing = [
        f"{one.page}:{one.line}: {one.text.splitlines()[0]}"
        for one in EXAMPLES
        if not any(taker.takes(one) for taker in (*TAKERS, *EXCUSED))
    ]
    assert missing == [], (
        "let a test take these (tests/docs/blocks.py), or state in tests/docs/not_run.py why not"
    )


def test_a_block_that_a_test_takes_has_no_reason_not_to_be_run() -> None:
    both = [
        f"{one.page}:{one.line}: {one.text.splitlines()[0]}"
        for one in EXAMPLES
        if any(taker.takes(one) for taker in TAKERS) and any(taker.takes(one) for taker in EXCUSED)
    ]
    assert both == [], "delete these in tests/docs/not_run.py"


def test_a_named_block_is_there_once() -> None:
    """A page may repeat a block word for word."""
    wrong = [
        taker
        for taker in (*TAKERS, *EXCUSED)
        for texts in [{one.text for one in blocks(taker.page) if taker.takes(one)}]
        if not texts or (taker.beginning is not None and len(texts) > 1)
    ]
    assert wrong == []


def test_every_block_ends() -> None:
    for page in PAGES:
        lines = (PROJECT / page).read_text(encoding="utf-8").splitlines()
        assert sum(line.lstrip().startswith("```") for line in lines) == 2 * len(blocks(page)), page
