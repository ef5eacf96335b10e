"""Health in words: each finding at its limit, none for a healthy run, and nothing that figures can break."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from streamrl.config import from_dict
from streamrl.records.collapse import Health, advice
from streamrl.records.health import ENOUGH, WINDOW, Finding, RunFigures, findings
from streamrl.records.lineage import Lineage
from streamrl.records.timeline import FrequentFailure
from tests.evaluations import make_report

CONFIG = from_dict(
    {
        "staleness": {"max_staleness": 4},
        "algorithm": {"kl_coef": 0.1},
        "trainer": {"lr": 1e-4},
        "rollout": {"sampling": {"max_new_tokens": 100}},
    }
)
HEALTHY = {
    "reward_mean": 0.8,
    "reward_std": 0.2,
    "groups": 32.0,
    "groups_with_contrast": 20.0,
    "effective_sample_size": 0.98,
    "grad_norm": 0.4,
    "grad_norm_ratio": 1.1,
    "kl": 0.02,
    "entropy": 0.9,
    "tokens_sampled": 1000.0,
    "tokens_trained": 1000.0,
    "tokens_masked": 0.0,
    "tokens_special": 10.0,
    "tokens_dropped": 0.0,
    "logprob_diff_mean": 1e-5,
    "logprob_diff_mean/gserver_0": 1e-5,
    "logprob_diff_mean/gserver_1": 1e-5,
    "gservers_compared": 2.0,
    "gservers_not_compared": 0.0,
    "sampling_diff_mean": 1e-5,
    "step_seconds": 2.0,
    "wait_seconds": 0.2,
    "pause_seconds": 0.05,
    "blocked_seconds": 0.0,
}


def healthy(**changed):
    """A run without a flaw but those in `changed`."""
    steps = [HEALTHY] * WINDOW
    figures = {
        "steps": steps,
        "first": [HEALTHY],
        "best_reward": 0.8,
        "response_lengths": [[20, 30], [99, 40], [10, 10]],
        "evaluations": [make_report(3, cut_share=0.0)],
        "stats": {
            "rollout/0": {"groups_done_total": 100.0, "groups_rejected_total": 2.0, "groups_filtered_total": 90.0},
            "model_worker/0": {"rollouts_lost_total": 0.0, "groups_refused_total": 0.0},
        },
        "generation_busy": 0.8,
        "config": CONFIG,
        "state": "running",
        "disk_free": 2**40,
        "disk_bytes": 2**42,
    }
    return RunFigures(**(figures | changed))


def with_steps(**changed):
    return healthy(steps=[HEALTHY | changed] * WINDOW)


def unscored(*, on_failed_sibling, errors):
    """A run of 100 groups of 8, `errors` of whose responses could not be scored."""
    config = from_dict({"rollout": {"group_size": 8, "on_failed_sibling": on_failed_sibling}})
    stats = {"rollout/0": {"groups_done_total": 100.0, "reward_errors_total": errors}}
    return healthy(stats=stats, config=config)


def test_responses_that_could_not_be_scored_and_are_not_trained_on_are_not_told_here():
    assert not [
        found for found in findings(unscored(on_failed_sibling="retry", errors=160.0)) if found.topic == "rewards"
    ]


def test_a_run_that_went_back_says_why_and_what_it_cost():
    deaths = [Lineage(n, policy_version=8, cause=f"model_worker/{n} died", steps_lost=20) for n in (1, 2, 3)]
    (found,) = findings(healthy(lineages=[Lineage(0), *deaths]))
    assert (found.severity, found.topic, found.turn) == ("warning", "went back", ["trainer.save_every"])
    assert "3 times, and made 60 steps again; the last time to step 8, because model_worker/3 died" in found.text
    (once,) = findings(healthy(lineages=[Lineage(1, cause="controller/0 died", steps_lost=1, groups_kept=7)]))
    assert (once.severity, once.turn) == ("note", [])
    assert "made 1 steps again with 7 groups that were not generated again" in once.text


def test_a_healthy_run_has_nothing_to_tell():
    assert findings(healthy()) == []
    assert findings(RunFigures()) == []


def counted(**stats):
    return healthy(stats={"rollout/0": {"groups_done_total": 100.0} | stats})


COLLAPSING = Health(state="collapsing", since=7, signs=["reward fallen"], turn=["trainer.lr=1"])
ENGINE = "engine against trainer"


@pytest.mark.parametrize(
    ("run", "severity", "topic", "figure", "key"),
    [
        (healthy(state="failed", message="gserver/0 died"), "bad", "end", "gserver/0 died", "logs"),
        (healthy(health=COLLAPSING), "bad", "policy", "step 7: reward fallen", "trainer.lr"),
        (healthy(health=Health(state="warning", turn=["trainer.lr=1"])), "warning", "policy", "0", "trainer.lr"),
        (with_steps(effective_sample_size=0.8), "note", "effective sample size", "80%", advice(CONFIG)[0]),
        (with_steps(effective_sample_size=0.4), "warning", "effective sample size", "0.40", "max_staleness=2 (now 4)"),
        (with_steps(grad_norm_ratio=7.0), "note", "gradient", "7.0 times", "trainer.lr=5e-05 (now 0.0001)"),
        (with_steps(grad_norm=2.0), "note", "gradient", "100% of the last 20 steps", "grad_clip=2 (now 1)"),
        (with_steps(kl=1.4), "warning", "KL", "1.40", "algorithm.kl_coef=0.2 (now 0.1)"),
        (with_steps(entropy=0.01, reward_mean=0.5), "warning", "entropy", "1%", "algorithm.entropy_coef=0.003"),
        (with_steps(**{"logprob_diff_mean/gserver_1": 0.4}), "bad", ENGINE, "gserver/1", "gserver.dtype"),
        (with_steps(sampling_diff_mean=0.2), "bad", ENGINE, "0.2 nats", "chat_template"),
        (with_steps(gservers_compared=0.0, gservers_not_compared=2.0), "note", ENGINE, "2 gservers", ""),
        (healthy(failed_updates=3), "warning", "weight updates", "3", "limits.update_seconds"),
        (with_steps(groups_with_contrast=4.0), "warning", "contrast", "88%", "rollout.group_size=16 (now 8)"),
        (healthy(response_lengths=[[100, 3, 7], [100, 4, 4]]), "warning", "length", "33%", "max_new_tokens=200"),
        (with_steps(tokens_special=30.0), "warning", "special tokens", "3%", "stop_token_ids"),
        (healthy(evaluations=[make_report(3, cut_share=0.5)]), "note", "evaluation", "50%", "max_new_tokens"),
        (counted(groups_rejected_total=100.0), "warning", "rejected groups", "50%", "rollout.reward"),
        (counted(siblings_retried_total=160.0), "warning", "failed siblings", "20%", "rollout.reward.timeout_seconds"),
        (counted(groups_shrunk_total=34.0), "warning", "failed siblings", "34%", "rollout.reward.timeout_seconds"),
        (unscored(on_failed_sibling="zero", errors=160.0), "warning", "rewards", "20%", "rollout.reward.function"),
        (unscored(on_failed_sibling="zero", errors=800.0), "bad", "rewards", "100%", "rollout.reward.function"),
        (with_steps(tokens_masked=100.0), "note", "staleness", "10%", "max_staleness=8 (now 4)"),
        (with_steps(tokens_masked=400.0), "warning", "staleness", "40%", "shorter responses"),
        (with_steps(tokens_dropped=250.0), "warning", "staleness", "20%", "staleness.over_age"),
        (with_steps(wait_seconds=1.5), "note", "pace", "75%", "gserver.count=2 (now 1)"),
        (healthy(generation_busy=0.3), "note", "pace", "30%", "rollout.max_concurrent_groups"),
        (with_steps(wait_seconds=1.5, admitted_staleness=4.0), "note", "pace", "75%", "max_staleness=8 (now 4)"),
        (with_steps(wait_seconds=1.5, admitted_staleness=1.0), "note", "pace", "75%", "most_drift=0.2 (now 0.1)"),
        (with_steps(pause_seconds=0.6), "note", "weight updates", "30%", "weights.pause_mode"),
        (with_steps(blocked_seconds=0.6), "note", "weight updates", "30%", "weights.mode"),
        (healthy(restarts={"gserver/1": 1}), "note", "restarts", "logs/gserver-1.log", ""),
        (healthy(restarts={"gserver/1": 3}), "warning", "restarts", "3 times", ""),
        (healthy(disk_free=2**29), "warning", "disk", "0.5 GiB", "trainer.keep_checkpoints"),
        (healthy(disk_free=2**20), "bad", "disk", "0.0 GiB", "metrics.rollouts_mb"),
        (healthy(disk_free=2**35), "warning", "disk", "32.0 GiB", "more free disk"),
        (
            healthy(stats={"model_worker/0": {"rollouts_lost_total": 5.0}}),
            *("note", "rollouts", "5", "metrics.rollouts_per_step"),
        ),
        (healthy(stats={"model_worker/0": {"groups_refused_total": 5.0}}), "warning", "stream", "5", ""),
    ],
)
def test_a_finding_has_its_figure_and_the_key_to_change(run, severity, topic, figure, key):
    (found,) = findings(run)
    assert (found.severity, found.topic) == (severity, topic)
    assert figure in found.text
    assert key in " ".join(found.turn)


KEY_ERROR = FrequentFailure("KeyError: 'level'", 3, "row 12 (seq 40): prompt '417=', answer '714'")
TIMEOUT = FrequentFailure("RewardTimeout: no answer within rollout.reward.timeout_seconds = 10", 1, "row 2 (seq 1)")


def failing(*, on_failed_sibling="reject", cause=KEY_ERROR, rejected=3.0, errors=3.0, **changed):
    """A run of 100 groups of 8, with failures."""
    config = from_dict({"rollout": {"group_size": 8, "on_failed_sibling": on_failed_sibling}})
    stats = {"groups_done_total": 100.0, "groups_rejected_total": rejected, "reward_errors_total": errors}
    figures = {"stats": {"rollout/0": stats}, "config": config, "failures": {"rollout/0": cause}}
    return healthy(**(figures | changed))


def test_the_most_frequent_error_is_told_with_its_count_and_a_row():
    (found,) = findings(failing())
    assert (found.severity, found.topic) == ("warning", "rejected groups")
    assert found.text == (
        "3% of the groups were given up (3): most often KeyError: 'level' (3 times, first for row 12 (seq 40): "
        "prompt '417=', answer '714')"
    )
    assert "streamrl check" in found.turn[0]
    assert not any("timeout" in turn for turn in found.turn)
    (found,) = findings(failing(on_failed_sibling="zero", rejected=0.0, errors=40.0))
    assert (found.topic, found.text[:20]) == ("rewards", "5% of the responses ")
    assert "most often KeyError: 'level' (3 times" in found.text
    assert findings(failing(rejected=1.0)) == []


def test_what_is_to_be_changed_is_what_the_error_names():
    (found,) = findings(failing(cause=TIMEOUT))
    assert found.turn == ["rollout.reward.timeout_seconds"]
    assert "(once, first for row 2 (seq 1))" in found.text
    prompt = FrequentFailure("DataError: 9 tokens, more than data.max_prompt_tokens = 4", 2, "row 2")
    (found,) = findings(failing(cause=prompt))
    assert found.turn == ["data.max_prompt_tokens"]


def test_errors_are_counted_over_all_workers():
    other = msgspec.structs.replace(KEY_ERROR, count=5, example="row 9")
    frequent = msgspec.structs.replace(TIMEOUT, count=7)
    (found,) = findings(failing(failures={"rollout/0": KEY_ERROR, "rollout/1": frequent, "rollout/2": other}))
    assert "KeyError: 'level' (8 times, first for row 12" in found.text


def test_held_out_prompts_that_failed_have_their_error():
    (found,) = findings(healthy(evaluations=[make_report(3, cut_share=0.0, rejected=1, prompts=19, failure=KEY_ERROR)]))
    assert found.text.startswith("5% of the held-out prompts failed at version 3: most often KeyError: 'level' (3")


def test_a_penalty_for_length_is_advised_only_if_the_reward_function_scores():
    for section, advised in (({}, True), ({"reward_model": {"path": "judge"}}, False)):
        sampling = {"rollout": {"sampling": {"max_new_tokens": 100}}}
        (found,) = findings(healthy(response_lengths=[[100, 3, 7], [100, 4, 4]], config=from_dict(sampling | section)))
        assert ("rollout.reward.overlong_tokens" in found.turn) == advised


def test_a_target_of_the_kl_counts_instead_of_the_limit():
    config = from_dict({"algorithm": {"kl_coef": 0.1, "kl_target": 0.01}})
    (found,) = findings(with_steps(kl=0.02) and healthy(steps=[HEALTHY | {"kl": 0.02}] * WINDOW, config=config))
    assert "2.0 times algorithm.kl_target" in found.text
    assert findings(healthy(steps=[HEALTHY | {"kl": 0.012}] * WINDOW, config=config)) == []


def test_a_policy_that_has_learned_its_task_may_be_sure_of_itself():
    steps = [HEALTHY | {"entropy": 0.001}] * WINDOW
    assert findings(healthy(steps=steps, best_reward=0.82)) == []
    assert [f.topic for f in findings(healthy(steps=steps, best_reward=0.95))] == ["entropy"]


def test_a_policy_that_falls_apart_is_not_told_twice():
    health = Health(state="warning", since=7, signs=["effective sample size 0.40"], turn=["trainer.lr=1"])
    run = healthy(steps=[HEALTHY | {"effective_sample_size": 0.4, "grad_norm_ratio": 9.0}] * WINDOW, health=health)
    assert [found.topic for found in findings(run)] == ["policy"]


def test_a_few_steps_are_not_judged():
    bad = HEALTHY | {"effective_sample_size": 0.1, "wait_seconds": 1.9, "groups_with_contrast": 0.0}
    assert findings(healthy(steps=[bad] * (ENOUGH - 1))) == []
    assert len(findings(healthy(steps=[bad] * ENOUGH))) == 3


def test_old_steps_are_not_judged():
    bad = HEALTHY | {"effective_sample_size": 0.1}
    assert findings(healthy(steps=[bad] * 50 + [HEALTHY] * WINDOW)) == []


def test_the_worst_comes_first():
    run = healthy(
        steps=[HEALTHY | {"wait_seconds": 1.9, "groups_with_contrast": 0.0}] * WINDOW, disk_free=0, failed_updates=1
    )
    found = findings(run)
    assert [f.severity for f in found] == ["bad", "warning", "warning", "note"]
    assert str(found[0]).startswith("0.0 GiB are free")
    assert "; try more free disk or " in str(found[0])
    assert str(Finding("note", "x", "all is well")) == "all is well"


@given(
    st.lists(
        st.dictionaries(st.sampled_from([*HEALTHY, "logprob_diff_mean/gserver_7", "own"]), st.floats(), max_size=30),
        max_size=30,
    ),
    st.booleans(),
    st.dictionaries(
        st.sampled_from(["rollout/0", "model_worker/1", "gserver/2", "odd"]),
        st.dictionaries(st.text(max_size=3) | st.sampled_from(["groups_done_total"]), st.floats(0, 1e12)),
    ),
)
@example([{"reward_mean": 0.0}] * 3 + [{"reward_mean": 9e307}] * 2, False, {})
@settings(max_examples=100, deadline=None)
def test_no_figures_break_it(steps, configured, stats):
    run = RunFigures(steps=steps, first=steps[:3], stats=stats, config=CONFIG if configured else None, best_reward=0.0)
    for found in findings(run):
        assert found.text
        assert found.severity in ("bad", "warning", "note")


@pytest.mark.parametrize("idle", [{"generation_busy": 0.3}, {"steps": [HEALTHY | {"wait_seconds": 1.5}] * WINDOW}])
def test_a_synchronous_run_is_told_nothing_that_its_graph_forbids(idle):
    config = from_dict({"trainer": {"graph": "synchronous"}, "staleness": {"max_staleness": 0}})
    (found,) = findings(healthy(config=config, **idle))
    (staleness,) = [turned for turned in found.turn if "max_staleness" in turned]
    assert staleness == 'trainer.graph="asynchronous" with staleness.max_staleness=1 (now 0)'
