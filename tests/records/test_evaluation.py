"""pass@k against the counting of every choice, and the words and figures of a report."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.records.evaluation import in_words, mean_pass_at, pass_at_k, scalars
from tests.evaluations import make_report


@given(st.integers(1, 9), st.data())
def test_pass_at_k_is_the_share_of_choices_with_a_pass(samples: int, data: st.DataObject) -> None:
    passed = data.draw(st.integers(0, samples))
    k = data.draw(st.integers(1, samples))
    responses = [True] * passed + [False] * (samples - passed)
    choices = [any(choice) for choice in combinations(responses, k)]
    assert pass_at_k(samples, passed, k) == pytest.approx(sum(choices) / len(choices))


@given(st.integers(1, 2000), st.data())
def test_many_samples_neither_overflow_nor_leave_the_unit_interval(samples: int, data: st.DataObject) -> None:
    passed = data.draw(st.integers(0, samples))
    k = data.draw(st.integers(1, samples))
    share = pass_at_k(samples, passed, k)
    assert 0.0 <= share <= 1.0
    assert share == 1.0 or k <= samples - passed
    assert pass_at_k(samples, passed, 1) == pytest.approx(passed / samples)


@pytest.mark.parametrize(("samples", "passed", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_impossible_counts_are_refused(samples: int, passed: int, k: int) -> None:
    with pytest.raises(ValueError, match="passed <= samples"):
        pass_at_k(samples, passed, k)


@given(st.integers(1, 6), st.data())
def test_means_go_over_prompts_and_grow_with_k(samples: int, data: st.DataObject) -> None:
    passed = data.draw(st.lists(st.integers(0, samples), min_size=1, max_size=8))
    found = mean_pass_at(passed, samples=samples)
    assert list(found) == list(range(1, samples + 1))
    assert found[1] == pytest.approx(sum(passed) / len(passed) / samples)
    assert found[samples] == pytest.approx(sum(count > 0 for count in passed) / len(passed))
    assert all(found[k] <= found[k + 1] + 1e-12 for k in range(1, samples))
    assert mean_pass_at([], samples=samples) == {}


def test_a_report_in_words() -> None:
    said = in_words(make_report(20, newest_version=22, rejected=3))
    assert said == (
        "evaluation of v20  reward 0.500  pass@1 0.250  pass@4 0.600  length 7.5  64 prompts by v20 to v22  "
        "1.5 s  3 rejected"
    )
    assert "by v20  " in in_words(make_report(20))
    nothing = make_report(
        20, prompts=0, rejected=64, reward_mean=None, pass_at={}, response_length_mean=None, cut_share=None,
        oldest_version=None, newest_version=None
    )  # fmt: skip
    assert in_words(nothing) == "evaluation of v20  no prompt has a response  1.5 s  64 rejected"
    assert set(scalars(nothing)) == {"seconds", "prompts", "rejected"}


def test_figures_by_name() -> None:
    figures = scalars(make_report(20))
    assert (figures["reward_mean"], figures["pass@1"], figures["pass@4"]) == (0.5, 0.25, 0.6)
