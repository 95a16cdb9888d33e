"""Label selectors as kubectl takes them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplace.core.errors import BadBody
from kvplace.core.label_terms import LabelTerm, Operator, read_label_terms

KEYS = st.sampled_from(["app", "zone", "kvplace.io/placed", "a.b-c_d"])
VALUES = st.sampled_from(["web", "1", "a.b-c_d", ""])
TERMS = st.one_of(
    st.builds(LabelTerm, KEYS, st.sampled_from([Operator.EXISTS, Operator.ABSENT])),
    st.builds(
        LabelTerm,
        KEYS,
        st.sampled_from([Operator.IN, Operator.NOT_IN]),
        st.lists(VALUES, min_size=1, max_size=3).map(tuple),
    ),
    st.builds(
        LabelTerm,
        KEYS,
        st.sampled_from([Operator.GREATER, Operator.LESS]),
        st.integers(-9, 99).map(lambda bound: (str(bound),)),
    ),
)


@given(st.lists(TERMS, max_size=4).map(tuple))
def test_the_selector_sent_to_the_api_server_reads_back_with_the_same_meaning(
    terms: tuple[LabelTerm, ...],
) -> None:
    assert read_label_terms(",".join(map(str, terms))) == terms


@pytest.mark.parametrize(
    ("text", "labels", "selected"),
    [
        ("app=web", {"app": "web"}, True),
        ("app==web", {"app": "db"}, False),
        ("app!=web", {}, True),
        ("app in (web, db), gpu", {"app": "db", "gpu": ""}, True),
        ("app notin (web,db)", {"app": "db"}, False),
        ("!old", {"old": "yes"}, False),
        (" ! old , app = web ", {"app": "web"}, True),
        ("app=", {"app": ""}, True),
        ("", {}, True),
        ("size>8", {"size": "16"}, True),
        ("size > 8", {"size": "8"}, False),
        ("size<8,gpu", {"size": "-1", "gpu": ""}, True),
        ("size<8", {"size": "small"}, False),
        ("size<8", {}, False),
    ],
)
def test_a_selector_selects_as_kubectl_reports(text: str, labels: dict[str, str], selected: bool) -> None:
    assert all(term.holds(labels) for term in read_label_terms(text)) is selected


@pytest.mark.parametrize(
    "text", ["=web", "app=web,", "app in web", "app=a b", "app>b", "app>", "app>1.5", ",app", "a/b/c=d", "-a"]
)
def test_a_selector_that_cannot_be_read_is_named(text: str) -> None:
    with pytest.raises(BadBody, match="selector"):
        read_label_terms(text)
