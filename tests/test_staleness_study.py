"""The study of staleness: its runs, the figures that it keeps of them, and its verdict on these."""

from __future__ import annotations

import json
import multiprocessing
import sys
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.config import AlgorithmConfig, load
from tests.runs import write_run
from tests.test_figures import benchmark

staleness = benchmark("staleness")
tables = benchmark("tables")
Cell = staleness.Cell

CREDIT_AND_PENALTIES = {
    "router_aux_loss_coef",
    *("advantage", "gamma", "gae_lambda", "entropy_coef", "minibatches", "epochs", "dual_clip", "on_collapse"),
    *("kl_coef", "kl_estimator", "kl_in", "kl_target", "kl_horizon", "ref_update_every", "ref_update_share"),
}
"""Settings of [algorithm] in which the objectives do not differ."""

LEARNS = [0.1, 0.3, 0.5, 0.7, 0.92, 0.94, 0.96, 0.98, 0.99, 0.99, 0.99, 0.99]
FALLS = [*LEARNS[:-3], 0.8, 0.5, 0.4]


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


def test_the_study_has_each_run_once_and_what_it_is_compared_with():
    cells = staleness.study()
    assert len(set(cells)) == len(cells)
    assert len({cell.seed for cell in cells}) >= 3
    for cell in cells:
        assert cell._replace(objective="default", eta=0, over_age="mask") in cells, "it has no synchronous run"
    for task in staleness.SCRATCH:
        assert {cell.eta for cell in cells if cell.task == task and cell.objective == "default"} == {0, 1, 2, 4, 8, 16}
    assert {cell.objective for cell in cells if cell.task == staleness.SIDE_BY_SIDE} == set(staleness.OBJECTIVES)


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


def test_objectives_besides_the_default_name_all_that_they_consist_of():
    """A new setting of the objective has to be named in all of them, or they would change with its default."""
    named = {field.name for field in msgspec.structs.fields(AlgorithmConfig)} - CREDIT_AND_PENALTIES
    assert staleness.OBJECTIVES["default"] == {}
    for name, settings in staleness.OBJECTIVES.items():
        assert name == "default" or set(settings) == named, f"{name} lacks or has too much: {named ^ set(settings)}"


def test_only_chooses_runs():
    cells = staleness.study()
    found = staleness.chosen(cells, ["task=sort,copy", "eta=4", "seed=1", "objective=default"])
    assert found == [Cell(task, "default", 4, "mask", 1) for task in ("copy", "sort")]
    assert staleness.chosen(cells, []) == cells


@pytest.mark.parametrize(
    ("only", "said"),
    [
        (["speed=1"], "fields are task, objective, eta"),
        (["eta"], "write FIELD=VALUE"),
        (["task=sort,swim"], r"there is no swim; known: .*copy"),
        (["task=repeat", "objective=gspo"], "no run of the study is all of that at once"),
    ],
)
def test_only_says_what_is_wrong(only, said):
    with pytest.raises(SystemExit, match=said):
        staleness.chosen(staleness.study(), only)


# --- which runs are finished ---------------------------------------------------------------------


@pytest.fixture
def package(tmp_path):
    (tmp_path / "launch").mkdir()
    (tmp_path / "loss.py").write_text('"""A module."""\nCAP = 5.0  # cut there\n\n\ndef f():\n    """Return it."""\n')
    (tmp_path / "fast.c").write_text("int x = 1;\n")
    (tmp_path / "launch" / "run.py").write_text("x = 1\n")
    return tmp_path


@pytest.mark.parametrize(
    ("file", "text", "same"),
    [
        ("loss.py", 'CAP = 5.0\n\n\ndef f():\n    """Otherwise said."""\n', True),
        ("loss.py", "CAP = 2.0\n\n\ndef f():\n    pass\n", False),
        ("fast.c", "int x = 2;\n", False),
        ("launch/run.py", "x = 2\n", True),
        ("new.py", "", False),
        ("notes.txt", "x", True),
    ],
)
def test_the_code_is_what_may_change_learning(package, file, text, same):
    before = staleness.code_digest(package)
    (package / file).write_text(text)
    assert (staleness.code_digest(package) == before) == same


