"""Weights by the names in checkpoints, as views of transformers' parameters, whole and in parts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from streamrl.causal_models import on_meta, random_model, small_config, token_logits, weight_views


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_views_are_the_tensors_of_saved_checkpoints_and_ranks_have_parts_of_them(family: str, tmp_path: Path) -> None:
    model = random_model(small_config(CONFIG_MAPPING[family]()))
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    views = weight_views(on_meta(model.config, dtype=torch.float32))
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    assert views.keys() == saved.keys()
    for name, view in views.items():
        whole = weights[view.parameter]
        assert torch.equal(view.of(whole), saved[name])
        rows = -(-len(whole) // 3)
        joined = torch.full_like(saved[name], torch.nan)
        for first in range(0, len(whole), rows):
            own = whole[first : first + rows].clone()
            if (part := view.within(tuple(whole.shape), first, len(own))) is not None:
                box = tuple(slice(a, a + n) for a, n in zip(part[0], part[1].shape, strict=True))
                joined[box] = part[1].of(own)
        assert torch.equal(joined, saved[name]), name


def test_files_may_name_weights_like_the_parameters() -> None:
    model = on_meta(small_config(CONFIG_MAPPING["mixtral"]()), dtype=torch.float32)
    own = {name for name, _ in model.named_parameters()}
    assert weight_views(model, names=own).keys() == own
    assert not weight_views(model).keys() <= own


@pytest.mark.parametrize("family", ["gemma2", "granite", "cohere2"])
def test_logits_have_the_models_own_scales_and_caps(family: str) -> None:
    model = random_model(small_config(CONFIG_MAPPING[family]()))
    ids = torch.arange(10)[None]
    with torch.no_grad():
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[0]
        assert torch.allclose(token_logits(model, hidden), model(input_ids=ids).logits[0], atol=1e-5)
