"""What a response's log-probabilities have to be, computed by transformers from how the response came about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch

from streamrl.transport.generation import PauseMode


@torch.inference_mode()
def replay(
    prompt: Sequence[int],
    segments: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    mode: PauseMode,
    model_of: Callable[[int], Any],
) -> list[float]:
    """Log-probability of each token, in nats.

    `segments`: tokens and versions of each request that the response took, each of which begins with
    an empty cache. Where the version changes within one, the cache stays as it is under `in_place`,
    and is computed again under `retract`; under `abort` it cannot change there.
    """
    found: list[float] = []
    written = list(prompt)
    for tokens, versions in segments:
        cache: Any = None
        fed = 0
        done = 0
        for version, span in groupby(versions):
            count = len(list(span))
            if mode == "retract":
                cache, fed = None, 0
            elif mode == "abort":
                assert count == len(tokens), "a request that an update should have cut went on"
            new = tokens[done : done + count]
            text = [*written, *tokens[:done], *new]
            output = model_of(version)(torch.tensor([text[fed:-1]]), past_key_values=cache, use_cache=True)
            cache, fed = output.past_key_values, len(text) - 1
            rows = output.logits[0, -count:].log_softmax(-1)
            found += rows.gather(1, torch.tensor(new)[:, None])[:, 0].tolist()
            done += count
        written += tokens
    return found
