"""The study of staleness: its runs, the figures that it keeps of them, and its verdict on these."""

from __future__ import annotations

import json
import multiprocessing

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.config import AlgorithmConfig, load
from streamrl.planner.advice import AGE_COST
from tests.runs import write_run
from tests.test_figures import benchmark

staleness = benchmark("staleness")
tables = benchmark("tables")
Cell = staleness.Cell

CREDIT_AND_PENALTIES = {
    "router_aux_loss_coef",
    *("advantage", "advantage_args", "loss_args"),
    *("gamma", "gae_lambda", "entropy_coef", "minibatches", "epochs", "dual_clip", "on_collapse"),
    *("kl_coef", "kl_estimator", "kl_in", "kl_target", "kl_horizon", "ref_update_every", "ref_update_share"),
}
"""Settings of [algorithm] in which the objectives do not differ."""

LEARNS = [0.1, 0.3, 0.5, 0.7, 0.92, 0.94, 0.96, 0.98, 0.99, 0.99, 0.99, 0.99]


def row(cell, rewards=LEARNS, **others):
    """Of a run with 100 tokens and half a second in each step."""
    steps = len(rewards)
    windows = range(0, steps, staleness.EVERY)
    curve = {
        "reward": rewards,
        "seconds": [0.5 * (step + 1) for step in range(steps)],
        "tokens": [100 * min(first + staleness.EVERY, steps) for first in windows],
        "effective_sample_size": [0.5 for _ in windows],
        "grad_norm": [1.0 for _ in windows],
        "age": [float(cell.eta) for _ in windows],
    }
    figures = {
        "steps": steps,
        "mean_token_age": float(cell.eta),
        "oldest_token_age": cell.eta,
        "masked_share": 0.0,
        "dropped_share": 0.0,
        "response_tokens_trained": 5.0,
        "response_tokens_generated": 5.0,
        "wall_seconds": 100,
        "jobs": 1,
        "note": "",
        "code": "code",
        "settings": "settings",
        "commit": {"id": "abc", "date": "2026-01-01T00:00:00+00:00", "changed": False},
    }
    return {**cell._asdict(), **figures, "curve": curve, **others}


# --- what is run ---------------------------------------------------------------------------------


def test_each_run_is_a_valid_configuration_that_goes_on_to_its_last_step():
    kinds = {cell[:4]: cell for cell in staleness.study()}
    for cell in kinds.values():
        task = staleness.TASKS[cell.task]
        settings = staleness.settings_of(cell, steps=task.steps)
        config = load(staleness.ROOT / "examples" / task.example, staleness.arguments_of(settings))
        assert config.run.total_train_steps == task.steps
        assert config.run.stop_at_reward > 1e6
        assert config.staleness.max_staleness == cell.eta
        assert config.staleness.over_age == cell.over_age
        assert (config.staleness.most_drift > 0) == (cell.objective in ("default", "drift"))
        assert config.staleness.lr_by_contrast == (cell.objective == "default")


def test_objectives_besides_the_default_name_all_that_they_consist_of():
    """A new setting of the objective has to be named in all of them, or they would change with its default."""
    named = {field.name for field in msgspec.structs.fields(AlgorithmConfig)} - CREDIT_AND_PENALTIES
    assert staleness.OBJECTIVES["default"] == {}
    for name, settings in staleness.OBJECTIVES.items():
        assert name in ("default", "drift", "constant") or set(settings) == named, (
            f"{name} lacks or has too much: {named ^ set(settings)}"
        )


# --- which runs are finished ---------------------------------------------------------------------


@given(st.lists(st.sampled_from(["there", "other code", "other settings", "missing"]), min_size=1, max_size=8))
def test_what_is_left_is_what_has_no_row_of_its_settings_and_code(states):
    cells = staleness.study()[: len(states)]
    wanted = dict.fromkeys(cells, "settings")
    changed = {"there": {}, "other code": {"code": "old"}, "other settings": {"settings": "old"}}
    rows = [row(cell, **changed[state]) for cell, state in zip(cells, states, strict=True) if state != "missing"]

    def having(*these):
        return [cell for cell, state in zip(cells, states, strict=True) if state in these]

    assert staleness.left_to_run(wanted, rows, code="code") == having("missing", "other code", "other settings")
    assert staleness.left_to_run(wanted, rows, code=None) == having("missing", "other settings")


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """Where results go, with a folder of kept ones."""
    monkeypatch.setitem(staleness.latest.__globals__, "LATEST", tmp_path / "latest")
    monkeypatch.setattr(staleness, "KEPT", tmp_path / "kept")
    (tmp_path / "kept").mkdir()
    return tmp_path


def add_some(seeds):
    for seed in seeds:
        staleness.Results("staleness").add(row(Cell("copy", "default", 0, "mask", seed)), {})


def test_several_processes_lose_no_row(folder):
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=add_some, args=(range(n * 4, n * 4 + 4),)) for n in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert sorted(found["seed"] for found in staleness.Results("staleness").rows()) == list(range(12))


# --- one run -------------------------------------------------------------------------------------


