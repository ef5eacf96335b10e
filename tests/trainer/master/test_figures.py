"""What a training step reports."""

from __future__ import annotations

from streamrl.trainer.master.figures import sample_of_lengths
from tests.groups import make_meta


def test_lengths_are_written_down_group_by_group() -> None:
    assert sample_of_lengths([make_meta(0, [3, 4]), make_meta(1, [5, 6])]) == [[3, 4], [5, 6]]
    assert sample_of_lengths([]) == []
