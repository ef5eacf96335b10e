"""The figures of an evaluation against plain counting."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.evaluation import pass_at_k
from streamrl.rollout.tally import Tally
from streamrl.transport.control.evaluations import EvaluationTask
from tests.groups import make_group

TASK = EvaluationTask(number=3, policy_version=20, step=20)
answers = st.lists(
    st.tuples(
        st.lists(st.sampled_from([0.0, 0.1, 0.7, 1.0]), min_size=3, max_size=3),  # rewards
        st.lists(st.integers(1, 5), min_size=3, max_size=3),  # lengths
        st.lists(st.sampled_from(["stop", "length"]), min_size=3, max_size=3),
        st.integers(18, 24),  # version
    ),
    min_size=1,
    max_size=6,
)


@given(answers, st.sampled_from([0.1, 0.7, 1.0]), st.integers(0, 3))
def test_figures(
    given_answers: list[tuple[list[float], list[int], list[str], int]], pass_reward: float, rejected: int
) -> None:
    tally = Tally(samples=3, pass_reward=pass_reward)
    for seq, (rewards, lengths, finishes, version) in enumerate(given_answers):
        group = make_group(seq, seqlens=tuple(3 + n for n in lengths), version=version)
        group.rewards = np.array(rewards, dtype=np.float32)
        group.finish_reasons = finishes
        tally.add(group)
    for _ in range(rejected):
        tally.reject()
    report = tally.report(TASK, time=9.0, seconds=2.0)
    all_rewards = [reward for rewards, _, _, _ in given_answers for reward in rewards]
    all_lengths = [length for _, lengths, _, _ in given_answers for length in lengths]
    cut = [finish == "length" for _, _, finishes, _ in given_answers for finish in finishes]
    versions = [version for _, _, _, version in given_answers]
    assert (report.policy_version, report.step, report.time, report.seconds) == (20, 20, 9.0, 2.0)
    assert (report.prompts, report.samples, report.rejected) == (len(given_answers), 3, rejected)
    assert report.reward_mean == pytest.approx(sum(all_rewards) / len(all_rewards))
    assert report.response_length_mean == pytest.approx(sum(all_lengths) / len(all_lengths))
    assert report.cut_share == pytest.approx(sum(cut) / len(cut))
    assert (report.oldest_version, report.newest_version) == (min(versions), max(versions))
    passed = [sum(reward >= pass_reward for reward in rewards) for rewards, _, _, _ in given_answers]
    for k in (1, 2, 3):
        assert report.pass_at[k] == pytest.approx(sum(pass_at_k(3, c, k) for c in passed) / len(passed))


def test_an_evaluation_that_failed_altogether() -> None:
    tally = Tally(samples=2, pass_reward=1.0)
    tally.reject()
    report = tally.report(TASK, time=9.0, seconds=2.0)
    assert (report.prompts, report.rejected, report.reward_mean, report.pass_at) == (0, 1, None, {})
    assert report.oldest_version is report.newest_version is report.cut_share is report.response_length_mean is None