def test_a_row_is_what_the_run_recorded(tmp_path):
    run_dir = write_run(tmp_path / "run", steps=12)
    cell = Cell("copy", "default", 4, "mask", 0)
    reports = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for number, report in enumerate(reports):
        report["metrics"] |= {"tokens_sampled": 100, "tokens_trained": 90, "groups": 2, "run_seconds": number + 1.04}
        report["metrics"] |= {"effective_sample_size": 1 - 0.05 * number, "reward_mean": 0.12345}
        report["token_ages"] = {"0": 30, "3": 60}
    del reports[11]["metrics"]["effective_sample_size"]  # it was not a number
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(report) + "\n" for report in reports))
    final = json.loads((run_dir / "final.json").read_text())
    final["status"]["ledger"]["dropped"] = 6
    final["tokens_dropped"] = 600
    (run_dir / "final.json").write_text(json.dumps(final))
    (run_dir / "summary.json").write_text(
        json.dumps({"mean_token_age": 2.0, "oldest_token_age": 3, "masked_share": 0.1})
    )
    found = staleness.row_of(cell, run_dir)
    assert staleness.cell_of(found) == cell
    assert found["steps"] == 12
    group_size = load(run_dir / "config.toml").rollout.group_size
    assert found["response_tokens_trained"] == pytest.approx(12 * 90 / (24 * group_size), rel=0.01)
    assert found["response_tokens_generated"] == pytest.approx((12 * 100 + 600) / (30 * group_size), rel=0.01)
    assert found["dropped_share"] == pytest.approx(6 / 30)
    curve = found["curve"]
    assert curve["reward"] == [0.123] * 12
    assert curve["seconds"] == [float(number + 1) for number in range(12)]
    assert curve["tokens"] == [500, 1000, 1200]
    assert curve["effective_sample_size"] == [0.8, 0.55, 0.5]
    assert curve["age"] == [2.0] * 3


# --- what results say ----------------------------------------------------------------------------

rewards = st.lists(st.floats(0.0, 1.0), min_size=3, max_size=40)


def test_a_reward_belongs_to_the_version_that_wrote_the_batch():
    """A run whose batches are all two versions old has the curve of a synchronous one, two steps later."""
    levels = [min(1.0, 0.02 * step) for step in range(60)]
    synchronous = row(Cell("copy", "default", 0, "mask", 0), levels)
    late = row(Cell("copy", "default", 2, "mask", 0), [0.0, 0.0, *levels[:-2]])
    expected, found = staleness.by_version(synchronous), staleness.by_version(late)
    assert len(expected) == len(found) == 60 - staleness.STALEST - 1
    assert found == pytest.approx(expected, abs=0.021)
    assert staleness.by_version(synchronous) == pytest.approx(levels[: len(expected)])


LONG = [0.1, 0.3, 0.5, 0.7, 0.9, *[0.99] * 45]
COLLAPSES = [*LONG[:-20], *[0.4] * 20]


def test_each_claim_has_an_answer():
    rows = [row(cell, LONG) for cell in staleness.study() if cell.objective == "default" and cell.over_age == "mask"]
    assert staleness.missing_runs(rows) == (0, len(rows))
    assert staleness.missing_runs(rows[2:]) == (2, len(rows))
    answers = {(eta, claim.name): claim.answer for eta, claim in staleness.found_claims(rows)}
    assert answers["1", "area"] == answers["1", "plateau error"] == answers["all", "runs that collapse"] == "holds"
    assert "fails" not in answers.values()
    worse = [row(staleness.cell_of(one), COLLAPSES if one["eta"] == 4 else LONG) for one in rows]
    fails = [(eta, claim.name) for eta, claim in staleness.found_claims(worse) if claim.answer == "fails"]
    assert fails == [
        ("4", "area"), ("4", "plateau error"), ("4", "area per second"), ("all", "runs that collapse"),
    ]  # fmt: skip


def test_a_task_counts_if_nearly_all_synchronous_runs_learn_it():
    def claims_with(late: int) -> set[str]:
        curve = [0.1] * len(LONG)
        cells = [Cell("sort", "default", eta, "mask", seed) for eta in (0, 4) for seed in range(8)]
        return {name for name, _ in staleness.found_claims([row(c, curve if c.seed < late else LONG) for c in cells])}

    assert claims_with(1) == {"4", "all"}
    assert claims_with(2) == set()


@pytest.mark.parametrize(
    "render", ["staleness_claims", "staleness_default", "staleness_objectives", "staleness_over_age"]
)
def test_tables_are_whole(render):
    rows = [row(cell) for cell in staleness.study()]
    table, *_ = getattr(tables, render)({"rows": rows}).split("\n\n")
    widths = {line.count("|") for line in table.splitlines()}
    assert len(widths) == 1
    assert len(table.splitlines()) > 4
    assert getattr(tables, render)({"rows": []}) == tables.NOT_MEASURED


def test_the_planner_has_the_price_of_age_that_the_kept_runs_show():
    rows = json.loads((staleness.KEPT / "staleness.json").read_text())["rows"]
    assert staleness.age_cost(rows) == pytest.approx(AGE_COST, abs=0.002)