def test_settings_count():
    cell = Cell("copy", "default", 4, "mask", 0)
    others = [cell._replace(objective="ppo"), cell._replace(seed=1)]
    digests = [staleness.settings_digest(each, steps=10) for each in (cell, *others)]
    digests.append(staleness.settings_digest(cell, steps=11))
    assert len(set(digests)) == 4
    assert staleness.settings_digest(cell, steps=10) == digests[0]


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


def test_a_finished_run_is_kept_and_replaced_by_a_later_one_of_its_cell(folder):
    first, second = staleness.study()[:2]
    assert staleness.Results("staleness").rows() == []
    staleness.Results("staleness").add(row(first), {"quick": False})
    staleness.Results("staleness").add(
        row(second, commit={"id": "def", "date": "2026-02-01", "changed": True}), {"quick": False}
    )
    staleness.Results("staleness").add(row(first, FALLS), {"quick": False})
    rows = staleness.Results("staleness").rows()
    assert [staleness.cell_of(found) for found in rows] == [second, first]
    assert rows[1]["curve"]["reward"] == FALLS
    written = json.loads((folder / "latest" / "staleness.json").read_text())
    assert written["commit"] == {"id": "abc and def", "date": "2026-02-01", "changed": True}
    assert (folder / "latest" / "staleness.json").read_text().count("\n") < 40, "a row takes a line"
    assert [path.name for path in (folder / "latest").glob("staleness.*")] == ["staleness.json"]


def test_results_go_on_from_those_that_are_kept(folder):
    first, second = staleness.study()[:2]
    staleness.Results("staleness").add(row(first), {})
    (folder / "latest" / "staleness.json").rename(folder / "kept" / "staleness.json")
    staleness.Results("staleness").add(row(second), {})
    assert [staleness.cell_of(found) for found in staleness.Results("staleness").rows()] == [first, second]


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


def test_a_run_that_fails_says_why(monkeypatch):
    task = staleness.TASKS["copy"]
    monkeypatch.setitem(staleness.TASKS, "copy", task._replace(settings={"trainer.lr": -1}))
    with pytest.raises(staleness.RunFailed, match=r"copy, default, η 4(?s:.)*trainer\.lr"):
        staleness.run(Cell("copy", "default", 4, "mask", 0), steps=1)


def test_runs_that_fail_do_not_end_the_others(monkeypatch):
    def run(cell, *, steps):
        if cell.eta == 1:
            raise staleness.RunFailed("it fell over")
        return row(cell)

    monkeypatch.setattr(staleness, "run", run)
    cells = staleness.study()[:4]
    found = dict(staleness.run_all(cells, jobs=2, quick=True))
    assert [cell.eta for cell in cells if isinstance(found[cell], staleness.RunFailed)] == [1]


def test_runs_of_pretrained_models_have_the_machine_for_themselves(monkeypatch):
    running, most = [], {}

    def run(cell, *, steps):
        running.append(cell)
        most[cell] = len(running)
        time.sleep(0.05)
        most[cell] = max(most[cell], len(running))
        running.remove(cell)
        return row(cell)

    monkeypatch.setattr(staleness, "run", run)
    cells = [cell for cell in staleness.study() if cell.seed == 0 and cell.eta in (0, 4)][:4]
    cells += [cell for cell in staleness.study() if cell.task in staleness.PRETRAINED][:3]
    assert set(dict(staleness.run_all(cells, jobs=4, quick=True))) == set(cells)
    assert {most[cell] for cell in cells if cell.task in staleness.PRETRAINED} == {1}
    assert max(most.values()) > 1


# --- what results say ----------------------------------------------------------------------------

rewards = st.lists(st.floats(0.0, 1.0), min_size=3, max_size=40)


@given(rewards)
def test_smoothed_rewards_stay_within_the_rewards(values):
    found = staleness.smoothed(values)
    assert len(found) == len(values)
    assert min(values) - 1e-9 <= min(found)
    assert max(found) <= max(values) + 1e-9
    assert found[-1] == pytest.approx(sum(values[-3:]) / 3)


