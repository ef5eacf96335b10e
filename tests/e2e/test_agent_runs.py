"""Whole runs with agents: in the synchronous graph, with rewards of single answers, evaluated, and a taskset of
verifiers."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.records.evaluation import EvaluationReport
from streamrl.records.files import read_records
from tests.e2e.harness import ROOT, assert_exactly_once, overrides, run, steps, summary, trained_seqs
from tests.rollout.agents.installed import TASKSETS, needs_verifiers

GUESS_NUMBER = ROOT / "examples" / "guess_number.toml"
THREE_STEPS = {"trainer__batch_groups": 8, "run__total_train_steps": 3, "trainer__save_at_end": "false"}
EVALUATED = {"evaluation__at_start": "true", "evaluation__at_end": "true", "evaluation__prompts": 6}


def evaluations(run_dir: Path) -> list[EvaluationReport]:
    return read_records(run_dir / "evaluations.jsonl", EvaluationReport)


@pytest.mark.timeout(600)
def test_the_synchronous_graph_trains_and_evaluates_agents_and_discounts_over_their_turns(tmp_path: Path) -> None:
    settings = {
        **THREE_STEPS,
        **EVALUATED,
        "trainer__graph": "synchronous",
        "staleness__max_staleness": 0,
        "rollout__agent__discount": 0.5,
        "trainer__data_parallel": 2,
        "evaluation__samples": 2,
        "evaluation__sampling__temperature": 1.0,
    }
    run(GUESS_NUMBER, overrides(tmp_path, "synchronous", **settings), seconds=400)
    folder = tmp_path / "synchronous"
    assert_exactly_once(folder)
    assert sorted(trained_seqs(folder)) == list(range(3 * 8))
    found = summary(folder)
    assert found["oldest_token_age"] == 0
    assert found["episodes"] == 3 * 8 * 4
    assert 1 <= found["turns_per_episode"] == found["calls_per_episode"] <= 3
    assert found["trajectories_per_episode"] == 1  # though turns with other returns are trajectories of their own
    for step in steps(folder):  # all that is earned, undiscounted: a game is won or not
        episodes = 8 * 4
        assert step["metrics"]["reward_mean"] * episodes == pytest.approx(
            round(step["metrics"]["reward_mean"] * episodes), abs=1e-3
        )
    first, last = evaluations(folder)
    assert (first.policy_version, last.policy_version) == (0, 3)
    for report in (first, last):
        assert (report.prompts, report.samples, report.rejected) == (6, 2, 0)
        assert {report.oldest_version, report.newest_version} == {report.policy_version}
        assert report.reward_mean is not None
        assert report.reward_mean * 12 == pytest.approx(round(report.reward_mean * 12), abs=1e-3)


ALPHABET = "".join(sorted({*"0123456789+?", *"Hi.", *"Sure?", *"<|im_start|>assistant", *"</think>"})) + "\\n"
"""Of prompts; and `renderers` looks for the beginning of ChatML's answers, and for reasoning, in all models."""
VERIFIERS = """
[model]
path = "scratch"
[model.scratch]
alphabet = "{alphabet}"
hidden_size = 32
layers = 1
heads = 2
kv_heads = 1
head_dim = 16
max_position_embeddings = 64
[data]
args = {{ n = 20 }}
max_prompt_tokens = 16
[rollout]
group_size = 2
[rollout.agent]
verifiers = "adding"
python = "{python}"
memory_mb = 0
[rollout.sampling]
max_new_tokens = 2
[gserver]
dtype = "float32"
max_context = 48
[trainer]
batch_groups = 4
dtype = "float32"
save_at_end = false
[evaluation.data]
args = {{ n = 3, first = 40 }}
"""


@pytest.mark.timeout(600)
def test_a_taskset_of_verifiers_is_trained_and_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "verifiers.toml"
    config.write_text(VERIFIERS.format(python=needs_verifiers(), alphabet=ALPHABET))
    monkeypatch.setenv("PYTHONPATH", str(TASKSETS))
    settings = {"run__total_train_steps": 3, "evaluation__at_end": "true"}
    run(config, overrides(tmp_path, "verifiers", **settings), seconds=400)
    folder = tmp_path / "verifiers"
    assert_exactly_once(folder)
    found = summary(folder)
    assert found["groups_trained"] == 12
    assert (found["calls_per_episode"], found["agent_metrics"]["turns"]) == (3.0, 3.0)
    # the template leaves out the end that the model may have sampled: then the second turn is written anew
    assert 2 <= found["trajectories_per_episode"] <= 3
    assert 0 <= found["agent_metrics"]["exact"] <= 1
    (report,) = evaluations(folder)
    assert (report.policy_version, report.prompts, report.rejected) == (3, 3, 0)
