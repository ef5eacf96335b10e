"""The deterministic scheduler: every request is computed in forward passes of its own.

How a matrix product rounds depends on its shape, so the same prompt among others, after a cached
prefix, or computed again after a retraction gives other last bits. Here the shapes of a request's
passes are a function of the request alone: its whole prompt, then token after token. Invariant:
tokens and log-probabilities do not depend, bit for bit, on other requests or on when it came.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from streamrl.gserver.embedded.model import Extension
from streamrl.gserver.embedded.request import Request
from streamrl.gserver.embedded.scheduler import Scheduler


class ScheduleApart(Scheduler):
    """Admits and reports like any scheduler; the model has to be one with `copies_cache`. Keeps and cuts no prompts."""

    cuts_prompts = False

    def _prefill(self, batch: Sequence[Request]) -> None:
        slots = self._take_slots(batch)
        self._cache.reserve(slots=len(self.running), length=max(len(request.tokens) for request in batch))
        computed: dict[tuple[int, ...], tuple[int, Tensor]] = {}  # prompt → its slot, and its last hidden state
        for request, slot in zip(batch, slots, strict=True):
            prompt = request.tokens[: request.prompt_length]
            found = computed.get(tuple(prompt))
            if found is None or request.wants_input_logprobs:
                hidden = self._extend(slot, 0, prompt)
                if request.wants_input_logprobs:
                    self._score_prompt(request, hidden, 0)
                hidden = hidden[-1:].clone()
                computed[tuple(prompt)] = slot, hidden
                request.cached_tokens = 0
            else:  # a copy of the same computation has the same bits
                source, hidden = found
                self._cache.copy(source, [slot], len(prompt))
                request.cached_tokens = len(prompt) - 1
            for position in range(request.prompt_length, len(request.tokens)):  # it was retracted
                hidden = self._extend(slot, position, request.tokens[position : position + 1])
            self._sample_for([slot], self._model.logits(hidden))

    def _extend(self, slot: int, cached: int, tokens: Sequence[int]) -> Tensor:
        """Hidden states of `tokens`, which follow `cached` ones in `slot`."""
        self.prompt_tokens += len(tokens)
        return self._model.extend([Extension(slot=slot, cached=cached, tokens=tokens)])[0]

    def _decode_running(self, requests: Sequence[Request]) -> None:
        for slot, request in enumerate(requests):
            last = len(request.tokens) - 1
            extension = Extension(slot=slot, cached=last, tokens=request.tokens[last:])
            self._sample_for([slot], self._model.logits(self._model.extend([extension])[0]))
