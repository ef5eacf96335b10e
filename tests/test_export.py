"""A model and an adapter as one checkpoint: what a gserver that knows nothing of adapters begins with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from streamrl.config import Config, from_dict
from streamrl.errors import ModelError
from streamrl.export import merge_adapter
from streamrl.gserver.server.process import first_weights
from tests.gserver.embedded.test_adapters import LORA, random_adapter, with_adapter, written
from tests.gserver.tiny import make_model, save


def config(tmp_path: Path, *, published: str = "merged", resume_from: Path | None = None) -> Config:
    run = {"dir": str(tmp_path)} | ({"resume_from": str(resume_from)} if resume_from is not None else {})
    lora = {"rank": LORA.rank, "alpha": LORA.alpha}
    return from_dict({"run": run, "model": {"lora": lora}, "weights": {"lora": published}})


async def test_a_gserver_begins_with_the_adapter_merged_and_leaves_nothing(tmp_path: Path) -> None:
    model = make_model()
    base, adapter = save(model, tmp_path / "base"), random_adapter(model, 3)
    saved = written(tmp_path / "adapter", adapter)
    async with first_weights(config(tmp_path, resume_from=saved), index=1, model_dir=base) as folder:
        assert folder != base
        assert (folder / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
        merged = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())
    assert not folder.exists()
    wanted = dict(with_adapter(model, adapter).named_parameters())
    assert merged.keys() == wanted.keys()
    for name, weight in merged.items():
        torch.testing.assert_close(weight, wanted[name], rtol=0, atol=1e-5)
    for other in (config(tmp_path), config(tmp_path, published="adapter", resume_from=saved), Config()):
        async with first_weights(other, index=0, model_dir=base) as folder:
            assert folder == base


def test_weights_keep_their_dtype_and_another_models_adapter_is_refused(tmp_path: Path) -> None:
    model = make_model().to(torch.bfloat16)
    base = save(model, tmp_path / "base")
    adapter = random_adapter(model, 3)
    merge_adapter(base, written(tmp_path / "adapter", adapter), LORA, into=tmp_path / "merged")
    tensors = load_file(tmp_path / "merged" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    foreign = {name.replace("layers.1", "layers.9"): tensor for name, tensor in adapter.items()}
    with pytest.raises(ModelError, match=r"is of another model than .*: it has base_model\.model\.model\.layers\.9"):
        merge_adapter(base, written(tmp_path / "foreign", foreign), LORA, into=tmp_path / "other")
