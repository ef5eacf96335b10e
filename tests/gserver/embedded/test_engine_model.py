"""The embedded engine computes what transformers computes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from streamrl import device
from streamrl.checksum import weights_checksum
from streamrl.errors import ModelError
from streamrl.gserver.embedded.model import read_architecture
from tests.gserver.tiny import (
    SHAPES,
    assert_sampled,
    engine_for,
    generate,
    job,
    logprobs_of,
    make_model,
    prompt,
    response_logprobs,
    save,
    weights_of,
)

LENGTHS = (1, 2, 7, 7, 33, 90, 150)


def test_the_fast_engine_starts_without_transformers(tmp_path: Path) -> None:
    """Its import takes longer than all else at the start of a gserver."""
    folder = save(make_model("qwen3"), tmp_path)
    script = (
        "import sys, asyncio, pathlib\n"
        "import streamrl.gserver.server.process, streamrl.gserver.embedded.serving\n"
        "from streamrl.gserver.embedded.engine import EmbeddedEngine\n"
        "async def serve():\n"
        "    async with EmbeddedEngine(folder=pathlib.Path(sys.argv[1])) as engine:\n"
        "        await engine.generate([[1, 2, 3]])\n"
        "asyncio.run(serve())\n"
        "print('transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("shape", SHAPES)
async def test_sampled_logprobs_are_those_of_transformers(shape: str, tmp_path: Path) -> None:
    model = make_model(shape)
    prompts = [prompt(n, seed=i) for i, n in enumerate(LENGTHS)]
    jobs = [job(str(i), p, params={"max_new_tokens": 5 + 6 * i}) for i, p in enumerate(prompts)]
    async with engine_for(save(model, tmp_path), max_running=4) as engine:
        outputs = await generate(engine, jobs)
    for one, output in zip(jobs, outputs, strict=True):
        assert len(output.output_ids) == one.params.max_new_tokens
        assert_sampled(model, one.input_ids, output)


async def test_siblings_and_later_turns_share_what_was_computed(tmp_path: Path) -> None:
    model = make_model()
    shared = prompt(60)
    async with engine_for(save(model, tmp_path)) as engine:
        first = await generate(engine, [job(f"a{i}", shared) for i in range(6)])
        computed = engine.stats()["prompt_tokens_total"]
        assert computed == 60
        late = await generate(engine, [job(f"b{i}", shared) for i in range(6)])
        assert engine.stats()["prompt_tokens_total"] == 61  # the last token's logits, once for all
        turn = [*shared, *first[0].output_ids, *prompt(5)]
        [later] = await generate(engine, [job("c", turn)])
    assert later.cached_tokens >= 60
    for output in [*first, *late]:
        assert_sampled(model, shared, output)
    assert_sampled(model, turn, later)
    assert len({tuple(output.output_ids) for output in [*first, *late]}) > 6


@pytest.mark.parametrize("shape", ["llama", "llama-biased", "qwen2", "qwen3", "qwen3-moe"])
async def test_copies_into_named_views_update_the_fused_weights(shape: str, tmp_path: Path) -> None:
    old, new = make_model(shape, seed=0), make_model(shape, seed=1)
    async with engine_for(save(old, tmp_path)) as engine:
        assert (await engine.checksum()).total == weights_checksum(weights_of(old)).total
        parameters = engine._weights.served
        await engine._do(lambda: parameters.update(weights_of(new)))
        assert (await engine.checksum()).total == weights_checksum(weights_of(new)).total
        [output] = await generate(engine, [job("a", prompt(20))])
    assert_sampled(new, prompt(20), output)


@pytest.mark.parametrize("start", [0, 1, 13])
async def test_prompt_logprobs(start: int, tmp_path: Path) -> None:
    model = make_model("qwen2")
    one = job("b", prompt(40), logprob_start_len=start, top_logprobs_num=3)
    async with engine_for(save(model, tmp_path)) as engine:
        await generate(engine, [job("a", prompt(40))])  # its keys and values may be shared, its logits not
        [output] = await generate(engine, [one])
    every = logprobs_of(model, one.input_ids)
    first = max(start, 1)
    expected = every[first - 1 : -1].gather(1, torch.tensor(one.input_ids[first:])[:, None])[:, 0]
    given = output.input_logprobs
    assert len(given) == len(output.input_top_logprobs) == 40 - start
    assert start > 0 or given.pop(0) is None
    assert torch.allclose(torch.tensor(given), expected, atol=1e-4)
    values, tokens = every[-2].topk(3)
    last = output.input_top_logprobs[-1]
    assert last is not None
    assert [token for _, token in last] == tokens.tolist()
    assert torch.allclose(torch.tensor([value for value, _ in last]), values, atol=1e-4)


@pytest.mark.parametrize("native", [True, False])
async def test_bfloat16_is_computed_in_what_the_processor_has(
    native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "processor_has_bfloat16", lambda: native)
    model = make_model("qwen2-untied-linear-rope")
    new = {name: tensor * 1.1 for name, tensor in weights_of(model).items()}
    async with engine_for(save(model, tmp_path), dtype=torch.bfloat16) as engine:
        await engine._do(lambda: engine._weights.served.update(new))
        served = await engine.checksum()
        [output] = await generate(engine, [job("a", prompt(20))])
        assert engine._weights.served.dtype == torch.bfloat16
        assert engine._weights.served.compute_dtype == (torch.bfloat16 if native else torch.float32)
    rounded = {name: tensor.bfloat16() for name, tensor in new.items()}
    assert served == weights_checksum(rounded)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(rounded[name])
    expected = response_logprobs(model, prompt(20), output.output_ids)
    # Kept in float32, the rounded weights are all that is left of bfloat16.
    assert (torch.tensor(output.logprobs) - expected).abs().max() < (0.3 if native else 1e-5)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("hidden_act", "gelu", "hidden_act"),
        ("mlp_bias", True, "mlp_bias"),
        ("use_sliding_window", True, "sliding"),
        ("rope_parameters", {"rope_type": "yarn", "factor": 4.0}, "yarn"),
        ("model_type", "gpt2", "gpt2"),
    ],
)
def test_unsupported_models_are_refused_by_name(key: str, value: object, named: str, tmp_path: Path) -> None:
    import json

    save(make_model("llama"), tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    with pytest.raises(ModelError, match=named):
        read_architecture(tmp_path)


async def test_weights_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = make_model()
    folder = save(model, tmp_path)
    weights = weights_of(model)
    weights["model.norm.weight"] = torch.zeros(7)
    del weights["model.layers.1.self_attn.k_proj.weight"]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"k_proj\.weight is missing.*model\.norm\.weight has the shape \(7,\)"):
        async with engine_for(folder):
            pass
