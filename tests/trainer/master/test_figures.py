"""What a training step reports."""

from __future__ import annotations

from streamrl.config import Config
from streamrl.records.metrics import LENGTHS_KEPT
from streamrl.trainer.master.batches import BatchFormer
from streamrl.trainer.master.figures import batch_metrics, sample_of_lengths
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


def test_special_tokens_of_the_batch_are_counted() -> None:
    former = BatchFormer(Config())
    batch = [meta(0, [3, 4], special=2), meta(1, [5, 6], special=1)]
    assert batch_metrics(batch, former, policy_version=0)["tokens_special"] == 3


def test_lengths_are_written_down_group_by_group() -> None:
    assert sample_of_lengths([meta(0, [3, 4]), meta(1, [5, 6])]) == [[3, 4], [5, 6]]
    assert sample_of_lengths([]) == []


def test_lengths_of_a_large_batch_are_a_sample_of_whole_groups() -> None:
    batch = [meta(seq, [seq, seq, seq]) for seq in range(1, 1000)]
    kept = sample_of_lengths(batch)
    assert kept == [[seq, seq, seq] for seq in range(1, len(kept) + 1)]
    assert LENGTHS_KEPT <= 3 * len(kept) < LENGTHS_KEPT + 3
