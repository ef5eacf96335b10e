"""What a model worker makes of a group before it trains."""

from __future__ import annotations

import errno

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.config import from_dict
from streamrl.errors import TrainingError
from streamrl.progress import Progress
from streamrl.stream_dataset import StreamDataset
from streamrl.trainer.calls import Save
from streamrl.trainer.model_worker import ModelWorker, _comparable
from tests.trainer.models import random_group


@given(st.integers(0, 10_000), st.integers(0, 2), st.booleans())
def test_only_responses_of_one_version_are_compared(seed, version, gaps):
    group = random_group(0, np.random.default_rng(seed), longest=4, gaps=gaps, versions=(0, 3))
    got = _comparable(group, version)
    start = 0
    for length in group.seqlens.tolist():
        mask = group.packed_loss_mask[start : start + length]
        versions = group.packed_policy_versions[start : start + length]
        pure = {int(v) for v, sampled in zip(versions, mask, strict=True) if sampled} == {version}
        assert got[start : start + length].tolist() == [pure and bool(sampled) for sampled in mask]
        start += length


async def test_a_full_disk_leaves_earlier_checkpoints_whole_and_says_what_to_do(tmp_path):
    class FullDisk:
        def save(self, folder):
            (folder / "config.json").write_text("{")
            raise OSError(errno.ENOSPC, "No space left on device")

    dataset = StreamDataset(rank=0, capacity_groups=1)
    worker = ModelWorker(from_dict({}), index=0, model_dir=tmp_path, dataset=dataset, client=None)
    worker._backend = FullDisk()
    earlier = tmp_path / "checkpoints" / "final"
    earlier.mkdir(parents=True)
    (earlier / "config.json").write_text("whole")
    progress = Progress(policy_version=1, trained=[], rejected=[], prompts="")
    with pytest.raises(TrainingError, match=r"cannot be written \(.*No space left.*--resume"):
        worker._save(Save(str(earlier), progress))
    assert (earlier / "config.json").read_text() == "whole"
    await worker.close()
