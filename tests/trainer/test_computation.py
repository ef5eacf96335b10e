"""What a model worker makes of groups before and after it computes: comparison, users' functions, checkpoints."""

from __future__ import annotations

import errno

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.config import from_dict
from streamrl.errors import TrainingError
from streamrl.progress import Progress
from streamrl.trainer import computation
from streamrl.trainer.calls import Save
from streamrl.trainer.computation import Computation, _comparable, call_users_function
from streamrl.trainer.graph import MFC, graph_of
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


def penalise_length(groups, inputs):
    """Each token costs a hundredth of the response's reward."""
    found = []
    for group, rewards in zip(groups, inputs["rewards"], strict=True):
        found.append(np.repeat(rewards - 0.01 * group.seqlens, group.seqlens))
    return {"advantages": found}


def too_short(groups, inputs):
    return {"advantages": [np.zeros(3) for _ in groups]}


def another_key(groups, inputs):
    return {"values": []}


def users(function):
    name = f"{__name__}:{function}"
    return MFC("mine", "actor", "function", frozenset({"rewards"}), frozenset({"advantages"}), function=name)


def test_a_users_function_gives_its_keys():
    group = random_group(0, np.random.default_rng(1))
    found = call_users_function(users("penalise_length"), [group], {"rewards": [group.rewards]})
    assert found["advantages"][0].shape == (group.tokens,)
    assert found["advantages"][0].dtype == np.float32


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("too_short", "mine: .*too_short has to give one float for each token"),
        ("another_key", "mine: .*another_key has to answer a dict with advantages"),
        ("missing", "mine: .*missing cannot be imported"),
    ],
)
def test_a_users_function_that_breaks_its_promise_is_named(function, message):
    group = random_group(0, np.random.default_rng(1))
    with pytest.raises(TrainingError, match=message):
        call_users_function(users(function), [group], {"rewards": [group.rewards]})


def test_a_full_disk_leaves_earlier_checkpoints_whole_and_says_what_to_do(tmp_path, monkeypatch):
    def full(folder, weights, **_):
        (folder / "config.json").write_text("{")
        raise OSError(errno.ENOSPC, "No space left on device")

    class Roles:
        model_dir = tmp_path
        roles = {"actor": type("Actor", (), {"model": type("Model", (), {"gather_weights": lambda self: iter(())})()})}

    class Free:
        def wait(self, timeout):
            return True

    monkeypatch.setattr(computation, "export", full)
    config = from_dict({})
    worker = Computation(config, rank=0, graph=graph_of(config), assembly=Roles(), data=None, weights_free=Free())
    earlier = tmp_path / "checkpoints" / "final"
    earlier.mkdir(parents=True)
    (earlier / "config.json").write_text("whole")
    progress = Progress(policy_version=1, trained=[], rejected=[], prompts="")
    with pytest.raises(TrainingError, match=r"cannot be written \(.*No space left.*--resume"):
        worker.carry_out(Save(str(earlier), progress))
    assert (earlier / "config.json").read_text() == "whole"