@given(rewards, st.floats(0.0, 1.0))
def test_the_first_step_at_a_level_is_the_first(values, level):
    step = staleness.first_at(values, level)
    found = staleness.smoothed(values)
    assert all(value < level for value in found[2 : (step or len(values) + 1) - 1])
    assert step is None or found[step - 1] >= level


def test_what_was_lost_after_it_was_learned():
    assert staleness.worst_after_learned([0.1, 0.5, 0.9]) is None
    assert staleness.worst_after_learned([0.0, 1.0, 1.0, 1.0, 0.7, 0.7, 0.7, 1.0]) == pytest.approx(0.7)
    assert staleness.worst_after_learned([0.0, 1.0, 1.0, 1.0, 0.7, 1.0]) == pytest.approx(0.9), "one step is noise"
    assert staleness.worst_after_learned([1.0]) is None, "one step is not three"


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


def test_runs_of_one_kind_are_one_line():
    kind = ("copy", "default", 4, "mask")
    rows = [row(Cell(*kind, 0), LONG), row(Cell(*kind, 1), COLLAPSES), row(Cell(*kind, 2), [0.1] * 50)]
    rows.append(row(Cell("copy", "default", 0, "mask", 0), LONG))
    synchronous, found = staleness.summaries(rows)
    assert synchronous.kind.eta == 0
    assert synchronous.area.values == [pytest.approx(1.0)]
    assert (found.runs, found.collapsed) == (3, 1)
    assert found.worst.said().endswith("1 never")
    assert found.steps_to_nearly.values == [7, 7]
    assert found.area.values[0] > 1, "its curve is that of a policy four versions ahead"
    assert found.error.values[1] == pytest.approx(0.6)


def test_the_verdict_has_one_answer_for_each_claim():
    rows = [row(cell, LONG) for cell in staleness.study() if cell.objective == "default" and cell.over_age == "mask"]
    verdict = staleness.verdict(rows)
    assert "**Holds:** area at η = 1, plateau error at η = 1" in verdict
    assert "**Fails:**" not in verdict
    assert "missing" not in verdict
    worse = [row(staleness.cell_of(one), COLLAPSES if one["eta"] == 4 else LONG) for one in rows]
    assert "**Fails:** area at η = 4, plateau error at η = 4, runs that collapse at η = 4." in staleness.verdict(worse)


def test_runs_that_are_missing_are_counted():
    rows = [row(cell, LONG) for cell in staleness.study()[:40]]
    assert "runs of this part of the study are missing" in staleness.verdict(rows)
    assert staleness.verdict([]) == "Nothing has been measured."


def test_tasks_that_no_synchronous_run_learns_decide_nothing():
    cells = [Cell("repeat", "default", eta, "mask", seed) for eta in (0, 4) for seed in range(8)]
    rows = [row(cell, [0.5] * 50 if cell.eta == 0 else [0.1] * 50) for cell in cells]
    assert staleness.found_claims(rows) == []


@pytest.mark.parametrize(
    "render", ["staleness_claims", "staleness_default", "staleness_objectives", "staleness_over_age"]
)
def test_tables_are_whole(render):
    rows = [row(cell) for cell in staleness.study()]
    table, *_ = getattr(tables, render)({"rows": rows}).split("\n\n")
    widths = {line.count("|") for line in table.splitlines()}
    assert len(widths) == 1
    assert len(table.splitlines()) > 5
    assert getattr(tables, render)({"rows": []}) == tables.NOT_MEASURED


def test_the_plot_is_drawn(tmp_path):
    staleness.plot([row(cell) for cell in staleness.study()[:60]], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_a_dry_run_runs_nothing(monkeypatch, capsys, folder):
    monkeypatch.setattr(staleness, "run", lambda *_, **__: pytest.fail("something was run"))
    monkeypatch.setattr(sys, "argv", ["staleness.py", "--dry-run", "--only", "task=copy", "eta=4"])
    staleness.main()
    assert "copy, default, η 4, mask, seed 2" in capsys.readouterr().out
