"""What a training step reports."""

from __future__ import annotations

from streamrl.trainer.master.figures import sample_of_lengths
from streamrl.types import SampleMeta


def meta(seq: int, lengths: list[int], *, special: int = 0) -> SampleMeta:
    return SampleMeta(
        seq=seq,
        head=0,
        worker="rollout/0",
        size=len(lengths),
        tokens=sum(lengths),
        rewards=[0.0] * len(lengths),
        response_lengths=lengths,
        version_counts={0: sum(lengths)},
        generation_seconds=1.0,
        special_tokens=special,
    )


def test_lengths_are_written_down_group_by_group() -> None:
    assert sample_of_lengths([meta(0, [3, 4]), meta(1, [5, 6])]) == [[3, 4], [5, 6]]
    assert sample_of_lengths([]) == []
