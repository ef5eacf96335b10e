"""Attention with the changes of the scores that some models make: windows, capped scores and sinks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface


class ScoreRules(NamedTuple):
    """Changes of the scores that some models make."""

    window: int | None = None
    """A token sees the keys less than this number of positions before it."""
    softcap: float | None = None
    """Scores become `softcap · tanh(score / softcap)`."""
    sinks: Tensor | None = None
    """`[heads]`: a further score of each query, for a key without a value."""

    def within(self, longest: int) -> ScoreRules | None:
        """Return the rules that matter for rows of up to `longest` positions; None if there are none."""
        rules = self._replace(window=None) if self.window is not None and self.window >= longest else self
        return None if all(rule is None for rule in rules) else rules


def attend_densely(
    query: Tensor, key: Tensor, value: Tensor, sees: Tensor, *, scale: float, rules: ScoreRules
) -> Tensor:
    """Return the attention `[rows, heads, queries, value_dim]`, from queries `[rows, heads, queries, head_dim]`, and
    keys and values that may have fewer heads.

    `sees`: whether a query sees a key, `[queries, keys]` or with further dimensions before; it respects the window.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (key, value))
    scores = query @ key.transpose(2, 3) * scale
    if rules.softcap is not None:
        scores = rules.softcap * (scores / rules.softcap).tanh()
    scores = scores.masked_fill(~sees, -torch.inf)
    if rules.sinks is not None:
        sinks = rules.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(len(scores), -1, scores.shape[2], 1)
        scores = torch.cat((scores, sinks), -1)
    shares = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
    return shares[..., : key.shape[2]] @ value


def register_attention(name: str, keyword: str) -> None:
    """Register an attention function in transformers as `name`, which then makes no mask of its own.

    A forward pass gets, as its argument `keyword`, the object whose `attend` computes the attention.
    """

    def attention(
        _layer: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        _mask: Tensor | None,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        position_bias: Tensor | None = None,
        **more: Any,
    ) -> tuple[Tensor, None]:
        if position_bias is not None:  # the probe at the start catches it, and the model is computed without this
            raise NotImplementedError("attention with a position bias")
        rules = ScoreRules(sliding_window, softcap, s_aux)
        return more[keyword].attend(query, key, value, scale=scaling, rules=rules).transpose(1, 2), None

    AttentionInterface.register(name, attention)
