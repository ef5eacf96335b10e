"""Which weights belong to the history of a run that went back to checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import DataError
from streamrl.records import lineage as lineages
from streamrl.records.lineage import FIRST, Lineage, in_history, label_of, version_of


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), max_size=8))
def test_history_is_what_was_trained_on_the_way(moves: list[tuple[int, int]]) -> None:
    """Each move: steps that the lineage makes, and then how many versions the run goes back."""
    history = [(0, 0)]
    made = {(0, 0)}
    found: list[Lineage] = []
    number = 0
    for steps, back in moves:
        for _ in range(steps):
            history.append((history[-1][0] + 1, number))
            made.add(history[-1])
        history = history[: max(1, len(history) - back)]
        number += 1
        version, parent = history[-1]
        found.append(Lineage(number, policy_version=version, parent=parent))
    for version, maker in made:
        assert in_history(found, policy_version=version, lineage=maker) == ((version, maker) in history)
    newest = found[-1] if found else FIRST
    assert newest.label(history[-1][0]) == label_of(*history[-1])
    assert newest.label(history[-1][0] + 1) == label_of(history[-1][0] + 1, number)


@given(st.integers(0, 10**6), st.integers(0, 1000))
def test_labels_tell_versions_of_different_lineages_apart(version: int, lineage: int) -> None:
    label = label_of(version, lineage)
    assert version_of(label) == version
    assert label != label_of(version, lineage + 1)
    assert label != label_of(version + 1, lineage)
    assert label_of(version, 0) == str(version)


@pytest.mark.parametrize("label", ["", "default", "mixed", "-1", "1.", ".1", "1.x", "1.2.3", "\u0661", "1 "])
def test_other_names_are_no_versions(label: str) -> None:
    with pytest.raises(ValueError, match="names no policy version"):
        version_of(label)


def test_lineages_are_recorded(tmp_path: Path) -> None:
    first = lineages.begin(tmp_path, policy_version=3, parent=0, cause="model_worker/0 died", steps_reached=7)
    assert (first.number, first.steps_lost) == (1, 4)
    second = lineages.begin(tmp_path, policy_version=9, parent=5, cause="", steps_reached=2)
    assert (second.number, second.steps_lost) == (6, 0)
    assert lineages.read(tmp_path) == [first, second]
    lineages.record_kept(tmp_path, second, groups=3)
    assert [lineage.groups_kept for lineage in lineages.read(tmp_path)] == [0, 3]


def test_a_line_that_was_cut_off_does_not_cost_the_next_one(tmp_path: Path) -> None:
    (tmp_path / "lineages.jsonl").write_bytes(b'{"number": 1, "pol')
    third = lineages.begin(tmp_path, policy_version=3, parent=0, cause="", steps_reached=3)
    assert lineages.read(tmp_path) == [third]


def test_a_lineage_that_cannot_be_recorded_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lineages.LineFile, "append", lambda file, line: None)  # a full disk: the line waits in memory
    with pytest.raises(DataError, match="make room there, and start the run again with --resume"):
        lineages.begin(tmp_path, policy_version=3, parent=0, cause="", steps_reached=3)
