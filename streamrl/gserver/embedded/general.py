"""Any causal language model in the embedded engine, with transformers' own forward pass: slower than `model.py`.

A model that uses transformers' attention interface alone to connect tokens computes all slots together: its attention
reads and writes keys and values in `SlotStates` (`BatchedModel`). For any other model, each slot has a cache of
transformers, which may also hold the state of a recurrent layer, and is computed on its own (`GeneralModel`). A small
random copy of the model decides between the two at the start (`batching_problem`).
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache

from streamrl.causal_models import (
    allocate,
    body_of,
    load_config,
    on_meta,
    random_model,
    small_config,
    token_logits,
    weight_views,
)
from streamrl.gserver.embedded.adapters import Adapter
from streamrl.gserver.embedded.model import Extension, SlotTensors
from streamrl.gserver.embedded.scheduler import DeterministicScheduler, Scheduler
from streamrl.gserver.embedded.weights import DoubleBufferedWeights, Parameters
from streamrl.safetensors_files import MODEL, TensorFiles
from streamrl.scores import ScoreRules, attend_densely, register_attention

log = logging.getLogger(__name__)

TOLERANCE = 1e-4
"""Largest difference between log-probabilities of the small copy, in float32."""
PROMPT_LENGTHS = (11, 5, 14)
"""Prompts of the small copy; some are longer than its sliding windows."""
STEPS = 4
"""Decode steps of the small copy."""


class GeneralParameters(Parameters):
    """One set of weights, in a transformers model."""

    def __init__(
        self,
        config: Any,
        *,
        dtype: torch.dtype,
        device: torch.device,
        compute_dtype: torch.dtype,
        names: Collection[str],
        attention: str | None = None,
    ) -> None:
        """`names`: the weights in the files of the served checkpoint. `attention`: see `on_meta`."""
        self.dtype = dtype
        self.compute_dtype = compute_dtype
        self.device = device
        self.read_only = False
        self.model = on_meta(config, dtype=compute_dtype, attention=attention)
        views = weight_views(self.model, names=names)
        allocate(self.model, self.model, device)
        self.model.eval().requires_grad_(False)
        weights = dict(self.model.named_parameters())
        self.named = {name: view.of(weights[view.parameter].data) for name, view in views.items()}

    def is_ignored(self, name: str) -> bool:
        return True  # transformers' model does not use it: a tied head, or layers for speculative decoding

    def place(self, name: str) -> Tensor:
        return self.named[name]

    def start_packing(self) -> None:
        pass

    def stop_packing(self) -> None:
        pass

    def pack(self) -> None:
        pass


class GeneralWeights(DoubleBufferedWeights):
    """The sets of weights of a model that only transformers can compute."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype,
        compute_dtype: torch.dtype,
        device: torch.device,
        deterministic: bool = False,
    ) -> None:
        """`deterministic`: each request is computed on its own."""
        self.config = load_config(folder)
        problem = "gserver.deterministic = true" if deterministic else batching_problem(folder)
        self.batched = problem is None
        """Whether all requests are computed together."""
        if problem is not None:
            log.info("each request is computed on its own: %s", problem)
        self._names = set(TensorFiles(folder, MODEL).names())
        super().__init__(None, dtype=dtype, compute_dtype=compute_dtype, device=device, threads=1)

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary."""
        return int(self.config.get_text_config().vocab_size)

    @property
    def max_position(self) -> int:
        """Number of positions that the model supports; a very large one if it names no limit."""
        return int(getattr(self.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize)

    def place(self, name: str) -> Tensor | None:
        place = super().place(name)
        return place if place is not None and place.is_contiguous() else None

    def adopt(self, weights: Mapping[str, Tensor]) -> bool:
        return False

    def _new(self, adopted: Mapping[str, Tensor] | None = None) -> GeneralParameters:
        return GeneralParameters(
            self.config,
            dtype=self.dtype,
            compute_dtype=self._compute_dtype,
            device=self._device,
            names=self._names,
            attention=SLOT_ATTENTION if self.batched else None,
        )


class SlotCaches:
    """A cache of transformers for each slot; replaces `KVCache`."""

    routes: Tensor | None = None
    token_bytes = 0

    def __init__(self, config: Any) -> None:
        self._config = config
        self._caches: dict[int, DynamicCache] = {}

    @property
    def bytes(self) -> int:
        """Memory of all slots."""
        return sum(
            tensor.nbytes
            for cache in self._caches.values()
            for layer in cache.layers
            for tensor in vars(layer).values()
            if isinstance(tensor, Tensor)
        )

    def at(self, slot: int, cached: int) -> DynamicCache:
        """Return the cache of `slot`, which holds `cached` tokens; a new one if that is 0."""
        if not cached:
            self._caches[slot] = DynamicCache(config=self._config)
        return self._caches[slot]

    def reserve(self, *, slots: int, length: int) -> None:
        """Caches grow when they are written to."""

    def take(self, slot: int, length: int) -> list[Tensor]:
        """Return nothing: the prefixes of finished requests are not kept."""
        return []

    def put(self, slot: int, taken: Sequence[Tensor], length: int) -> None:
        raise NotImplementedError("prefixes are not kept")

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        """Copy a slot, which holds `length` tokens, to others."""
        for target in targets:
            self._caches[target] = copy.deepcopy(self._caches[source])

    def clear(self, slot: int) -> None:
        """Forget the content of a slot."""
        self._caches.pop(slot, None)


class GeneralModel:
    """Computes with `parameters`, which may be replaced by others of the same shape, on `cache`; replaces `Model`."""

    def __init__(self, parameters: Parameters, cache: SlotCaches) -> None:
        self.parameters = parameters
        self._cache = cache

    @property
    def _model(self) -> Any:
        assert isinstance(self.parameters, GeneralParameters)
        return self.parameters.model

    def extend(self, extensions: Sequence[Extension]) -> tuple[Tensor, list[int]]:
        """Compute the tokens of `extensions`; see `Model.extend`. The hidden states are those before the head."""
        starts: list[int] = []
        found: list[Tensor] = []
        for extension in extensions:
            starts.append(sum(map(len, found)))
            hidden = self._hidden(extension)
            found.append(hidden[len(hidden) - extension.wanted :])
        return torch.cat(found), starts

    def _hidden(self, extension: Extension) -> Tensor:
        """Return the hidden states of the extension's tokens, `[tokens, hidden_size]`."""
        output = body_of(self._model)(
            input_ids=torch.tensor([extension.tokens], device=self.parameters.device),
            past_key_values=self._cache.at(extension.slot, extension.cached),
            use_cache=True,
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def decode(
        self, tokens: Sequence[int], positions: Sequence[int], *, adapters: Sequence[Adapter | None] = ()
    ) -> Tensor:
        """Compute `tokens[i]` at `positions[i]` of slot i; see `Model.decode`."""
        steps = enumerate(zip(tokens, positions, strict=True))
        return self.logits(self.extend([Extension(slot, position, [token]) for slot, (token, position) in steps])[0])

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of `hidden` (`[n, hidden_size]`): `[n, vocab]`, in the compute dtype."""
        return token_logits(self._model, hidden)


class SlotStates(SlotTensors):
    """Keys and values of all slots, `[slots, length, kv_heads, head_dim]`, of layer i at 2i and 2i + 1. Layers are
    added when the first forward pass reaches them."""

    def write(self, number: int, states: Tensor, slots: slice, positions: Tensor) -> Tensor:
        """Write `states` `[rows, kv_heads, tokens, head_dim]` at `positions` `[rows, tokens]` of `slots`; return all
        that `slots` hold up to the last position, `[rows, kv_heads, length, head_dim]`."""
        while len(self.layers) <= number:
            self.layers.append(self._empty((states.shape[1], states.shape[3]), states.dtype))
        layer = self.layers[number][slots]
        layer[torch.arange(len(layer), device=self._device)[:, None], positions] = states.transpose(1, 2)
        return layer[:, : int(positions.max()) + 1].transpose(1, 2)


class SlotPass:
    """One forward pass over `slots`, as transformers uses a cache, with the attention of its tokens."""

    def __init__(self, states: SlotStates, slots: slice, positions: Tensor) -> None:
        """`positions` `[rows, tokens]`: where the new tokens are in their slots."""
        self._states = states
        self._slots = slots
        self._positions = positions
        self._first, self._last = int(positions.min()), int(positions.max())

    def get_seq_length(self, _layer: int = 0) -> int:
        """Return the number of tokens before the new ones."""
        return self._first

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write the new tokens' keys and values; return the keys and values of all tokens up to them."""
        keys, values = (
            self._states.write(2 * layer + i, new, self._slots, self._positions) for i, new in enumerate((key, value))
        )
        return keys, values

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, rules: ScoreRules) -> Tensor:
        """Return the attention `[rows, heads, tokens, value_dim]` of the new tokens."""
        at = self._positions[:, None, :, None]
        columns = torch.arange(self._last + 1, device=query.device)
        sees = columns <= at
        if rules.window is not None:
            sees &= at - columns < rules.window
        if rules.softcap is None and rules.sinks is None:
            gqa = query.shape[1] != key.shape[1]
            return scaled_dot_product_attention(query, key, value, attn_mask=sees, scale=scale, enable_gqa=gqa)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        return attend_densely(query, key, value, sees, scale=scale, rules=rules)


