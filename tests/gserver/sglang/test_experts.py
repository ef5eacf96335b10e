"""Which experts computed a token, as a real SGLang server tells it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from streamrl.config import from_dict
from streamrl.gserver.sglang.serving import sglang_server
from streamrl.transport.credentials import GserverKeys
from streamrl.transport.generation import GenerateRequest, GenerationClient, SamplingParams, decoded_routes
from tests.gserver.installed import sglang_python
from tests.gserver.running_sglang import START_SECONDS
from tests.gserver.tiny import make_model, prompt, response_logprobs, save

pytestmark = [
    pytest.mark.timeout(START_SECONDS + 120),
    pytest.mark.skipif(sglang_python() is None, reason="SGLang is not installed"),
]

LAYERS, TOP_K = 3, 2
"""Of the tiny model."""


async def test_it_tells_the_experts_that_transformers_chooses(tmp_path: Path) -> None:
    """Of prompt and response, also of what it has in its cache."""
    model = make_model("qwen3-moe", max_position=8192, mlp_only_layers=[])
    sglang = {"python": sglang_python() or ""}
    settings = from_dict(
        {
            "gserver": {"engine": "sglang", "max_running": 4, "sglang": sglang},
            "limits": {"start_seconds": START_SECONDS},
        }
    )
    client = GenerationClient(timeout=60.0)
    async with sglang_server(
        settings.gserver,
        settings.limits,
        index=0,
        model_dir=save(model, tmp_path),
        device="cpu",
        dtype="float32",
        seed=1,
        weight_version="0",
        prompt_cache=True,
        keys=GserverKeys(),
        routed_experts=True,
    ) as server:
        shared = prompt(30)
        cached = []
        try:
            for ids in (shared, [*shared, *prompt(7, seed=1)]):
                reply = await client.generate(
                    server.url,
                    GenerateRequest(
                        input_ids=list(ids),
                        sampling_params=SamplingParams(max_new_tokens=12, ignore_eos=True),
                        return_logprob=True,
                        return_routed_experts=True,
                    ),
                )
                cached.append(reply.meta_info.cached_tokens)
                tokens = [*ids, *reply.output_ids]
                experts = decoded_routes(reply.meta_info, tokens=len(tokens) - 1)
                assert experts is not None
                found = experts.reshape(-1, LAYERS, TOP_K)
                with torch.inference_mode():
                    routers = model(torch.tensor([tokens[:-1]]), output_router_logits=True).router_logits
                for layer, scores in enumerate(routers):
                    chosen = scores.topk(TOP_K).indices.numpy()
                    assert np.array_equal(np.sort(found[:, layer]), np.sort(chosen))
                wanted = response_logprobs(model, ids, reply.output_ids)
                told = [entry[0] for entry in reply.meta_info.output_token_logprobs or ()]
                assert told == pytest.approx(wanted.tolist(), abs=1e-4)
        finally:
            await client.close()
        assert cached[1] >= 25
