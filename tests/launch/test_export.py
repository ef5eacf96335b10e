"""`streamrl export` finds the checkpoint that is meant, and leaves a whole model or nothing."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from streamrl import export as exporting
from streamrl.errors import ConfigError, ModelError
from streamrl.export import export, export_run, hugging_face_folder
from streamrl.gserver.embedded.model import read_architecture
from streamrl.gserver.embedded.weights import DoubleBufferedWeights
from streamrl.records import progress
from streamrl.records.progress import Progress
from streamrl.safetensors_files import TensorBox, bytes_of_parts, file_name, write_bytes
from tests.trainer.models import save_model


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Checkpoints of the steps 4 and 8, the first in parts of two workers; step 8 was written last."""
    run = tmp_path / "run"
    for version in (4, 8):
        folder = save_model(run / "checkpoints" / f"step-{version:06d}", "llama", seed=version)
        progress.write(folder, Progress(policy_version=version, trained=[], rejected=[], prompts=""))
        os.utime(folder, (version, version))
    in_parts(run / "checkpoints" / "step-000004")
    os.utime(run / "checkpoints" / "step-000004", (4, 4))
    return run


def in_parts(folder: Path) -> dict[str, torch.Tensor]:
    """Write the model in `folder` as two workers do; what it is."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for rank in range(2):
        parts = []
        for name, whole in weights.items():
            rows = -(-len(whole) // 2)
            mine = whole[rank * rows : (rank + 1) * rows]
            parts.append(TensorBox(name, tuple(whole.shape), (rank * rows, *(0,) * (whole.dim() - 1)), mine))
        write_bytes(folder / file_name("model", rank, 2), bytes_of_parts(parts))
    return weights


def weights_of(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).named_parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_loads_what_was_exported(tmp_path: Path, dtype: str) -> None:
    """From parts, in several files with an index."""
    checkpoint = save_model(tmp_path / "checkpoint", "llama")
    weights = in_parts(checkpoint)
    target = tmp_path / "target"
    target.mkdir()
    export(checkpoint, target, dtype=getattr(torch, dtype), limit=8_000)
    files = sorted(target.glob("model-*-of-*.safetensors"))
    assert len(files) > 2
    assert all(file.stat().st_size < 8_000 + 4_096 for file in files)
    found = AutoModelForCausalLM.from_pretrained(target)
    assert str(found.dtype) == f"torch.{dtype}"
    for name, weight in found.named_parameters():
        assert torch.equal(weight, weights[name].to(weight.dtype)), name
    assert AutoTokenizer.from_pretrained(target).get_vocab()["t3"] == 3


def test_the_last_checkpoint_is_exported_unless_a_step_is_named(run_dir: Path, tmp_path: Path) -> None:
    last = export_run(run_dir, step=None, to=None, dtype="float32")
    assert last == run_dir / "exports" / "step-000008"
    first = export_run(run_dir, step=4, to=tmp_path / "there", dtype="bfloat16")
    assert first == tmp_path / "there"
    assert not (first / progress.STATE).exists()
    assert export_run(run_dir / "checkpoints" / "step-000004", step=None, to=None, dtype="float16") == (
        run_dir / "exports" / "step-000004-float16"
    )
    eight = load_file(run_dir / "checkpoints" / "step-000008" / "model.safetensors")
    assert all(torch.equal(weight, eight[name]) for name, weight in weights_of(last).items())
    assert any(not torch.equal(weight, eight[name]) for name, weight in weights_of(first).items())


@pytest.mark.parametrize(("inside", "given"), [("checkpoints/step-000008", "."), ("checkpoints", "step-000008")])
def test_an_export_is_in_the_folder_of_the_run_wherever_it_is_asked_for(
    inside: str, given: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run_dir / inside)
    assert export_run(Path(given), step=None, to=None, dtype="float32") == run_dir / "exports" / "step-000008"


def test_what_cannot_be_is_said(run_dir: Path, tmp_path: Path) -> None:
    def asked(folder: Path = run_dir, step: int | None = None, to: Path | None = None, dtype: str = "float32") -> None:
        export_run(folder, step=step, to=to, dtype=dtype)

    with pytest.raises(ConfigError, match="has checkpoints of the steps 4, 8"):
        asked(step=5)
    with pytest.raises(ConfigError, match="nowhere has no checkpoint"):
        asked(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="exists already"):
        asked(to=tmp_path)
    with pytest.raises(ConfigError, match="--dtype int4"):
        asked(dtype="int4")
    (run_dir / "checkpoints" / "step-000004" / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks model-00002-of-00002\.safetensors"):
        asked(step=4)
    assert not (run_dir / "exports").exists() or not any((run_dir / "exports").iterdir())


def test_a_full_disk_leaves_nothing(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(exporting, "write_file", full)
    with pytest.raises(ModelError, match="No space left on device; make room"):
        export_run(run_dir, step=4, to=None, dtype="float32")
    assert not any((run_dir / "exports").iterdir())


def test_a_program_of_others_gets_a_checkpoint_as_it_is_or_an_export_made_once(run_dir: Path, tmp_path: Path) -> None:
    eight, four = (run_dir / "checkpoints" / f"step-00000{n}" for n in (8, 4))
    with hugging_face_folder(eight, cache=tmp_path / "cache") as made:
        assert made == eight
    with hugging_face_folder(four, cache=tmp_path / "cache") as made:
        assert made.parent == tmp_path / "cache"
        assert len(weights_of(made)) == len(weights_of(eight))
        os.utime(made, (4, 4))
    with hugging_face_folder(four, cache=tmp_path / "cache") as again:
        assert (again, again.stat().st_mtime) == (made, 4)


def test_an_export_that_nobody_uses_any_more_makes_room_for_another(run_dir: Path, tmp_path: Path) -> None:
    eight, four = (run_dir / "checkpoints" / f"step-00000{n}" for n in (8, 4))
    in_parts(eight)
    cache = tmp_path / "cache"

    def exports() -> set[Path]:
        return set(cache.glob("export-*"))

    with hugging_face_folder(four, cache=cache) as first:
        with hugging_face_folder(four, cache=cache) as same, hugging_face_folder(eight, cache=cache) as second:
            assert same == first
            assert exports() == {first, second}  # both are in use
        with hugging_face_folder(four, cache=cache):
            assert exports() == {first}
    with hugging_face_folder(eight, cache=cache):
        assert exports() == {second}
    assert not [left for left in cache.iterdir() if left.is_dir() and left != second]


def test_the_embedded_engine_serves_a_checkpoint_in_parts(run_dir: Path) -> None:
    four = run_dir / "checkpoints" / "step-000004"
    weights = DoubleBufferedWeights(
        read_architecture(four), dtype=torch.float32, compute_dtype=torch.float32, device=torch.device("cpu"), threads=1
    )
    weights.load_served(four)
    with hugging_face_folder(four, cache=run_dir / "cache") as exported:
        wanted = weights_of(exported)
    assert weights.served.named.keys() == wanted.keys()
    assert all(torch.equal(weight, wanted[name]) for name, weight in weights.served.named.items())
