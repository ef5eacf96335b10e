"""Any causal language model in the embedded engine: transformers' own forward pass and cache, one slot at a time.

Slower than the fast engine (`model.py`), and independent of the kind of layers: a slot has a cache of transformers,
which may hold keys and values, a window of them, or the state of a recurrent layer.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from streamrl.causal_models import allocate, body_of, load_config, on_meta, token_logits, weight_views
from streamrl.errors import ModelError
from streamrl.gserver.embedded.adapters import Adapter
from streamrl.gserver.embedded.model import Extension
from streamrl.gserver.embedded.scheduler import DeterministicScheduler
from streamrl.gserver.embedded.weights import DoubleBufferedWeights, Parameters
from streamrl.safetensors_files import MODEL, TensorFiles


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
    ) -> None:
        """`names`: those of the weights in the files of the served checkpoint."""
        self.dtype = dtype
        self.compute_dtype = compute_dtype
        self.device = device
        self.read_only = False
        self.model = on_meta(config, dtype=compute_dtype)
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

    def __init__(self, folder: Path, *, dtype: torch.dtype, compute_dtype: torch.dtype, device: torch.device) -> None:
        self.config = load_config(folder)
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
            cache = self._cache.at(extension.slot, extension.cached)
            output = body_of(self._model)(
                input_ids=torch.tensor([extension.tokens], device=self.parameters.device),
                past_key_values=cache,
                use_cache=True,
            )
            hidden: Tensor = output.last_hidden_state[0]
            found.append(hidden[len(hidden) - extension.wanted :])
        return torch.cat(found), starts

    def decode(
        self, tokens: Sequence[int], positions: Sequence[int], *, adapters: Sequence[Adapter | None] = ()
    ) -> Tensor:
        """Compute `tokens[i]` at `positions[i]` of slot i; see `Model.decode`."""
        steps = enumerate(zip(tokens, positions, strict=True))
        return self.logits(self.extend([Extension(slot, position, [token]) for slot, (token, position) in steps])[0])

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of `hidden` (`[n, hidden_size]`): `[n, vocab]`, in the compute dtype."""
        return token_logits(self._model, hidden)


class GeneralScheduler(DeterministicScheduler):
    """Computes every request on its own, and a retracted one again as a whole."""

    repeats_single_steps = False


def refuse(setting: str, folder: Path) -> ModelError:
    """Return the error for a setting that needs the fast engine."""
    return ModelError(
        f"{setting} needs the fast embedded engine, which does not compute the model in {folder}; leave it out, or set "
        'gserver.engine = "sglang"'
    )
