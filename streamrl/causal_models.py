"""Causal language models of transformers: made without memory, and addressed by the names in published checkpoints.

transformers may keep weights in another form than the files of a checkpoint: under other names, or all experts of a
layer in one tensor. `weight_views` lists the weights as the files name them, each as a view of a parameter. So code
that handles weights by name (reading, saving, publication, the engines) needs no rules for a single model.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_outputs import MoeModelOutputWithPast

from streamrl.errors import ModelError

log = logging.getLogger(__name__)


def load_config(folder: Path, **changes: Any) -> Any:
    """Return the transformers configuration of the checkpoint in `folder`; raises `ModelError`."""
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **changes)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{folder}: transformers cannot read this model's config.json: {error}") from error
    if getattr(config, "quantization_config", None):
        raise ModelError(
            f"the weights in {folder} are quantized; load them with AutoModelForCausalLM.from_pretrained, call "
            "dequantize(), and give the folder that save_pretrained writes"
        )
    return config


def on_meta(config: Any, *, kind: Any = AutoModelForCausalLM, dtype: torch.dtype, attention: str | None = None) -> Any:
    """Return the model for `config` with weights on the meta device, and all other buffers on the CPU.

    `kind`: an auto class of transformers. `attention`: name of an attention function; None for transformers' choice.
    Persistent buffers, which are parts of a checkpoint, become parameters without a gradient. Dropout is off. Raises
    `ModelError` if transformers has no such model.
    """
    config = copy.deepcopy(config)  # transformers writes the attention's name into it
    try:
        with torch.device("meta"):
            model = kind.from_config(config, dtype=dtype, attn_implementation=attention)
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(
            f"transformers cannot make a model of type {config.model_type!r} as {kind.__name__}: {error}"
        ) from error
    _make_buffers(model)
    _turn_dropout_off(model)
    return model


def _make_buffers(model: Any) -> None:
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # transformers then leaves it as it is
    for module in model.modules():
        for name, buffer in list(module._buffers.items()):
            if buffer is None:
                continue
            if name in module._non_persistent_buffers_set:
                module._buffers[name] = torch.zeros_like(buffer, device="cpu")
            elif buffer.is_floating_point():
                del module._buffers[name]
                module.register_parameter(name, nn.Parameter(buffer, requires_grad=False))
                getattr(module, name)._is_hf_initialized = True
    model.initialize_weights()


def _turn_dropout_off(model: nn.Module) -> None:
    """Dropout would make the trainer's policy another one than the engine's."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float) and value:
                setattr(module, name, 0.0)


def allocate(net: nn.Module, model: Any, device: torch.device) -> None:
    """Allocate `net`, which contains `model` from `on_meta`, on `device`. Weights are not initialized."""
    buffers = {name: buffer.clone() for name, buffer in net.named_buffers() if not buffer.is_meta}
    net.to_empty(device=device)
    model.tie_weights()
    for name, buffer in net.named_buffers():
        if name in buffers:
            buffer.copy_(buffers[name])


def body_of(model: Any) -> Any:
    """Return the part of `model` before its head."""
    body = model.base_model if model.base_model is not model else model.get_decoder()
    return model.model if body is model else body


