"""Numbers of weights and of operations of a model: a published one by name, or the model in a folder. Rates of GPUs.

Only properties that decide memory, traffic and arithmetic count; the weights themselves are not needed. Pure but for
reading a `config.json`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from streamrl.architecture import MODEL_TYPES, Architecture, architecture_of, read_architecture
from streamrl.errors import ModelError
from streamrl.records.metrics import FINAL_FILE, Final


class Peak(NamedTuple):
    """Peak rates of one GPU, from its maker's data sheet."""

    tflops: float
    """Dense bfloat16 matrix products with float32 sums."""
    memory_tb_s: float
    """Bandwidth of its memory."""


PEAKS: tuple[tuple[str, Peak], ...] = (
    (r"GB200|B200", Peak(2250.0, 8.0)),
    (r"GH200", Peak(989.0, 4.0)),
    (r"H200", Peak(989.0, 4.8)),
    (r"H100 NVL", Peak(835.0, 3.9)),
    (r"H100.*PCIe", Peak(756.0, 2.0)),
    (r"H100", Peak(989.0, 3.35)),
    (r"H800", Peak(989.0, 3.35)),
    (r"H20\b", Peak(148.0, 4.0)),
    (r"A100.*80GB PCIe", Peak(312.0, 1.935)),
    (r"A100.*40GB", Peak(312.0, 1.555)),
    (r"A100|A800", Peak(312.0, 2.039)),
    (r"L40S", Peak(362.0, 0.864)),
    (r"L40\b", Peak(181.0, 0.864)),
    (r"L4\b", Peak(121.0, 0.3)),
    (r"A10\b|A10G", Peak(125.0, 0.6)),
    (r"RTX 5090", Peak(209.0, 1.79)),
    (r"RTX 4090", Peak(165.0, 1.008)),
    (r"RTX 3090", Peak(71.0, 0.936)),
)
"""The first pattern that matches a name counts."""


def peak_of(name: str) -> Peak | None:
    """Return the peak of the GPU that CUDA calls `name`; None if it is not in the list."""
    return next((peak for pattern, peak in PEAKS if re.search(pattern, name)), None)


class Shape(Architecture, frozen=True, kw_only=True):
    """An architecture with its counts; sizes are counts of numbers, not bytes."""

    name: str

    @classmethod
    def of(cls, name: str, architecture: Architecture) -> Shape:
        """Return `architecture` as the shape of a model called `name`."""
        return cls(name=name, **msgspec.structs.asdict(architecture))

    @property
    def parameters(self) -> int:
        """All weights; a tied head is counted once."""
        return self.layers_between(0, self.layers) + self.embedding * (1 if self.tied else 2) + self.hidden_size

    @property
    def active_parameters(self) -> int:
        """Weights that one token is multiplied with: without the embedding, which is a look-up, and other experts."""
        idle = 0 if self.moe is None else len(self.moe.layers) * (self.moe.experts - self.moe.top_k) * self.expert
        return self.parameters - idle - (0 if self.tied else self.embedding)

    @property
    def embedding(self) -> int:
        """Weights of the embedding, or of the head."""
        return self.vocab_size * self.hidden_size

    @property
    def experts(self) -> int:
        """Experts in a layer of experts; 0 if the model has no such layer."""
        return 0 if self.moe is None else self.moe.experts

    @property
    def experts_per_token(self) -> int:
        return 0 if self.moe is None else self.moe.top_k

    @property
    def expert(self) -> int:
        """Weights of one expert: gate, up and down."""
        return 0 if self.moe is None else 3 * self.hidden_size * self.moe.intermediate_size

    @property
    def largest_layer(self) -> int:
        """Weights of the largest decoder layer."""
        different = range(1 if self.moe is None else self.layers)
        return max(self.layers_between(layer, layer + 1) for layer in different)

    @property
    def width(self) -> int:
        """Intermediate numbers of a token in the widest feed-forward network; in a layer of experts, of all the experts
        that it is routed to."""
        dense = 0 if self.moe is not None and len(self.moe.layers) == self.layers else self.intermediate_size
        return max(dense, 0 if self.moe is None else self.moe.top_k * self.moe.intermediate_size)

    def layers_between(self, first: int, end: int) -> int:
        """Return the number of weights of the decoder layers from `first` up to `end`."""
        return self.dense_between(first, end) + self.sparse_between(first, end) * self.experts * self.expert

    def dense_between(self, first: int, end: int) -> int:
        """Return the number of weights of these layers without their experts."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        each = 2 * self.hidden_size * (queries + keys) + 2 * self.hidden_size
        each += queries + 2 * keys if self.qkv_bias else 0
        each += self.hidden_size if self.o_bias else 0
        each += 2 * self.head_dim if self.qk_norm else 0
        sparse = self.sparse_between(first, end)
        networks = (end - first - sparse) * 3 * self.hidden_size * self.intermediate_size
        return (end - first) * each + networks + sparse * self.hidden_size * self.experts  # the routers

    def sparse_between(self, first: int, end: int) -> int:
        """Return how many of these layers have experts."""
        return 0 if self.moe is None else sum(first <= layer < end for layer in self.moe.layers)

    def adapter(self, rank: int) -> int:
        """Return the number of weights of low-rank adapters of all linear layers of the decoder (the default of
        `model.lora.target_modules`)."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * (self.hidden_size + queries) + 2 * (self.hidden_size + keys)
        found = self.layers * attention
        sparse = self.sparse_between(0, self.layers)
        found += (self.layers - sparse) * 3 * (self.hidden_size + self.intermediate_size)
        if self.moe is not None:
            found += sparse * self.moe.experts * 3 * (self.hidden_size + self.moe.intermediate_size)
        return rank * found

    @property
    def kv_numbers(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def forward_flops(self, context: int) -> float:
        """Return the floating-point operations of one token in one forward pass, on average over `context` tokens.

        They are two for each weight, and four for each number of a query and each token that it attends to.
        """
        attention = 4 * self.layers * self.heads * self.head_dim * context / 2
        return 2.0 * self.active_parameters + attention


def _sizes(hidden: int, intermediate: int, layers: int, heads: int, *, tied: bool = False) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "tie_word_embeddings": tied,
    }


_QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40_960,
}
_QWEN3_MOE = _QWEN3 | {
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
_QWEN2 = {
    "model_type": "qwen2",
    "vocab_size": 152_064,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 32_768,
}
_LLAMA3 = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "max_position_embeddings": 8192,
}
_PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "Qwen3-0.6B": _QWEN3 | _sizes(1024, 3072, 28, 16, tied=True),
    "Qwen3-1.7B": _QWEN3 | _sizes(2048, 6144, 28, 16, tied=True),
    "Qwen3-4B": _QWEN3 | _sizes(2560, 9728, 36, 32, tied=True),
    "Qwen3-8B": _QWEN3 | _sizes(4096, 12288, 36, 32),
    "Qwen3-14B": _QWEN3 | _sizes(5120, 17408, 40, 40),
    "Qwen3-32B": _QWEN3 | _sizes(5120, 25600, 64, 64),
    "Qwen3-30B-A3B": _QWEN3_MOE | _sizes(2048, 6144, 48, 32),
    "Qwen2.5-7B": _QWEN2 | _sizes(3584, 18944, 28, 28),
    "Llama-3.2-1B": _LLAMA3 | {"max_position_embeddings": 131_072} | _sizes(2048, 8192, 16, 32, tied=True),
    "Llama-3-8B": _LLAMA3 | _sizes(4096, 14336, 32, 32),
    "Llama-3-70B": _LLAMA3 | _sizes(8192, 28672, 80, 64),
}
"""The counted settings of the `config.json` that was published with each model."""
KNOWN = {name: Shape.of(name, architecture_of(settings)) for name, settings in _PUBLISHED.items()}


def shape_of(wanted: str) -> Shape:
    """Return the shape of a known model or of a folder.

    `wanted` is a known name, or its end after a dash (`70B`), or the folder of a model, or the folder of a run after
    its model workers have reported the model. Raises `ModelError` with the known names.
    """
    folder = Path(wanted).expanduser()
    if folder.is_dir():
        reported = (folder / FINAL_FILE).is_file()
        return Shape.of(folder.name, _reported(folder) if reported else read_architecture(folder))
    found = [
        shape
        for name, shape in KNOWN.items()
        if name.lower() == wanted.lower() or name.lower().endswith(f"-{wanted.lower()}")
    ]
    if len(found) == 1:
        return found[0]
    what = f"is any of {', '.join(shape.name for shape in found)}" if found else "is no known shape and no folder"
    raise ModelError(f"--model-shape {wanted} {what}; give one of {', '.join(KNOWN)}, or the folder of a model")


def _reported(run_dir: Path) -> Architecture:
    """Return the configuration of the transformer that the run in `run_dir` trained."""
    try:
        final = msgspec.json.decode((run_dir / FINAL_FILE).read_bytes(), type=Final)
        found = msgspec.convert((final.status or {})["model"], Architecture)
    except (KeyError, msgspec.ValidationError) as error:
        raise ModelError(
            f"{run_dir / FINAL_FILE} has no configuration of the model; give the model's folder instead"
        ) from error
    if not found.exact:
        raise ModelError(
            f"the planner counts models of the types {', '.join(MODEL_TYPES)} only; the model of {run_dir} has another"
        )
    return found