class BatchedModel(GeneralModel):
    """Computes one token for all slots in one forward pass."""

    def __init__(self, parameters: Parameters, states: SlotStates) -> None:
        self.parameters = parameters
        self._states = states

    def _hidden(self, extension: Extension) -> Tensor:
        slot, cached = extension.slot, extension.cached
        positions = range(cached, cached + len(extension.tokens))
        return self._compute(slice(slot, slot + 1), [extension.tokens], [positions])[0]

    def decode(
        self, tokens: Sequence[int], positions: Sequence[int], *, adapters: Sequence[Adapter | None] = ()
    ) -> Tensor:
        steps = [[token] for token in tokens], [[position] for position in positions]
        return self.logits(self._compute(slice(0, len(tokens)), *steps)[:, 0])

    def _compute(self, slots: slice, tokens: Sequence[Sequence[int]], positions: Sequence[Sequence[int]]) -> Tensor:
        """Return the hidden states `[rows, tokens, hidden_size]`."""
        device = self.parameters.device
        where = torch.tensor([list(row) for row in positions], device=device)
        forward = SlotPass(self._states, slots, where)
        output = body_of(self._model)(
            input_ids=torch.tensor([list(row) for row in tokens], device=device),
            position_ids=where,
            past_key_values=forward,
            use_cache=True,
            slots=forward,
        )
        hidden: Tensor = output.last_hidden_state
        return hidden


