"""Pages have the tables of the kept results, and a ratio that has fallen is named."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"


def benchmark(name):
    """A module of benchmarks/, as its scripts see it."""
    known = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        try:
            return importlib.import_module(name)
        finally:
            for path in BENCHMARKS.glob("*.py"):
                if path.stem not in known:
                    sys.modules.pop(path.stem, None)


common = benchmark("common")
figures = benchmark("figures")
tables = benchmark("tables")
compare = benchmark("compare")
throughput = benchmark("throughput")

PAGES = sorted({table.page for table in tables.TABLES})
RESULTS = sorted(common.KEPT.glob("*.json"))


# --- tables --------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_the_tables_of_its_results(page):
    text = (ROOT / page).read_text()
    assert text == tables.rendered(page, text), f"`python benchmarks/figures.py --render` writes {page} again"


def test_every_figure_of_the_readme_is_in_a_table_that_is_made():
    section = (ROOT / "README.md").read_text().partition("## Figures")[2].partition("\n## ")[0]
    written = tables.BLOCK.sub("", section)
    assert not [line for line in written.splitlines() if line.startswith("|")]
    assert not re.findall(r"\d (?:s|ms|MiB|GiB|tokens per second)\b", written)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_say_what_was_measured_on_what(path):
    found = json.loads(path.read_text())
    assert found["commit"]["id"]
    assert re.match(r"\d{4}-\d\d-\d\dT", found["commit"]["date"])
    assert found["machine"]["processor"]
    assert found["machine"]["cores"] > 0
    assert found["settings"]
    assert not found["settings"].get("quick")


@pytest.fixture
def kept(monkeypatch, tmp_path):
    """A folder for kept results, with `latest/` in it."""
    monkeypatch.setattr(figures, "KEPT", tmp_path)
    monkeypatch.setattr(figures, "LATEST", tmp_path / "latest")
    monkeypatch.setattr(common, "LATEST", tmp_path / "latest")
    return tmp_path


MADE_UP = (tables.Table("page.md", "of-rows", "bench", tables.lines_of({"row": "{value}"})),)
PAGE = "before\n<!-- table: of-rows -->\n<!-- end of table -->\nafter\n"


def test_a_table_changes_with_its_results_and_nothing_else_does(kept):
    common.write_results("bench", {"quick": False}, [{"value": 1.5}])
    figures.keep("bench")
    first = tables.rendered("page.md", PAGE, MADE_UP, kept)
    assert first.startswith("before\n<!-- table: of-rows -->\n\n| row |\n|---|\n| 1.5 |\n\n*")
    assert first.endswith("*\n\n<!-- end of table -->\nafter\n")
    assert tables.rendered("page.md", first, MADE_UP, kept) == first
    common.write_results("bench", {"quick": False}, [{"value": 2.5}])
    assert tables.rendered("page.md", first, MADE_UP, kept) == first, "only what is kept is shown"
    figures.keep("bench")
    assert tables.rendered("page.md", first, MADE_UP, kept) == first.replace("1.5", "2.5")


def test_a_quick_run_is_not_kept(kept):
    with pytest.raises(SystemExit, match="has not been run here"):
        figures.keep("bench")
    common.write_results("bench", {"quick": True}, [])
    with pytest.raises(SystemExit, match="quick run"):
        figures.keep("bench")
    assert not (kept / "bench.json").exists()


# --- seeds of the throughput benchmark -----------------------------------------------------------


@pytest.mark.parametrize(
    ("benchmark", "rows", "missing"),
    [
        ("bench_engine", [{"tokens_per_second": {"streamrl": 2.0, "sglang": 1.0}}], ["vllm"]),
        ("bench_engine", [{"tokens_per_second": {"sglang": 1.0}}, {"tokens_per_second": {"vllm": 1.0}}], []),
        ("bench_trainer", [{"contender": "TRL"}, {"contender": "streamrl"}], ["megatron"]),
        ("bench_stream", [{"contender": "streamrl"}], []),
    ],
)
def test_a_contender_that_did_not_run_is_named(benchmark, rows, missing):
    assert figures.unmeasured(benchmark, {"rows": rows}, argparse.Namespace(without=[])) == missing
    assert figures.unmeasured(benchmark, {"rows": rows}, argparse.Namespace(without=missing)) == []


def test_runs_with_several_seeds_are_one_row():
    run = {
        "groups_per_second": 10.0,
        "step_seconds": 2.0,
        "train_seconds": 0.5,
        "generation_seconds_per_group": 0.1,
        "groups_per_batch": 8.0,
        "cores_busy": 0.25,
        "processor_seconds_per_group": 0.05,
        "oldest_token_age": 1,
        "masked_share": 0.0,
        "dropped_share": 0.0,
        "reward_final": 0.9,
    }
    others = [
        run | {"groups_per_second": 40.0, "oldest_token_age": 4, "reward_final": 0.3},
        run | {"groups_per_second": 12.0, "masked_share": 0.3},
    ]
    found = throughput.aggregate([run, *others])
    assert found["seeds"] == 3
    assert found["groups_per_second"] == 12.0
    assert found["oldest_token_age"] == 4
    assert found["masked_share"] == pytest.approx(0.1)
    reward = found["reward_final"]
    assert (reward["least"], reward["most"], reward["of_each"]) == (0.3, 0.9, [0.9, 0.3, 0.9])
    assert reward["mean"] == pytest.approx(0.7)
    row = throughput.as_row("embedded", 4, "mask", found, synchronous=throughput.aggregate([run]))
    assert row["speedup"] == pytest.approx(1.2)
    assert row["bound"] == pytest.approx(2.5), "the pipeline: 2 s / 0.8 s"
    busy = throughput.as_row("embedded", 4, "mask", found | {"cores_busy": 0.8}, synchronous=found)
    assert busy["bound"] == pytest.approx(1.25), "the cores"
    assert row["reward_final"] == reward
    assert throughput.as_row("simulated", 4, "mask", found, synchronous=found)["reward_final"] is None


# --- ratios that fell ----------------------------------------------------------------------------


ratios = st.dictionaries(st.text(max_size=3), st.floats(0.01, 100.0))


@given(kept=ratios, now=ratios)
def test_each_row_is_compared_new_or_unmeasured(kept, now):
    found = compare.compare(kept, now)
    assert {change.name for change in found.changes} | set(found.unmeasured) == set(kept)
    assert {change.name for change in found.changes} | set(found.new) == set(now)
    for change in found.changes:
        assert change.share == pytest.approx(now[change.name] / kept[change.name] - 1)
        assert change.fell == (change.share < -0.1)
    assert found.fallen == [change for change in found.changes if change.fell]


@pytest.mark.parametrize("ratios", compare.COMPARED, ids=lambda ratios: ratios.__name__)
def test_what_is_kept_has_ratios_to_compare_with(ratios):
    rows = common.read_results(common.KEPT / f"{ratios.__name__}.json")["rows"]
    found = list(ratios(rows))
    assert found
    assert len(dict(found)) == len(found), "two rows have one name"
    assert not compare.compare(dict(found), dict(found)).fallen


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """`compare.main` on one benchmark; what its quick runs find, one after another, is given."""
    (tmp_path / "bench_stream.json").write_text(json.dumps({"machine": {"processor": "other"}, "rows": [{"a": 1.0}]}))
    monkeypatch.setattr(compare, "KEPT", tmp_path)

    def bench_stream(rows):
        return [pair for row in rows for pair in row.items()]

    monkeypatch.setattr(compare, "COMPARED", {bench_stream: []})
    monkeypatch.setattr(sys, "argv", ["compare.py", "bench_stream"])

    def main(*runs):
        found = [[row] for row in runs]
        monkeypatch.setattr(compare, "measure", lambda *_: found.pop(0))
        compare.main()
        assert not found, "run less often than expected"

    return main


def test_comparing_fails_with_the_row_that_fell_twice(quick, capsys):
    with pytest.raises(SystemExit, match=r"fell by more than 10%:\nbench_stream: a"):
        quick({"a": 0.5}, {"a": 0.6})
    printed = capsys.readouterr().out
    assert "0.60" in printed
    assert "-40%" in printed
    assert "kept from other" in printed


def test_comparing_passes_where_a_second_run_did_not_fall(quick):
    quick({"a": 0.95})
    quick({"a": 0.5}, {"a": 0.97})
