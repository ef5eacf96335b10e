"""The shapes of models: those of published ones by name, or one from a folder's `config.json`. Pure but for reading it.

Only what decides memory, traffic and arithmetic is kept; weights are not needed.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from streamrl.errors import ModelError
from streamrl.models import expert_count

SUPPORTED = ("llama", "qwen2", "qwen3", "qwen3_moe")


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """A Llama, Qwen2, Qwen3 or Qwen3-MoE model; sizes are counts of numbers, not bytes."""

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Of one feed-forward network; with experts, of one expert."""
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool = False
    """The output head is the embedding."""
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    """Of each layer; 0: the feed-forward network is dense."""
    experts_per_token: int = 0

    @property
    def parameters(self) -> int:
        """All weights, a tied head once."""
        return self.layers * self.layer + self.embedding * (1 if self.tied else 2) + self.hidden_size

    @property
    def active_parameters(self) -> int:
        """Weights that one token is multiplied with: without the embedding, which is looked up, and other experts."""
        idle = self.layers * (self.experts - self.experts_per_token) * self.expert
        return self.parameters - idle - (0 if self.tied else self.embedding)

    @property
    def embedding(self) -> int:
        """The embedding, or the head."""
        return self.vocab_size * self.hidden_size

    @property
    def layer(self) -> int:
        """One decoder layer."""
        return self.layer_without_experts + self.experts * self.expert

    @property
    def layer_without_experts(self) -> int:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * self.hidden_size * (queries + keys)
        attention += queries + 2 * keys if self.qkv_bias else 0
        attention += 2 * self.head_dim if self.qk_norm else 0
        feed_forward = self.hidden_size * self.experts if self.experts else self.expert  # the router, or the network
        return attention + feed_forward + 2 * self.hidden_size

    @property
    def expert(self) -> int:
        """One feed-forward network: gate, up and down."""
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def kv_numbers(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def forward_flops(self, context: int) -> float:
        """Floating-point operations of one token in one forward pass, on average over a sequence of `context` tokens:
        two for each weight, and four for each number of a query and each token that it attends to."""
        attention = 4 * self.layers * self.heads * self.head_dim * context / 2
        return 2.0 * self.active_parameters + attention


def _qwen3(name: str, hidden: int, intermediate: int, layers: int, heads: int, *, tied: bool = False) -> Shape:
    return Shape(
        name=name,
        vocab_size=151_936,
        hidden_size=hidden,
        intermediate_size=intermediate,
        layers=layers,
        heads=heads,
        kv_heads=8,
        head_dim=128,
        tied=tied,
        qk_norm=True,
    )


def _llama(name: str, hidden: int, intermediate: int, layers: int, heads: int, *, tied: bool = False) -> Shape:
    return Shape(
        name=name,
        vocab_size=128_256,
        hidden_size=hidden,
        intermediate_size=intermediate,
        layers=layers,
        heads=heads,
        kv_heads=8,
        head_dim=hidden // heads,
        tied=tied,
    )


KNOWN = {
    shape.name: shape
    for shape in (
        _qwen3("Qwen3-0.6B", 1024, 3072, 28, 16, tied=True),
        _qwen3("Qwen3-1.7B", 2048, 6144, 28, 16, tied=True),
        _qwen3("Qwen3-4B", 2560, 9728, 36, 32, tied=True),
        _qwen3("Qwen3-8B", 4096, 12288, 36, 32),
        _qwen3("Qwen3-14B", 5120, 17408, 40, 40),
        _qwen3("Qwen3-32B", 5120, 25600, 64, 64),
        msgspec.structs.replace(
            _qwen3("Qwen3-30B-A3B", 2048, 768, 48, 32), kv_heads=4, experts=128, experts_per_token=8
        ),
        Shape(
            name="Qwen2.5-7B",
            vocab_size=152_064,
            hidden_size=3584,
            intermediate_size=18944,
            layers=28,
            heads=28,
            kv_heads=4,
            head_dim=128,
            qkv_bias=True,
        ),
        _llama("Llama-3.2-1B", 2048, 8192, 16, 32, tied=True),
        _llama("Llama-3-8B", 4096, 14336, 32, 32),
        _llama("Llama-3-70B", 8192, 28672, 80, 64),
    )
}
"""From the configurations that were published with the models."""


def shape_of(wanted: str) -> Shape:
    """Return the known shape called `wanted`, or ending so after a dash (`70B`), or that of a model folder.

    Raises `ModelError` with what there is to choose from.
    """
    if Path(wanted).expanduser().is_dir():
        return read_shape(Path(wanted).expanduser())
    found = [
        shape
        for name, shape in KNOWN.items()
        if name.lower() == wanted.lower() or name.lower().endswith(f"-{wanted.lower()}")
    ]
    if len(found) == 1:
        return found[0]
    what = f"is any of {', '.join(shape.name for shape in found)}" if found else "is no known shape and no folder"
    raise ModelError(f"--model-shape {wanted} {what}; give one of {', '.join(KNOWN)}, or the folder of a model")


def read_shape(folder: Path) -> Shape:
    """Return the shape in `folder/config.json`; raises `ModelError` with what is missing or not supported."""
    file = folder / "config.json"
    try:
        settings = json.loads(file.read_bytes())
        kind = settings["model_type"]
        if kind not in SUPPORTED:
            raise ModelError(f"{file}: a model of type {kind!r} cannot be planned; supported: {', '.join(SUPPORTED)}")
        experts = kind == "qwen3_moe"
        if experts and (settings.get("decoder_sparse_step", 1) != 1 or settings.get("mlp_only_layers")):
            raise ModelError(f"{file}: layers with and without experts in one model cannot be planned")
        if settings.get("attention_bias") and kind != "qwen2":
            raise ModelError(f"{file}: attention_bias = true cannot be planned")
        heads = settings["num_attention_heads"]
        return Shape(
            name=folder.name,
            vocab_size=settings["vocab_size"],
            hidden_size=settings["hidden_size"],
            intermediate_size=settings["moe_intermediate_size" if experts else "intermediate_size"],
            layers=settings["num_hidden_layers"],
            heads=heads,
            kv_heads=settings.get("num_key_value_heads") or heads,
            head_dim=settings.get("head_dim") or settings["hidden_size"] // heads,
            tied=bool(settings.get("tie_word_embeddings", False)),
            qkv_bias=kind == "qwen2",
            qk_norm=kind.startswith("qwen3"),
            experts=expert_count(settings) if experts else 0,
            experts_per_token=settings["num_experts_per_tok"] if experts else 0,
        )
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from error
    except KeyError as error:
        raise ModelError(f"{file} lacks {error}") from error
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON: {error}") from error