SLOT_ATTENTION = "streamrl_slots"
"""Name of the attention function in transformers, which then makes no mask of its own."""

register_attention(SLOT_ATTENTION, "slots")


@cache
def batching_problem(folder: Path) -> str | None:
    """Return why the slots of the model in `folder` cannot be computed together; None if they can."""
    try:
        config = small_config(load_config(folder))
        with torch.inference_mode():
            worst = _largest_difference(config)
    except Exception as error:  # tolerance point: code of any model, which this probe is there to judge
        return f"a batch cannot be computed ({type(error).__name__}: {error})"
    return None if worst <= TOLERANCE else f"log-probabilities of a batch differ by {worst:.2g}"


def _largest_difference(config: Any) -> float:
    """Return the largest difference between log-probabilities of requests in a batch and of transformers' own model."""
    cpu, vocabulary = torch.device("cpu"), config.vocab_size
    parameters = GeneralParameters(config, dtype=torch.float32, device=cpu, compute_dtype=torch.float32, names=())
    parameters.model = random_model(config, attention=SLOT_ATTENTION)
    reference = random_model(config)
    states = SlotStates(max_slots=len(PROMPT_LENGTHS), max_length=max(PROMPT_LENGTHS) + STEPS, device=cpu)
    states.reserve(slots=len(PROMPT_LENGTHS), length=max(PROMPT_LENGTHS) + STEPS)
    model = BatchedModel(parameters, states)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(vocabulary, (length + STEPS,), generator=generator) for length in PROMPT_LENGTHS]
    expected = [reference(input_ids=row[None], use_cache=False).logits[0].log_softmax(-1) for row in rows]
    worst = 0.0
    for slot, (row, length) in enumerate(zip(rows, PROMPT_LENGTHS, strict=True)):
        found = model.logits(model.extend([Extension(slot, 0, row[:length].tolist())])[0]).log_softmax(-1)
        worst = max(worst, float((found - expected[slot][:length]).abs().max()))
    for step in range(STEPS):
        at = [length + step for length in PROMPT_LENGTHS]
        tokens = [int(row[position]) for row, position in zip(rows, at, strict=True)]
        found = model.decode(tokens, at).log_softmax(-1)
        wanted = torch.stack([logits[position] for logits, position in zip(expected, at, strict=True)])
        worst = max(worst, float((found - wanted).abs().max()))
    return worst


class GeneralScheduler(DeterministicScheduler):
    """Computes every request on its own, and a retracted one again as a whole."""

    repeats_single_steps = False


def computation_with(
    weights: DoubleBufferedWeights, *, slots: int, max_length: int
) -> tuple[GeneralModel, SlotStates | SlotCaches, type[Scheduler]]:
    """Return the forward pass with `weights`, which are `GeneralWeights`, its cache, and the kind of the scheduler."""
    assert isinstance(weights, GeneralWeights)
    if weights.batched:
        states = SlotStates(max_slots=slots, max_length=max_length, device=weights.served.device)
        return BatchedModel(weights.served, states), states, Scheduler
    caches = SlotCaches(weights.config)
    return GeneralModel(weights.served, caches), caches, GeneralScheduler
