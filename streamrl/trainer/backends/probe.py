"""Whether a model of transformers computes packed rows like single ones.

Packed rows hold many trajectories, which only the attention must keep apart. A model with layers that carry a state
from token to token (convolutions, state spaces, linear attention), or with an attention of its own, would mix them. So
a small random copy of the model computes two trees of trajectories packed and one by one, in float32.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from streamrl.architecture import MODEL_TYPES
from streamrl.causal_models import body_of, load_config, random_model, small_config, token_logits
from streamrl.errors import ModelError
from streamrl.trainer.backends.attention import TREE_ATTENTION, TreeMask
from streamrl.trainer.backends.context import ContextGroup
from streamrl.trainer.packing import MicroBatch

TOLERANCE = 1e-4
"""Largest difference between log-probabilities, in float32."""
SHARED, BRANCH, ALONE = 9, 7, 14
"""Tokens of the beginning that two trajectories share, of their ends, and of a trajectory in another tree. The
trajectories are longer than the sliding windows of small copies."""


@cache
def packing_problem(folder: Path) -> str | None:
    """Return why the model in `folder` cannot compute packed rows; None if it can. Raises `ModelError` if transformers
    cannot make the model."""
    config = load_config(folder)
    if config.model_type in MODEL_TYPES and "sliding_attention" not in (getattr(config, "layer_types", None) or ()):
        return None
    try:
        return problem_of(small_config(config))
    except ModelError as error:
        return str(error)


def problem_of(config: Any) -> str | None:
    """Return why a model for `config`, a small copy, cannot compute packed rows; None if it can."""
    reference = random_model(config)
    vocabulary = config.vocab_size
    tokens = np.random.default_rng(0).integers(0, vocabulary, (3, SHARED + BRANCH + ALONE))
    try:
        packed = random_model(config, attention=TREE_ATTENTION)
        with torch.no_grad():
            found = _packed(packed, tokens)
            wanted = torch.cat([_alone(reference, path) for path in _paths(tokens)])
    except Exception as error:  # tolerance point: code of any model, which this probe is there to judge
        return f"its packed rows cannot be computed ({type(error).__name__}: {error})"
    worst = float((found - wanted).abs().max())
    if worst <= TOLERANCE:
        return None
    return f"layers other than the attention connect tokens: packed log-probabilities differ by {worst:.2g}"


def _paths(tokens: Any) -> list[Any]:
    shared = tokens[0, :SHARED]
    branches = [np.concatenate((shared, tokens[row, SHARED : SHARED + BRANCH])) for row in (0, 1)]
    return [*branches, tokens[2, :ALONE]]


def _packed(model: Any, tokens: Any) -> Tensor:
    """Return the log-probabilities of all tokens after each token of each path, `[path_tokens, vocab]`."""
    first, second, alone = _paths(tokens)
    ids = np.concatenate((first, second[SHARED:], alone))
    one, both = SHARED + BRANCH, SHARED + 2 * BRANCH
    until = np.repeat([both, one, both, len(ids)], [SHARED, BRANCH, BRANCH, ALONE])
    positions = np.concatenate((np.arange(one), np.arange(SHARED, one), np.arange(ALONE)))
    none = np.zeros(0, np.int64)
    micro = MicroBatch(
        input_ids=ids[None],
        position_ids=positions[None],
        visible_until=until[None],
        row_index=none,
        column_index=none,
        group_index=none,
        target_index=none,
        target_ids=none,
    )
    hidden = body_of(model)(
        input_ids=torch.from_numpy(micro.input_ids),
        position_ids=torch.from_numpy(micro.position_ids),
        use_cache=False,
        tree=TreeMask(micro, torch.device("cpu"), ContextGroup()),
    ).last_hidden_state[0]
    columns = np.concatenate((np.arange(one), np.arange(SHARED), np.arange(one, both), np.arange(both, len(ids))))
    return token_logits(model, hidden[columns]).log_softmax(-1)


def _alone(model: Any, path: Any) -> Tensor:
    logits: Tensor = model(input_ids=torch.from_numpy(path)[None], use_cache=False).logits[0]
    return logits.log_softmax(-1)
