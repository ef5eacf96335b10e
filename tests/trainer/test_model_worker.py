"""What a model worker makes of a group before it trains."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from streamrl.trainer.model_worker import _comparable
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
