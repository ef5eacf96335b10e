"""Tiny models of every served shape, as checkpoints and as transformers modules, and engines for them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from streamrl.gserver.embedded.engine import EmbeddedEngine
from streamrl.gserver.server.engine import Job, Output
from streamrl.transport.generation import SamplingParams
from tests.experts import as_in_files

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .,"
EOS = len(CHARACTERS)
VOCABULARY = len(CHARACTERS) + 1

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

SHAPES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": False}),
    "llama-tied-llama3-rope": (
        LlamaConfig,
        LlamaForCausalLM,
        {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE},
    ),
    "llama-biased": (
        LlamaConfig,
        LlamaForCausalLM,
        {"tie_word_embeddings": False, "attention_bias": True, "head_dim": 32},
    ),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen2-untied-linear-rope": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {"tie_word_embeddings": False, "rope_parameters": LINEAR_ROPE},
    ),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"tie_word_embeddings": True, "head_dim": 32}),
    "qwen3-moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {
            "head_dim": 32,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3-moe-sparse-step": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {
            "head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
            "tie_word_embeddings": True,
        },
    ),
}


def make_model(shape: str = "qwen3", *, seed: int = 0, max_position: int = 2048, **changes: Any) -> Any:
    """A transformers model with random weights that make a lively distribution. `changes`: to the shape's settings."""
    config, model, settings = SHAPES[shape]
    module = model(
        config(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=96,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=max_position,
            eos_token_id=EOS,
            bos_token_id=None,
            **{"num_hidden_layers": 2, **settings, **changes},
        )
    ).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            spread = torch.randn(parameter.shape, generator=generator) * 0.15
            parameter.copy_(spread if parameter.dim() > 1 else 1 + spread)
    return module


def save(model: Any, folder: Path) -> Path:
    """`model` as a checkpoint with a tokenizer of single characters."""
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate([*CHARACTERS, "<eos>"])}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def weights_of(model: Any) -> dict[str, Tensor]:
    """Parameters by Hugging Face name, a tied head left out."""
    return as_in_files({name: parameter.detach() for name, parameter in model.named_parameters()})


def prompt(length: int, *, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    tokens: list[int] = torch.randint(0, EOS, (length,), generator=generator).tolist()
    return tokens


@torch.inference_mode()
def logprobs_of(model: Any, tokens: Sequence[int], *, temperature: float = 1.0) -> Tensor:
    """Log-probabilities after every token: `[len(tokens), vocabulary]`."""
    logits: Tensor = model(torch.tensor([list(tokens)])).logits[0]
    return (logits / temperature).log_softmax(-1)


def response_logprobs(model: Any, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Tensor:
    """What `model` gives the tokens of a response."""
    every = logprobs_of(model, [*prompt_ids, *output_ids])
    return every[len(prompt_ids) - 1 : -1].gather(1, torch.tensor(output_ids)[:, None])[:, 0]


def assert_sampled(model: Any, prompt_ids: Sequence[int], output: Output, *, atol: float = 1e-4) -> None:
    """The tokens of a response have the log-probabilities that `model` gives them."""
    expected = response_logprobs(model, prompt_ids, output.output_ids)
    torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=atol, rtol=0)


@asynccontextmanager
async def engine_for(folder: Path, **settings: Any) -> AsyncIterator[EmbeddedEngine]:
    """A started engine."""
    defaults = {"max_running": 8, "max_queued": 100, "max_context": 512, "update_timeout": 20.0}
    async with EmbeddedEngine(folder=folder, **{**defaults, **settings}) as engine:
        yield engine


async def generate(engine: EmbeddedEngine, jobs: Sequence[Job]) -> list[Output]:
    """Submit all jobs at once and wait for them."""
    tickets = [engine.submit(job) for job in jobs]
    return [await ticket.result() for ticket in tickets]


def job(rid: str, input_ids: list[int], *, params: dict[str, Any] | None = None, **settings: Any) -> Job:
    sampling = SamplingParams(**{"max_new_tokens": 20, "ignore_eos": True, **(params or {})})
    return Job(rid=rid, input_ids=input_ids, params=sampling, **settings)
