"""Attention with the changes of the scores that some models make: windows, capped scores and sinks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


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