class _BodyOutput(MoeModelOutputWithPast):  # type: ignore[misc]
    """The output of a body that a model's head reads; None for all fields but the hidden states."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


def token_logits(model: Any, hidden: Tensor) -> Tensor:
    """Return the logits `[tokens, vocab]` of `hidden` `[tokens, hidden_size]`, the output of the model's body.

    The model's own forward pass computes them, with its scales and caps: its body is replaced for this call.
    """
    body = body_of(model)
    body.forward = lambda *_, **__: _BodyOutput(last_hidden_state=hidden[None])
    try:
        logits: Tensor = model(inputs_embeds=hidden[None], use_cache=False).logits[0]
    finally:
        del body.forward
    return logits


# --- weights by name ---


class View(NamedTuple):
    """A named weight as a view of a contiguous parameter; strides and offset count elements."""

    parameter: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, parameter: Tensor) -> Tensor:
        """Return the view of the whole `parameter`."""
        return parameter.as_strided(self.shape, self.stride, parameter.storage_offset() + self.offset)

    def within(self, shape: tuple[int, ...], first: int, rows: int) -> tuple[tuple[int, ...], View] | None:
        """Return the part of this weight that is in rows `first` to `first + rows` of its parameter of `shape`: the
        position of the part in the weight, and the part as a view of these rows; None if there is none."""
        row = math.prod(shape[1:])
        begin = self.offset // row if row else 0
        start, size = [0] * len(self.shape), list(self.shape)
        along = next((d for d, step in enumerate(self.stride) if step == row and self.shape[d] > 1), None)
        low, high = max(first, begin), min(first + rows, begin + (1 if along is None else self.shape[along]))
        if low >= high:
            return None
        if along is not None:
            start[along], size[along] = low - begin, high - low
        offset = self.offset + (low - begin - first) * row
        return tuple(start), View(self.parameter, tuple(size), self.stride, offset)


class _Aliases(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Return a view in place of a copy, so that the origin of a tensor can be recognized."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.ops.aten.clone.default:
            return torch.ops.aten.alias.default(args[0])
        return func(*args, **(kwargs or {}))


def weight_views(model: Any, *, names: Collection[str] | None = None) -> dict[str, View]:
    """Return the weights of `model`, which is on the meta device, by the names in a checkpoint.

    `names`: those in the files of a checkpoint, which may name weights like the parameters; None for a published
    checkpoint. Weights that no view can describe are named like their parameters.
    """
    own = {name: View(name, tuple(weight.shape), weight.stride(), 0) for name, weight in model.named_parameters()}
    published = _published_views(model)
    if names is not None and not published.keys() <= set(names) and own.keys() <= set(names):
        return own
    return published


def _published_views(model: Any) -> dict[str, View]:
    weights = dict(model.named_parameters())
    homes = {weight.untyped_storage()._cdata: name for name, weight in weights.items()}
    own = {name: View(name, tuple(weight.shape), weight.stride(), 0) for name, weight in weights.items()}
    try:
        with torch.no_grad(), _Aliases():  # type: ignore[no-untyped-call]
            found = revert_weight_conversion(model, {name: weight.detach() for name, weight in weights.items()})
    except (RuntimeError, ValueError) as error:
        log.warning("the weights have transformers' own names, since their published form is no view: %s", error)
        return own
    views = {
        name: View(home, tuple(weight.shape), weight.stride(), weight.storage_offset())
        for name, weight in found.items()
        if (home := homes.get(weight.untyped_storage()._cdata)) is not None
        and all(step <= math.prod(weights[home].shape[1:]) for step in weight.stride())  # no rows are skipped
    }
    covered: dict[str, int] = dict.fromkeys(weights, 0)
    for view in views.values():
        covered[view.parameter] += math.prod(view.shape)
    incomplete = {name for name, weight in weights.items() if covered[name] != weight.numel()}
    whole = {name: view for name, view in views.items() if view.parameter not in incomplete}
    return whole | {name: own[name] for name in weights if name in incomplete}


# --- small copies ---

CAPS: Mapping[str, int] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "n_routed_experts": 8,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_mtp_layers": 0,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 8,
    "attention_chunk_size": 8,
    "mamba_d_ssm": 64,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_chunk_size": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "n_embd": 64,
    "n_head": 4,
    "n_inner": 96,
    "d_model": 64,
    "ffn_dim": 96,
}
"""Largest value of each setting in a small copy."""
FEWEST_LAYERS = 2


def small_config(config: Any) -> Any:
    """Return `config` with narrow layers, one of each type, and few tokens: the same architecture in small.

    Raises `ModelError` for a model with further parts than text.
    """
    if config.get_text_config() is not config:
        raise ModelError(f"a model of type {config.model_type!r} has more parts than a language model")
    settings = config.to_dict()
    same_heads = settings.get("num_key_value_heads") == settings.get("num_attention_heads")
    for key, most in CAPS.items():
        if isinstance(settings.get(key), int):
            settings[key] = min(settings[key], most)
    if same_heads and "num_key_value_heads" in settings:
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    if "mamba_n_heads" in settings:
        inner = settings.get("mamba_d_ssm") or settings["mamba_expand"] * settings["hidden_size"]
        settings["mamba_d_head"] = inner // settings["mamba_n_heads"]
    if "qk_rope_head_dim" in settings and "head_dim" in settings:
        settings["head_dim"] = settings["qk_rope_head_dim"]
    for key in [key for key in settings if key.endswith("_token_id")]:
        settings[key] = None
    _fewer_layers(settings)
    rope = settings.get("rope_parameters")
    if isinstance(rope, dict):  # factors for each pair of numbers of a head
        half = settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"]
        half = int(half * rope.get("partial_rotary_factor", 1.0)) // 2
        settings["rope_parameters"] = {k: v[:half] if isinstance(v, list) else v for k, v in rope.items()}
    return type(config).from_dict(settings)


def _fewer_layers(settings: dict[str, Any]) -> None:
    kinds = settings.get("layer_types") or settings.get("layers_block_type")
    if not kinds:
        for key in ("num_hidden_layers", "n_layer", "num_layers"):
            if isinstance(settings.get(key), int):
                settings[key] = min(settings[key], FEWEST_LAYERS + (settings.get("first_k_dense_replace") or 0))
        return
    chosen = list(dict.fromkeys(kinds))
    chosen += chosen[-1:] * (FEWEST_LAYERS - len(chosen))
    for key in ("layer_types", "layers_block_type"):
        if key in settings:
            settings[key] = chosen
    settings["num_hidden_layers"] = len(chosen)


def random_model(config: Any, *, attention: str | None = None, seed: int = 0) -> Any:
    """Return a model for `config` on the CPU, in float32, whose random weights make every part of it matter."""
    model = on_meta(config, dtype=torch.float32, attention=attention)
    allocate(model, model, torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)
            else:
                weight.normal_(float("norm" in name), 0.1, generator=generator)
    return model.eval()
