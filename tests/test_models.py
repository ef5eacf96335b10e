"""Checkpoint folders: taken, converted, or made; complete or not at all."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from streamrl.config import Config, LoraConfig, from_dict
from streamrl.errors import ModelError
from streamrl.lora import adapter_settings
from streamrl.models import (
    check_tokens,
    ensure_checkpoint,
    eos_token_ids,
    load_tokenizer,
    special_token_ids,
    vocab_size,
    weights_fingerprint,
)
from tests.forked import Forked, forking

SCRATCH = {"alphabet": "0123456789+= ", "hidden_size": 32, "head_dim": 8}


def scratch_config(*, seed: int = 0, **settings: Any) -> Config:
    return from_dict({"run": {"seed": seed}, "model": {"path": "scratch", "scratch": {**SCRATCH, **settings}}})


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_scratch_is_the_same_everywhere_and_loads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    one = ensure_checkpoint(scratch_config(), cache=tmp_path / "a")
    two = ensure_checkpoint(scratch_config(), cache=tmp_path / "b")
    other = ensure_checkpoint(scratch_config(seed=1), cache=tmp_path / "a")
    assert digest(one) == digest(two) != digest(other)
    assert one != other
    assert ensure_checkpoint(scratch_config(), cache=tmp_path / "a") == one
    model = AutoModelForCausalLM.from_pretrained(one)
    assert model.config.model_type == "qwen3"
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.eos_token_id == len(SCRATCH["alphabet"])
    weights = model.model.layers[0].mlp.up_proj.weight.detach()
    assert float(weights.std()) == pytest.approx(0.02, rel=0.05)


def test_a_model_that_reads_the_policys_tokens_has_the_same_and_perhaps_more(tmp_path: Path) -> None:
    policy, same, other = (
        ensure_checkpoint(scratch_config(**settings), cache=tmp_path)
        for settings in ({}, {"hidden_size": 64}, {"alphabet": "0123456798+= "})
    )
    check_tokens(same, policy, setting="reference.path")
    with pytest.raises(ModelError, match=r"reference.path = .*: 2 of 14; the first one, '8', is 8 here and 9 there"):
        check_tokens(other, policy, setting="reference.path")
    tokenizer = load_tokenizer(policy)
    tokenizer.add_tokens(["more"])
    tokenizer.save_pretrained(same)
    check_tokens(same, policy, setting="reference.path")
    with pytest.raises(ModelError, match=r"1 of 15; the first one, 'more', is 14 here and unknown there"):
        check_tokens(policy, same, setting="reference.path")


def test_scratch_tokenizer_has_one_token_for_each_character(tmp_path: Path) -> None:
    folder = ensure_checkpoint(scratch_config(alphabet="ab\n +é"), cache=tmp_path)
    tokenizer = load_tokenizer(folder)
    text = "ba\n  é+ab"
    ids = tokenizer(text)["input_ids"]
    assert ids == ["ab\n +é".index(c) for c in text]
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id == 6
    assert tokenizer.pad_token_id is None
    messages = [{"role": "system", "content": "ab"}, {"role": "user", "content": " +"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == "ab +"
    other = load_tokenizer(folder, chat_template="{{ messages[0]['content'] }}")
    assert other.apply_chat_template(messages, tokenize=False) == "ab"


def test_each_token_of_a_scratch_model_has_a_use(tmp_path: Path) -> None:
    """A token that no text has, such as padding, would be sampled all the same and be missing in `response.text`."""
    folder = ensure_checkpoint(scratch_config(alphabet="ab", words=["abba"]), cache=tmp_path)
    tokenizer = load_tokenizer(folder)
    tokens = tokenizer.convert_ids_to_tokens(range(vocab_size(folder)))
    assert tokens == ["a", "b", "abba", "<eos>"]
    assert eos_token_ids(folder) == {3}
    assert special_token_ids(folder) == set()
    assert tokenizer.decode([0, 2, 3], skip_special_tokens=True) == "aabba"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"alphabet": "aba"}, "'a'"),
        ({"words": ["0"]}, "'0'"),
        ({"words": [""]}, "empty"),
        ({"alphabet": ""}, "alphabet"),
        ({"heads": 3}, "heads"),
        ({"head_dim": 7}, "even"),
    ],
)
def test_scratch_settings_that_cannot_work(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=said):
        ensure_checkpoint(scratch_config(**settings), cache=tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_copies_of_a_checkpoint_have_one_fingerprint_and_other_weights_another(tmp_path: Path) -> None:
    def written(name: str, value: float) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        weights = torch.zeros(300_000)
        weights[123_456:125_000] = value
        save_file({"a": weights}, folder / "model.safetensors")
        return folder

    first, copy, other = written("first", 1.0), written("copy", 1.0), written("other", 2.0)
    assert weights_fingerprint(first) == weights_fingerprint(copy) != weights_fingerprint(other)


def test_what_a_folder_lacks_is_named(tmp_path: Path) -> None:
    def check(said: str) -> None:
        with pytest.raises(ModelError, match=said):
            ensure_checkpoint(from_dict({"model": {"path": str(tmp_path / "m")}}))

    check("no folder")
    (tmp_path / "m").mkdir()
    check(r"lacks config.json, \*.safetensors, tokenizer.json")
    (tmp_path / "m" / "model.safetensors").touch()
    (tmp_path / "m" / "tokenizer.json").write_text("{}")
    (tmp_path / "m" / "config.json").write_text("{")
    check("not valid JSON")
    (tmp_path / "m" / "config.json").write_text("{}")
    check("lacks model_type")


def test_a_run_with_an_adapter_begins_with_its_base_and_other_checkpoints_are_refused(tmp_path: Path) -> None:
    scratch = {"path": "scratch", "scratch": {"hidden_size": 16, "heads": 2, "kv_heads": 1, "head_dim": 8}}
    lora = LoraConfig(rank=2)

    def config(resume_from: Path | None = None, **model: Any) -> Config:
        run = {} if resume_from is None else {"resume_from": str(resume_from)}
        return from_dict({"model": scratch | model, "run": run})

    base = ensure_checkpoint(config(), cache=tmp_path / "cache")
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(adapter_settings(lora, str(base))))
    with pytest.raises(ModelError, match=r"lacks adapter_model\.safetensors"):
        ensure_checkpoint(config(folder, lora={"rank": 2}), cache=tmp_path / "cache")
    (folder / "adapter_model.safetensors").touch()
    assert ensure_checkpoint(config(folder, lora={"rank": 2}), cache=tmp_path / "cache") == base
    with pytest.raises(ModelError, match="r is 2, and"):
        ensure_checkpoint(config(folder, lora={"rank": 3}), cache=tmp_path / "cache")
    with pytest.raises(ModelError, match="is an adapter"):
        ensure_checkpoint(config(folder), cache=tmp_path / "cache")
    with pytest.raises(ModelError, match="holds no adapter"):
        ensure_checkpoint(config(base, lora={"rank": 2}), cache=tmp_path / "cache")


def test_a_failed_attempt_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(settings: Any, seed: int, folder: Path) -> None:
        (folder / "half").touch()
        raise ModelError("half way")

    with monkeypatch.context() as patch:
        patch.setattr("streamrl.models._make_scratch", fail)
        with pytest.raises(ModelError, match="half way"):
            ensure_checkpoint(scratch_config(), cache=tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    assert (ensure_checkpoint(scratch_config(), cache=tmp_path) / "config.json").exists()


def _make(cache: Path, barrier: Any, answers: Any) -> None:
    barrier.wait()
    answers.send(str(ensure_checkpoint(scratch_config(), cache=cache)))


def test_concurrent_makers_make_it_once(tmp_path: Path) -> None:
    barrier = forking().Barrier(2)
    with Forked(_make, [(tmp_path, barrier)] * 2) as makers:
        folders = set(makers.take(2))
        makers.end()
    assert len(folders) == 1
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [Path(folders.pop()).name]
