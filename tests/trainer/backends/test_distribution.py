"""The head: log-probabilities and entropies equal softmax, and each state's logits are computed once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from streamrl.trainer.backends import distribution
from streamrl.trainer.backends.distribution import Predictions, in_chunks, token_distribution
from streamrl.trainer.packing import IDLE, MicroBatch, pack
from tests.trainer.models import group_of

CPU = torch.device("cpu")


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 1000),
    ids=st.integers(2, 9),
    padding=st.integers(0, 3),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    scale=st.sampled_from([0.1, 3.0, 200.0]),
    of_state=st.lists(st.integers(0, 3), max_size=6).map(sorted),
)
def test_distribution_equals_softmax(
    seed: int, ids: int, padding: int, temperature: float, scale: float, of_state: list[int]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, ids + padding, generator=generator) * scale
    targets = torch.randint(0, ids, (len(of_state),), generator=generator)
    weights = torch.randn(2, len(of_state), generator=generator)
    states = torch.tensor(of_state, dtype=torch.long)
    outputs, gradients = [], []
    for ours in (True, False):
        leaf = logits.clone().requires_grad_()
        if ours:
            found = token_distribution(leaf, states, targets, count=ids, temperature=temperature, entropy_gradient=True)
        else:
            logprobs = (leaf[states, :ids].double() / temperature).log_softmax(-1)
            found = logprobs.gather(-1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)
        (found[0] * weights[0] + found[1] * weights[1]).sum().backward()
        outputs.append([tensor.detach().double() for tensor in found])
        gradients.append(leaf.grad)
    for mine, wanted in zip(*outputs, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)
    assert not gradients[0][:, ids:].any()


def siblings() -> MicroBatch:
    """Eight responses in two groups, which share the template `5 5 5`; five agree in their first token."""
    responses = [[1, 2, 3], [1, 2, 3], [1, 2, 4], [1, 6], [7], [1, 2], [8, 8], [9, 9]]
    paths = [np.array([5, 5, 5, 20 + index // 5, *response]) for index, response in enumerate(responses)]
    masks = [np.arange(len(path)) > 3 for path in paths]
    rng = np.random.default_rng(0)
    groups = [group_of(seq, rng, paths[a:b], masks[a:b], prompt=4) for seq, a, b in ((0, 0, 5), (1, 5, 8))]
    (micro,) = pack(groups, max_tokens=64, share_prefix=True)
    return micro


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
def test_each_state_passes_through_the_head_once(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(distribution, "HEAD_CHUNK_STATES", chunk)
    micro = siblings()
    passed: list[int] = []

    def predict(states: Tensor, of_state: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        assert len(states) <= chunk
        passed.extend(states[:, 0].long().tolist())
        return states[of_state, 0] * 100 + ids, of_state.double()

    predictions = Predictions.of(micro, CPU)
    columns = predictions.columns[:, None].double()
    found, _ = in_chunks(predict, columns, predictions)
    assert found.tolist() == (micro.column_index * 100 + micro.target_ids).tolist()
    assert passed == sorted(set(micro.column_index.tolist()))
    assert len(passed) < len(found)


def test_a_micro_batch_without_predictions_has_no_states() -> None:
    predictions = Predictions.of(IDLE, CPU)
    states = torch.zeros(0, 4)
    found = in_chunks(
        lambda states, of_state, ids: token_distribution(
            states, of_state, ids, temperature=1.0, entropy_gradient=False
        ),
        states,
        predictions,
    )
    assert [len(values) for values in found] == [0, 0]
