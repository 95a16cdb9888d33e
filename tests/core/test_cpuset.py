"""CPU sets and the Linux cpu list: what parses, what must not, and that nothing is lost on the way."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplace.core.cpuset import MAX_CPU, cpus_of, format_cpu_list, lowest, mask_of, parse_cpu_list
from tests.captured import captured_folder
from tests.core.invalid_input import answer_or_sentence

ids = st.sets(st.integers(0, MAX_CPU), max_size=40)


def recorded() -> dict[str, Any]:
    """Kubernetes' own table of its cpuset package."""
    table: dict[str, Any] = json.loads(
        (captured_folder("tables") / "cpuset_parse.json").read_text(encoding="utf-8")
    )
    return table


def test_lists_that_kubernetes_parses_give_the_same_cpus() -> None:
    for case in recorded()["parse_ok"]:
        assert list(cpus_of(parse_cpu_list(case["text"]))) == case["expect"], case


def test_lists_that_kubernetes_refuses_are_refused() -> None:
    for text in recorded()["parse_error"]:
        with pytest.raises(ValueError, match=r"^CPU list "):
            parse_cpu_list(text)


def test_sets_are_written_as_kubernetes_writes_them() -> None:
    for case in recorded()["format"]:
        assert format_cpu_list(mask_of(case["set"])) == case["expect"]
    for case in recorded()["list"]:
        assert list(cpus_of(mask_of(case["input"]))) == case["expect_list"]


def test_set_arithmetic_on_masks_is_that_of_kubernetes() -> None:
    table = recorded()
    for case in table["union"]:
        union = parse_cpu_list(case["a"])
        for other in case["others"]:
            union |= parse_cpu_list(other)
        assert format_cpu_list(union) == case["expect"], case
    for case in table["intersection"]:
        assert format_cpu_list(parse_cpu_list(case["a"]) & parse_cpu_list(case["b"])) == case["expect"], case
    for case in table["subset"]:
        assert parse_cpu_list(case["a"]) & ~parse_cpu_list(case["b"]) == 0, case
    for case in table["not_subset"]:
        assert parse_cpu_list(case["a"]) & ~parse_cpu_list(case["b"]), case
    for case in table["size"]:
        assert mask_of(case["set"]).bit_count() == case["expect"]


@given(ids)
def test_a_set_written_and_read_is_the_same_set(cpus: set[int]) -> None:
    mask = mask_of(cpus)
    assert parse_cpu_list(format_cpu_list(mask)) == mask
    assert list(cpus_of(mask)) == sorted(cpus)


@given(ids, st.integers(0, 50))
def test_the_lowest_of_a_set_are_its_first_ids(cpus: set[int], count: int) -> None:
    assert list(cpus_of(lowest(mask_of(cpus), count))) == sorted(cpus)[:count]


@given(st.text(alphabet="0123456789-, \t\n\0a٣", max_size=24))
def test_any_text_is_either_a_set_or_one_sentence(text: str) -> None:
    mask, sentence = answer_or_sentence(parse_cpu_list, text, ValueError)
    if mask is None:
        assert sentence.startswith("CPU list ")
    else:
        assert 0 <= mask.bit_length() <= MAX_CPU + 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0-3\n", "0-3"), ("0-3\n\0", "0-3"), ("0, 2 ,4", "0,2,4"), (" \n", ""), ("\0", ""), ("007", "7")],
)
def test_blanks_around_items_and_the_line_end_of_sysfs_are_tolerated(text: str, expected: str) -> None:
    assert format_cpu_list(parse_cpu_list(text)) == expected


@pytest.mark.parametrize("text", ["1\0002", "0 - 3", "1 2", "0- 3", "٣", "0x1", "+1", "1_0"])
def test_blanks_and_zero_bytes_never_join_or_split_numbers(text: str) -> None:
    with pytest.raises(ValueError, match="is neither a number nor a range"):
        parse_cpu_list(text)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("5-2", "isolcpus '5-2': the range '5-2' runs backwards"),
        ("1,16384", "isolcpus '1,16384': '16384' is above the highest id 16383"),
        ("1-99999999999999999999", "is above the highest id 16383"),
        ("2,x", "isolcpus '2,x': 'x' is neither a number nor a range like 2-5"),
    ],
)
def test_the_error_names_the_list_the_item_and_its_fault(text: str, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_cpu_list(text, what="isolcpus")
    assert sentence in str(caught.value)


@pytest.mark.parametrize("text", ["1," * 5000 + "x", "x" * 9000, "9" * 9000, "1," * 50 + "9-" + "8" * 900])
def test_a_long_list_is_shortened_in_its_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"^CPU list '.{57}\.\.\.': '") as caught:
        parse_cpu_list(text)
    assert len(str(caught.value)) < 200
