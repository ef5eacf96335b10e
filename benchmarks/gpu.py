"""The tests and figures that need a GPU, in one command and under eight minutes, without network.

    python benchmarks/gpu.py [--only STEP …] [--seconds N] [--sglang-python PATH]
    python benchmarks/gpu.py --dry-run                 # try the steps themselves, on a machine without a GPU

First the tests marked `cuda`, then figures with random weights in the shape of a model of 1 billion weights, and of 7
where they fit:

- *training*, with the torch backend and with Megatron's: tokens per second of forward, backward and optimizer, as a
  share of the device's peak, by its data sheet, and of a bare matrix product here. Arithmetic that is done again for
  the sake of memory is not counted;
- *training, batches of a run*: the same of groups of ragged responses as runs have them, packed and trained on by the
  policy's own step, and of full rows; and a profile of one step of each, as a text in the folder of the results;
- *generation*: tokens per second of the embedded engine, by requests at once, with a profile of some decoding steps;
  *transformers* and *sglang*, where it is installed: the same prompts by others;
- *publication*: seconds of a weight update, and its bytes per second as a share of a bare copy on the device;
- *async*: groups per second of whole runs with `max_staleness` 4, relative to 0. A response ends at each token by the
  same chance, so lengths have a real tail.

Each step is a process of its own with a deadline. It is reported when it ends; none stops the others, and steps that
the machine cannot make are skipped by name. Results are written after each step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from common import ROOT, Row, latest, parser_of, write_results
from tables import short

from streamrl.launch.processes import visible_gpus
from streamrl.planner.shapes import KNOWN, Shape

BILLION, SEVEN = "Llama-3.2-1B", "Qwen2.5-7B"
SECONDS = 470.0
"""Most seconds of all steps together."""
ENDING_SECONDS = 5.0
"""Between being asked to end and being killed."""
TAIL_LINES = 40
COUNTS = re.compile(r"\d+ (passed|failed|skipped|deselected|errors?)\b")
"""How pytest's last line begins."""
NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Environment variable: torch looks for devices without CUDA, which cannot be used in forked processes afterwards."""
GIB = 2**30
PROMPT_TOKENS = 128


class Skipped(Exception):
    """Why a step cannot be made on this machine."""


class Place(NamedTuple):
    """Where and how large a step measures."""

    device: str
    """`cuda` or `cpu`."""
    tiny: bool
    """So small that the steps themselves can be tried on a CPU; the figures mean nothing."""
    folder: Path
    """Where the models are."""
    sglang_python: str
    """An interpreter that has SGLang for this device; empty: this one."""
    sglang_args: Sequence[str] = ()
    """Further flags of its server."""
    models: Sequence[str] = (BILLION, SEVEN)
    """Those that the steps need."""

    @property
    def seconds(self) -> float:
        """How long a rate is measured."""
        return 0.2 if self.tiny else 6.0

    def model(self, name: str) -> Path:
        """The folder of a model; raises `Skipped` where the step that makes them has left it out."""
        folder = self.folder / name
        if not (folder / "config.json").exists():
            raise Skipped(f"there is no model of the shape {name} (see the step models)")
        return folder


def shape_of(place: Place, name: str) -> Shape:
    """The shape that is called `name`; a tiny one of its kind to try the steps."""
    import msgspec

    if not place.tiny:
        return KNOWN[name]
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "layers": 2, "heads": 4, "head_dim": 16}
    return msgspec.structs.replace(KNOWN[name], **sizes, kv_heads=2)


# --- models --------------------------------------------------------------------------------------


def models(place: Place) -> list[Row]:
    """Make the models that fit, with random weights and one word for each token."""
    rows: list[Row] = []
    for name in place.models:
        shape = shape_of(place, name)
        size = 2 * shape.parameters
        free = shutil.disk_usage(place.folder).free
        if 1.1 * size > free:
            rows.append({"model": name, "note": f"left out: {size / GIB:.0f} GiB, and {free / GIB:.0f} are free"})
            continue
        if place.device == "cuda" and 1.2 * size > device_memory(place):
            rows.append({"model": name, "note": f"left out: its {size / GIB:.0f} GiB do not fit on the device"})
            continue
        began = time.perf_counter()
        make_model(shape, place.folder / name, device=place.device, float32=place.device == "cpu")
        rows.append({"model": name, "parameters": shape.parameters, "model_seconds": time.perf_counter() - began})
    return rows


def make_model(shape: Shape, folder: Path, *, device: str, float32: bool) -> None:
    """Write a checkpoint of random weights, which are drawn on the device."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    config = transformers_config(shape)
    dtype = torch.float32 if float32 else torch.bfloat16
    config.dtype = dtype
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    generator = torch.Generator(device).manual_seed(0)
    tensors = {}
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            made = torch.zeros(parameter.shape) if name.endswith("bias") else torch.ones(parameter.shape)
        else:
            made = torch.empty(parameter.shape, dtype=dtype, device=device).normal_(0.0, 0.02, generator=generator)
        tensors[name] = made.to("cpu", dtype)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config.architectures = [type(model).__name__]
    word_tokenizer(shape.vocab_size).save_pretrained(folder)
    config.save_pretrained(folder)  # last: a folder with it is complete


def transformers_config(shape: Shape) -> Any:
    from transformers import LlamaConfig, Qwen2Config

    kind = Qwen2Config if shape.qkv_bias else LlamaConfig
    return kind(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=8192,
        tie_word_embeddings=shape.tied,
        eos_token_id=shape.vocab_size - 1,
        pad_token_id=shape.vocab_size - 2,
        bos_token_id=None,
    )


def word_tokenizer(size: int) -> Any:
    """One word for each token: all texts are apart, and rewards of them, too."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [f"t{number}" for number in range(size - 2)] + ["<pad>", "<eos>"]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="t0",
        chat_template="{% for message in messages %}{{ message['content'] }} {% endfor %}",
    )


def device_memory(place: Place) -> float:
    """Bytes that are free on the device; raises `Skipped` where torch finds none."""
    import torch

    if place.device == "cpu":
        return float("inf")
    if not torch.cuda.is_available():
        raise Skipped("torch finds no CUDA device (streamrl doctor)")
    return float(torch.cuda.mem_get_info(0)[0])


def require_memory(place: Place, purpose: str, needed: float) -> None:
    """Raise `Skipped` where fewer than `needed` bytes are free on the device, or torch finds none."""
    free = device_memory(place)
    if needed > free:
        raise Skipped(f"{purpose} takes {needed / GIB:.0f} GiB, and {free / GIB:.0f} are free")


def require_training_memory(place: Place, name: str, *, tokens: int) -> None:
    """The same for training the model `name` on micro-batches of `tokens`."""
    from streamrl.planner.capacity import trainer_memory
    from streamrl.trainer.layout import Layout

    needed = trainer_memory(shape_of(place, name), Layout(), tokens=tokens, shard=False).total
    require_memory(place, f"training {name}", needed)


def torch_device(place: Place) -> Any:
    import torch

    return torch.device("cuda", 0) if place.device == "cuda" else torch.device("cpu")


def torch_dtype(place: Place) -> Any:
    import torch

    return torch.bfloat16 if place.device == "cuda" else torch.float32


def wait_for_device(place: Place) -> None:
    """Wait until the device has no work left."""
    import torch

    if place.device == "cuda":
        torch.cuda.synchronize()


# --- training ------------------------------------------------------------------------------------

ROW_TOKENS, ROWS, MICRO_BATCHES = 2048, 4, 2


def training(place: Place, name: str, backend: str) -> list[Row]:
    """Steps of a backend, with activations kept and computed again."""
    shape, folder = shape_of(place, name), place.model(name)
    require_training_memory(place, name, tokens=(64 if place.tiny else ROW_TOKENS) * ROWS)
    import torch

    rows, bare = [], matrix_product_tflops(place)
    for checkpointing in (False, True):
        try:
            found = _training(place, shape, folder, backend, checkpointing=checkpointing, bare_tflops=bare)
        except torch.OutOfMemoryError as error:
            found = {"note": f"does not fit: {str(error).splitlines()[0]}"}
        rows.append({"model": name, "backend": backend, "checkpointing": checkpointing, **found})
        if place.device == "cuda":
            torch.cuda.empty_cache()
    return rows


def _training(
    place: Place, shape: Shape, folder: Path, backend: str, *, checkpointing: bool, bare_tflops: float
) -> Row:
    from streamrl.trainer.packing import pack

    length = 64 if place.tiny else ROW_TOKENS
    model = make_backend(backend, spec_of(place, folder, checkpointing=checkpointing))
    groups = full_groups(place, shape)
    micros = pack(groups, max_tokens=ROWS * length, share_prefix=False)

    def step() -> None:
        model.accumulate(micros, lambda _, output: -output.values.mean() / len(micros))
        model.update(lambda: None)
        wait_for_device(place)

    steps = steps_per_second(place, step)
    tokens = MICRO_BATCHES * ROWS * length * steps
    model.close()
    return {"tokens_per_second": tokens, **arithmetic(place, 3 * shape.forward_flops(length) * tokens, bare_tflops)}


def steps_per_second(place: Place, step: Callable[[], object]) -> float:
    """The rate of `step`, after three that warm up; begins the peak of the device's memory."""
    import torch

    for _ in range(3):
        step()
    if place.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    return rate(step, seconds=place.seconds)


def arithmetic(place: Place, flops: float, bare_tflops: float) -> Row:
    """`flops` a second in relation to the device's peak and to a bare product, and the peak of its memory."""
    import torch

    from streamrl.planner.shapes import peak_of

    on_gpu = place.device == "cuda"
    peak = peak_of(torch.cuda.get_device_name(0)) if on_gpu else None
    return {
        "tflops": flops / 1e12,
        "share_of_peak": flops / 1e12 / peak.tflops if peak else None,
        "bare_tflops": bare_tflops,
        "share_of_bare": flops / 1e12 / bare_tflops,
        "memory_gib": torch.cuda.max_memory_allocated() / GIB if on_gpu else None,
    }


# --- training on batches as runs have them --------------------------------------------------------

OLDEST = 4
"""Policy versions that the tokens of a batch are behind at most."""
LISTED = 25
"""Kernels in a profile."""
PROFILED_TOKENS = 4
"""New tokens of each prompt in a profile of decoding: a prefill and three decoding steps."""


def training_of_runs(place: Place, name: str) -> list[Row]:
    """Steps of the policy, as a model worker takes them: on a batch of ragged responses, and on one of full rows."""
    shape, folder = shape_of(place, name), place.model(name)
    tokens = 256 if place.tiny else ROW_TOKENS * ROWS
    require_training_memory(place, name, tokens=tokens)
    bare, rows = matrix_product_tflops(place), []
    for compiled in (False, True):
        policy = make_policy(place, folder, max_tokens=tokens, compiled=compiled)
        for batch in ("run", "full rows"):
            items = items_of(ragged_groups(place, shape) if batch == "run" else full_groups(place, shape), policy)
            row = {"model": name, "batch": batch, "compiled": compiled}
            rows.append(row | measure_steps(place, shape, policy, items, bare_tflops=bare))
            if compiled:
                file = latest(f"gpu-profile-{name}-{batch.replace(' ', '-')}.txt".lower())
                with profiled(place) as step:
                    policy_step(policy, items)
                file.write_text(f"one step of {name}, batch: {batch}\n{step.text}")
                rows[-1] |= step.figures | {"profile": file.name}
        policy.model.close()
    return rows


def make_policy(place: Place, folder: Path, *, max_tokens: int, compiled: bool) -> Any:
    from streamrl.config import AlgorithmConfig, TrainerConfig
    from streamrl.trainer.algorithms.losses import KLCoefficient
    from streamrl.trainer.backends.base import Ranks
    from streamrl.trainer.layout import Layout
    from streamrl.trainer.roles.actor import Actor

    device = torch_device(place)
    return Actor(
        make_backend("torch", spec_of(place, folder, compiled=compiled)),
        ranks=Ranks(Layout(), 0, device=device),
        trainer=TrainerConfig(max_tokens_per_microbatch=max_tokens),
        algorithm=AlgorithmConfig(),
        kl=KLCoefficient(0.0, target=None, horizon=1),
        longest=ROW_TOKENS,
        device=device,
    )


def ragged_groups(place: Place, shape: Shape) -> list[Any]:
    """A batch of `asynchronous`, with longer prompts: each token of a response is the last by the same chance."""
    count, siblings, prompt, mean, longest = (2, 2, 16, 8, 24) if place.tiny else (8, 8, PROMPT_TOKENS, 64, 320)
    return random_groups(
        shape, count, prompt, lambda generator: [min(int(n), longest) for n in generator.geometric(1 / mean, siblings)]
    )


def full_groups(place: Place, shape: Shape) -> list[Any]:
    """As many tokens as `training` computes in a step, each row a response behind a prompt of one token."""
    length = 64 if place.tiny else ROW_TOKENS
    return random_groups(shape, MICRO_BATCHES * ROWS // 2, 1, lambda _: [length - 1] * 2)


def random_groups(shape: Shape, count: int, prompt: int, lengths: Callable[[Any], list[int]]) -> list[Any]:
    import msgspec
    import numpy as np
    from training_batch import MaskedTokens, packed

    generator = np.random.default_rng(0)
    groups = []
    for seq in range(count):
        begun = MaskedTokens.of_prompt(generator.integers(0, shape.vocab_size - 2, prompt))
        answers = [generator.integers(0, shape.vocab_size - 2, length) for length in lengths(generator)]
        sequences = [begun.more(answer, sampled=True) for answer in answers]
        rewards = generator.random(len(answers)).astype(np.float32)
        group = packed(seq, sequences, rewards, prompt=prompt)
        versions = np.repeat(generator.integers(0, OLDEST + 1, len(answers)), group.seqlens)
        versions = np.where(group.packed_loss_mask, versions, -1).astype(np.int32)
        groups.append(msgspec.structs.replace(group, packed_policy_versions=versions))
    return groups


def items_of(groups: Sequence[Any], policy: Any) -> list[Any]:
    """The items of a training step; older policies gave tokens other log-probabilities than this one."""
    import numpy as np

    from streamrl.trainer.roles.items import TrainItem

    generator = np.random.default_rng(1)
    items = []
    for group, logprobs in zip(groups, policy.inference(groups), strict=True):
        mask = group.packed_loss_mask
        age = np.where(mask, OLDEST - group.packed_policy_versions, 0)
        noise = generator.normal(0.0, 0.02, len(mask)) * (1 + age)
        group.packed_behavior_logprobs = np.where(mask, logprobs + noise, 0).astype(np.float32)
        items.append(TrainItem(group=group, trainable=mask, age=age.astype(np.int32), comparable=mask & (age == 0)))
    return items


def policy_step(policy: Any, items: Sequence[Any]) -> Any:
    """One step of a policy on a batch that is one minibatch; return its statistics."""
    from streamrl.trainer.roles.items import Minibatch, StepStatistics

    tokens = sum(int(item.trainable.sum()) for item in items)
    minibatch = Minibatch(loss_tokens=tokens, episodes=sum(item.group.size for item in items))
    credits = policy.begin_step(items, policy_version=OLDEST, given=False)
    found = StepStatistics()
    policy.train_step(items, credits, minibatch, found, before_update=lambda: None)
    return found


def measure_steps(place: Place, shape: Shape, policy: Any, items: Sequence[Any], *, bare_tflops: float) -> Row:
    """Seconds of a step, and its useful arithmetic: of each packed token in the layers, of the tokens that it attends
    to, and of each predicted token in the head."""
    from streamrl.config import TrainerConfig
    from streamrl.trainer.roles.items import pack_for

    def step() -> None:
        policy_step(policy, items)
        wait_for_device(place)

    steps = steps_per_second(place, step)
    trainer = TrainerConfig(max_tokens_per_microbatch=256 if place.tiny else ROW_TOKENS * ROWS)
    micros = pack_for(policy.model, [item.group for item in items], trainer)
    computed = sum(micro.tokens for micro in micros)
    predicted = sum(int(item.trainable.sum()) for item in items)
    attended = sum(int(micro.position_ids.sum()) + micro.tokens for micro in micros)
    forward = 2 * computed * (shape.active_parameters - shape.embedding) + 2 * predicted * shape.embedding
    forward += 4 * shape.layers * shape.heads * shape.head_dim * attended
    return {
        "policy_step_seconds": 1 / steps,
        "micro_batches": len(micros),
        "computed_tokens": computed,
        "predicted_tokens": predicted,
        "tokens_per_second": computed * steps,
        **arithmetic(place, 3 * forward * steps, bare_tflops),
    }


@dataclass
class Profile:
    """Where a piece of work spends its time; filled when the work has ended."""

    text: str = ""
    """The kernels with most time, and the calls of the host; operators with those that they call on a CPU."""
    figures: Row = field(default_factory=dict)
    """Seconds, the share in which the device is busy, kernel launches, synchronizations."""


@contextmanager
def profiled(place: Place) -> Iterator[Profile]:
    """Profile the work of all threads in the body of the `with` statement."""
    from torch._C._profiler import _ExperimentalConfig
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if place.device == "cuda" else [])
    found = Profile()
    wait_for_device(place)
    with record(activities=kinds, experimental_config=_ExperimentalConfig(profile_all_threads=True)) as recorded:
        began = time.perf_counter()
        yield found
        wait_for_device(place)
        seconds = time.perf_counter() - began
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        recorded.export_chrome_trace(str(file))
        events = [event for event in json.loads(file.read_text())["traceEvents"] if event.get("ph") == "X"]
    on_device = ("kernel", "gpu_memcpy", "gpu_memset") if place.device == "cuda" else ("cpu_op",)
    kernels = [event for event in events if event.get("cat") in on_device]
    calls = [event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    found.figures = {
        "profiled_seconds": seconds,
        "busy_share": covered(kernels) / 1e6 / seconds,
        "kernel_launches": sum("launch" in event["name"].lower() for event in calls),
        "synchronizations": sum("synchronize" in event["name"].lower() for event in calls),
    }
    lines = [f"{key} {short(value)}" for key, value in found.figures.items()]
    for title, listed in (("on the device", kernels), ("calls of the host", calls)):
        lines += ["", f"{title}: milliseconds, calls, name", *most_time(listed)]
    found.text = "\n".join(lines) + "\n"


def covered(events: Sequence[Row]) -> float:
    """Microseconds in which any of `events` of a trace takes place."""
    total = end = 0.0
    for event in sorted(events, key=lambda event: event["ts"]):
        first, last = float(event["ts"]), float(event["ts"]) + float(event["dur"])
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


def most_time(events: Sequence[Row]) -> list[str]:
    """Lines about the names with most time in a trace."""
    spent: dict[str, list[float]] = {}
    for event in events:
        spent.setdefault(event["name"], []).append(float(event["dur"]))
    largest = sorted(spent.items(), key=lambda item: -sum(item[1]))[:LISTED]
    return [f"{sum(times) / 1e3:10.3f} {len(times):7d}  {name[:200]}" for name, times in largest]


def spec_of(place: Place, folder: Path, *, checkpointing: bool = False, compiled: bool = True) -> Any:
    from streamrl.trainer.backends.base import ModelSpec

    return ModelSpec(
        folder=folder,
        head="tokens",
        device=torch_device(place),
        dtype=torch_dtype(place),
        lr=1e-7,
        total_updates=1000,
        gradient_checkpointing=checkpointing,
        compiled=compiled and place.device == "cuda",
    )


def make_backend(name: str, spec: Any) -> Any:
    """The model of `spec` alone in its world."""
    if name == "torch":
        from streamrl.trainer.backends.torch import TorchModel

        return TorchModel(spec)
    if find_spec("megatron") is None:
        raise Skipped("megatron-core is not installed (pip install 'streamrl[megatron]')")
    import torch.distributed as dist

    from streamrl.trainer.backends.megatron.model import MegatronModel
    from streamrl.trainer.layout import Layout
    from streamrl.transport.collective import join_world, open_store

    if not dist.is_initialized():
        store = open_store("127.0.0.1")
        over = "nccl" if spec.device.type == "cuda" else "gloo"
        join_world(address="127.0.0.1", port=store.port, rank=0, world_size=1, backend=over, timeout=60.0, store=store)
    return MegatronModel(spec, layout=Layout(), rank=0, timeout_seconds=60.0)


def matrix_product_tflops(place: Place) -> float:
    """What a large product in the dtype of the computation reaches here."""
    import torch

    size, dtype = (8192, torch.bfloat16) if place.device == "cuda" else (256, torch.float32)
    a = torch.ones(size, size, dtype=dtype, device=place.device)
    b, out = torch.ones_like(a), torch.empty_like(a)

    def several() -> None:
        for _ in range(10):
            torch.mm(a, b, out=out)
        wait_for_device(place)

    several()
    return 10 * rate(several, seconds=min(1.0, place.seconds)) * 2 * size**3 / 1e12


def rate(work: Callable[[], object], *, seconds: float, least: int = 3) -> float:
    """How often `work` is done in a second, from `least` times or `seconds` on."""
    began, done = time.perf_counter(), 0
    while done < least or time.perf_counter() - began < seconds:
        work()
        done += 1
    return done / (time.perf_counter() - began)


# --- generation ----------------------------------------------------------------------------------


def at_once(place: Place) -> Sequence[int]:
    return (2,) if place.tiny else (1, 64, 256)


def new_tokens(place: Place) -> int:
    return 8 if place.tiny else 256


def prompts(place: Place, shape: Shape, count: int) -> list[list[int]]:
    import numpy as np

    length = 16 if place.tiny else PROMPT_TOKENS
    found: list[list[int]] = np.random.default_rng(count).integers(0, shape.vocab_size - 2, (count, length)).tolist()
    return found


def generation(place: Place, name: str) -> list[Row]:
    """The embedded engine, called directly."""
    from streamrl import EmbeddedEngine, SamplingParams

    shape, folder = shape_of(place, name), place.model(name)
    require_memory(place, f"serving {name}", 2.5 * shape.parameters)

    async def measure(*, graphs: bool, overlap: bool) -> list[Row]:
        async with EmbeddedEngine(
            folder=folder,
            dtype=torch_dtype(place),
            device=torch_device(place),
            max_running=max(at_once(place)),
            max_context=512,
            prefix_cache_bytes=0,
            cuda_graphs=graphs,
            overlap=overlap,
        ) as engine:

            async def one(count: int, length: int) -> float:
                params = SamplingParams(max_new_tokens=length, ignore_eos=True)
                began = time.perf_counter()
                responses = await engine.generate(prompts(place, shape, count), params)
                return sum(len(response.output_ids) for response in responses) / (time.perf_counter() - began)

            rows = []
            for count in at_once(place):
                began = time.perf_counter()
                await one(count, new_tokens(place))  # compiles, allocates and records graphs
                first = time.perf_counter() - began
                found = await one(count, new_tokens(place))
                row = {"model": name, "engine": "streamrl", "cuda_graphs": graphs, "at_once": count}
                row |= {"overlap": overlap} if graphs else {}
                row |= {"tokens_per_second": found, "first_seconds": first}
                if graphs:
                    with profiled(place) as decoding:
                        await one(count, PROFILED_TOKENS)
                    way = "decoding-overlapped" if overlap else "decoding"
                    file = latest(f"gpu-profile-{name}-{way}-{count}.txt".lower())
                    file.write_text(f"{PROFILED_TOKENS} tokens for {count} prompts at once, {name}\n{decoding.text}")
                    row |= decoding.figures | {"profile": file.name}
                rows.append(row)
            return rows

    ways = [(False, False), (True, False), (True, True)]
    return [row for graphs, overlap in ways for row in asyncio.run(measure(graphs=graphs, overlap=overlap))]


def transformers(place: Place, name: str) -> list[Row]:
    """transformers' `generate`, all prompts in one call."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    shape, folder = shape_of(place, name), place.model(name)
    device_memory(place)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch_dtype(place), local_files_only=True)
    model.eval().to(place.device)

    def generate(count: int, length: int) -> int:
        ids = torch.tensor(prompts(place, shape, count), device=place.device)
        settings = GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, min_new_tokens=length, max_new_tokens=length
        )
        settings.eos_token_id, settings.pad_token_id = -1, 0
        with torch.inference_mode():
            answer = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        wait_for_device(place)
        return int(answer[:, ids.shape[1] :].numel())

    return rates_of(place, name, "transformers", generate, at_once(place)[1:] or at_once(place))


def rates_of(
    place: Place, name: str, engine: str, generate: Callable[[int, int], int], counts: Sequence[int]
) -> list[Row]:
    """Tokens per second by requests at once. `generate`: requests and their new tokens → tokens in all."""
    rows = []
    for count in counts:
        generate(count, 4)  # warms up
        began = time.perf_counter()
        made = generate(count, new_tokens(place))
        found = made / (time.perf_counter() - began)
        rows.append({"model": name, "engine": engine, "at_once": count, "tokens_per_second": found})
    return rows


def interpreter_of_sglang(place: Place) -> str:
    python = place.sglang_python or (sys.executable if find_spec("sglang") else "")
    if not python:
        raise Skipped("SGLang is not installed (--sglang-python names an interpreter that has it)")
    return python


def sglang(place: Place, name: str) -> list[Row]:
    """A gserver with real SGLang, over HTTP."""
    from engine_contenders import Served

    from streamrl.config import from_dict

    python = interpreter_of_sglang(place)
    shape, folder = shape_of(place, name), place.model(name)
    device_memory(place)
    config = from_dict(
        {
            "run": {"device": place.device, "dir": str(place.folder / "runs")},
            "model": {"path": str(folder)},
            "data": {"max_prompt_tokens": PROMPT_TOKENS},
            "rollout": {"sampling": {"max_new_tokens": 256}},
            "gserver": {
                "engine": "sglang",
                "max_context": 512,
                "max_running": max(at_once(place)),
                "prefix_cache_mb": 0,
                "sglang": {"python": python, "args": list(place.sglang_args)},
            },
        }
    )
    server = Served("sglang", config, folder)
    try:
        return rates_of(
            place, name, "sglang", lambda n, length: server.generate(prompts(place, shape, n), length), at_once(place)
        )
    finally:
        server.close()


# --- publication ---------------------------------------------------------------------------------

IPC, GLOO, NCCL = "cuda_ipc", "collective gloo", "collective nccl"


def publication(place: Place, name: str, way: str) -> list[Row]:
    """Weight updates from this process to a gserver, by one `way`: `weights.mode` and `weights.backend`."""

    device_memory(place)
    folder = place.model(name)
    if place.device == "cpu" and way != GLOO:
        raise Skipped(f"{way} needs a CUDA device")
    if way == NCCL:
        refuse_too_few_ranks()
    return [{"way": way, "model": name, **asyncio.run(_publication(place, folder, way))}]


def refuse_too_few_ranks() -> None:
    """Raise `Skipped` if NCCL allows fewer than two ranks on this machine."""
    from tests.devices import MULTI_RANK, nccl_ranks

    if (nccl_ranks() or 2) < 2:
        raise Skipped(f"two ranks of NCCL need two GPUs, or NCCL 2.30 or newer and {MULTI_RANK}=1")


async def _publication(place: Place, folder: Path, way: str) -> Row:
    from bench_weights import Weights, point, read_weights

    from streamrl.config import from_dict

    mode, _, backend = way.partition(" ")
    with tempfile.TemporaryDirectory() as name:
        config = from_dict(
            {
                "run": {"dir": name, "device": place.device},
                "model": {"path": str(folder)},
                "data": {"max_prompt_tokens": 64},
                "rollout": {"sampling": {"max_new_tokens": 64}},
                "gserver": {"max_context": 256, "max_running": 4},
                "weights": {"mode": mode, **({"backend": backend} if backend else {})},
                "limits": {"heartbeat_seconds": 0.5},
            }
        )
        weights_here = {n: tensor.to(torch_device(place)) for n, tensor in read_weights(folder).items()}
        if backend == "nccl":  # this process has its device already; the gserver gets the next one
            os.environ["CUDA_VISIBLE_DEVICES"] = visible_gpus()[-1]
        async with point(config, Path(name), folder) as here:
            weights = Weights(weights_here, dtype=here.dtype)
            bare = bare_copy(place, list(weights_here.values()), here.dtype)
            await here.publish(1, weights)
            found = [await here.publish(version, weights) for version in range(2, 5)]
    size = sum(weights.sizes)
    seconds = statistics.median(one["publish_seconds"] for one in found)
    return {
        "gib": size / GIB,
        "publish_seconds": seconds,
        "pause_seconds": statistics.median(one["pause_seconds"] for one in found),
        "bare_seconds": bare,
        "share": bare / seconds,
    }


def bare_copy(place: Place, tensors: Sequence[Any], dtype: Any) -> float:
    """Seconds to copy all `tensors` on their device, converted to `dtype`."""
    import torch

    targets = [torch.empty(tensor.shape, dtype=dtype, device=tensor.device) for tensor in tensors]

    def copy() -> None:
        for target, tensor in zip(targets, tensors, strict=True):
            target.copy_(tensor)
        wait_for_device(place)

    copy()
    return 1 / rate(copy, seconds=0.5)


# --- whole runs ----------------------------------------------------------------------------------


def asynchronous(place: Place, name: str, engine: str = "embedded", weights: str = "auto") -> list[Row]:
    """The same job with `max_staleness` 0 and 4. `weights`: how they are published, as in `publication`."""
    from throughput import run

    from streamrl.config import from_dict, to_toml

    if weights == NCCL:
        refuse_too_few_ranks()
    python = interpreter_of_sglang(place) if engine == "sglang" else ""
    mode, _, backend = weights.partition(" ")
    shape, folder = shape_of(place, name), place.model(name)
    device_memory(place)
    mean, longest = (8, 24) if place.tiny else (64, 320)
    steps = 4 if place.tiny else 6
    stops = list(range(max(1, shape.vocab_size // mean)))
    config = from_dict(
        {
            "run": {"device": place.device},
            "model": {"path": str(folder)},
            "data": {"source": "python", "path": "streamrl.rollout.tasks:copy_digits", "max_prompt_tokens": 16},
            "rollout": {
                "group_size": 2 if place.tiny else 8,
                "sampling": {"max_new_tokens": longest, "stop_token_ids": stops},
                "reward": {"function": "streamrl.rollout.tasks:hash_reward"},
            },
            "gserver": {
                "engine": engine,
                "max_running": 8 if place.tiny else 128,
                "max_context": 64 if place.tiny else 1152,
                "sglang": {"python": python, "args": list(place.sglang_args)},
            },
            "weights": {"mode": mode, **({"backend": backend} if backend else {})},
            "trainer": {"batch_groups": 2 if place.tiny else 8, "lr": 1e-7},
        }
    )
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as runs:
        file = Path(runs, "config.toml")
        file.write_text(to_toml(config))
        for staleness in (0, 4):
            found = run(Path(runs), engine, staleness, "mask", steps, seed=0, example=file)
            rows.append({"model": name, "engine": engine, "weights": weights, "max_staleness": staleness, **found})
    for row in rows:
        row["speedup"] = row["groups_per_second"] / rows[0]["groups_per_second"]
    return rows


# --- steps ---------------------------------------------------------------------------------------


class Step(NamedTuple):
    """One process."""

    name: str
    seconds: float
    """Its deadline."""
    tests: str = ""
    """The tests marked `cuda` of this file or folder; or else:"""
    measure: Callable[[Place], list[Row]] | None = None


def of_shape(measure: Callable[..., list[Row]], name: str, *how: str) -> Callable[[Place], list[Row]]:
    return lambda place: measure(place, name, *how)


STEPS = (
    Step("models", 90, measure=models),
    Step("tests: engine", 100, tests="tests/gserver/embedded/test_on_cuda.py"),
    Step("tests: backend", 120, tests="tests/trainer/backends/test_on_cuda.py"),
    Step("tests: roles", 90, tests="tests/trainer/roles"),
    Step("tests: Megatron", 120, tests="tests/trainer/backends/test_megatron_on_cuda.py"),
    Step("tests: weights", 100, tests="tests/trainer/worker"),
    Step("tests: learning", 150, tests="tests/e2e/test_on_cuda.py"),
    Step("training 1B", 75, measure=of_shape(training, BILLION, "torch")),
    Step("training 1B, batches of a run", 180, measure=of_shape(training_of_runs, BILLION)),
    Step("training 1B, Megatron", 75, measure=of_shape(training, BILLION, "megatron")),
    Step("generation 1B", 90, measure=of_shape(generation, BILLION)),
    Step("publication 1B, CUDA IPC", 60, measure=of_shape(publication, BILLION, IPC)),
    Step("publication 1B, NCCL", 60, measure=of_shape(publication, BILLION, NCCL)),
    Step("async 1B", 150, measure=of_shape(asynchronous, BILLION)),
    Step("async 1B, NCCL", 120, measure=of_shape(asynchronous, BILLION, "embedded", NCCL)),
    Step("async 1B, SGLang", 200, measure=of_shape(asynchronous, BILLION, "sglang")),
    Step("async 1B, SGLang, NCCL", 200, measure=of_shape(asynchronous, BILLION, "sglang", NCCL)),
    Step("publication 1B, gloo", 60, measure=of_shape(publication, BILLION, GLOO)),
    Step("transformers 1B", 60, measure=of_shape(transformers, BILLION)),
    Step("generation 7B", 90, measure=of_shape(generation, SEVEN)),
    Step("training 7B", 60, measure=of_shape(training, SEVEN, "torch")),
    Step("sglang 1B", 120, measure=of_shape(sglang, BILLION)),
)
"""In the order in which they are made: what matters most comes first."""


def run_step(step: Step, place: Place, *, seconds: float) -> list[Row]:
    """Make `step` in a process of its own, which is killed with all that it started after `seconds`; return its rows,
    each with the step's name and whether it is `ok` (None: skipped)."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="streamrl-gpu-") as folder:
        answer, log = Path(folder, "answer.json"), Path(folder, "log")
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment[NVML_CHECK] = "1"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command(step, place, answer),
                cwd=ROOT,
                env=environment | {"STREAMRL_TEST_DEVICE": place.device},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                end(process)
        said = log.read_text(errors="replace")
        taken = time.perf_counter() - began
        whole = {"step": step.name, "seconds": taken}
        if code is None:
            return [whole | {"ok": False, "note": f"not through after {seconds:.0f} s", "log": tail(said)}]
        if step.tests:
            return [whole | test_result(code, said)]
        if not answer.exists():
            return [whole | {"ok": False, "note": f"ended with exit code {code}", "log": tail(said)}]
        found: Row = json.loads(answer.read_text())
        if found["skipped"]:
            return [whole | {"ok": None, "note": found["skipped"]}]
        return [whole | {"ok": not str(row.get("note", "")).startswith("failed")} | row for row in found["rows"]]


def command(step: Step, place: Place, answer: Path) -> list[str]:
    if step.tests:
        return [sys.executable, "-m", "pytest", "-q", "-rfEs", "-m", "cuda", "-p", "no:cacheprovider", step.tests]
    words = ["--step", step.name, "--answer", str(answer), "--device", place.device, "--folder", str(place.folder)]
    words += ["--tiny"] if place.tiny else []
    words += ["--sglang-python", place.sglang_python] if place.sglang_python else []
    words += [f"--sglang-args={' '.join(place.sglang_args)}"] if place.sglang_args else []
    words += ["--models", *place.models]
    return [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *words]


def end(process: subprocess.Popen[bytes]) -> None:
    """End the process's session, whoever is left in it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDING_SECONDS)
            if number == signal.SIGTERM:
                continue  # others of its session may be left


def test_result(code: int, said: str) -> Row:
    """What pytest's last line says, and why tests were skipped."""
    last = next((line.strip("= ") for line in reversed(said.splitlines()) if COUNTS.match(line.strip("= "))), "")
    reasons = sorted(set(re.findall(r"^SKIPPED \[\d+\] \S+ (.+)$", said, re.MULTILINE)))
    note = "; ".join([last, *reasons])
    if code == 0 and "passed" not in last:
        return {"ok": None, "note": note}
    return {"ok": code == 0, "note": note, **({} if code == 0 else {"log": tail(said)})}


def tail(text: str) -> str:
    return "\n".join(text.rstrip().splitlines()[-TAIL_LINES:])


def measured(step: Step, place: Place) -> Row:
    """Return the rows of a step under `rows`, or the reason why the machine cannot make it under `skipped`."""
    assert step.measure is not None
    try:
        return {"rows": step.measure(place), "skipped": ""}
    except Skipped as reason:
        return {"rows": [], "skipped": str(reason)}


def try_step(step: Step, place: Place) -> list[Row]:
    """Make a step in this process, so that torch is imported once; return its rows as `run_step` does. Errors pass
    through. Tests are left to pytest."""
    began = time.perf_counter()
    found = measured(step, place) if step.measure else {"rows": [], "skipped": f"pytest runs {step.tests}"}
    whole: Row = {"step": step.name, "seconds": time.perf_counter() - began}
    if found["skipped"]:
        return [whole | {"ok": None, "note": found["skipped"]}]
    return [whole | {"ok": True} | row for row in found["rows"]]


def answer_step(step: Step, place: Place, answer: Path) -> None:
    """In the step's own process: measure, and write the result to the file `answer`."""
    found = measured(step, place)
    draft = answer.with_suffix(".draft")
    draft.write_text(json.dumps(found))
    draft.rename(answer)


def device_name(place: Place) -> str:
    """For the results' file: `h100-80gb-hbm3`; asked in a process of its own, so that this one holds no device."""
    if place.device == "cpu":
        return "cpu"
    script = "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else '')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    if not done.stdout.strip():
        raise SystemExit("torch finds no CUDA device: see `streamrl doctor`, or try the steps with --dry-run")
    return re.sub(r"[^a-z0-9]+", "-", done.stdout.strip().lower().removeprefix("nvidia ")).strip("-")


def told(row: Row) -> str:
    """A line for people."""
    state = {True: "ok", False: "FAILED", None: "skipped"}[row["ok"]]
    hidden = ("step", "seconds", "ok", "log", "note")
    figures = ", ".join(f"{key} {short(value)}" for key, value in row.items() if key not in hidden)
    line = f"{row['step']}: {state} ({row['seconds']:.0f} s) {row.get('note', '')} {figures}".rstrip()
    return line + (f"\n{row['log']}" if row.get("log") else "")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="models of no size: tries the steps, measures nothing")
    parser.add_argument(
        "--dry-run", action="store_true", help="every step's code on the CPU with models of no size, in two minutes"
    )
    parser.add_argument("--only", nargs="+", metavar="STEP", help="steps whose names begin so")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all steps together")
    parser.add_argument("--sglang-python", default="", help="an interpreter that has SGLang for this device")
    parser.add_argument("--sglang-args", type=str.split, default=[], metavar="FLAGS", help="of its server, in one word")
    parser.add_argument("--step", choices=[step.name for step in STEPS], help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--models", nargs="*", default=(), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.dry_run:
        options.device, options.tiny = "cpu", True
    if options.step:
        place = Place(
            options.device, options.tiny, options.folder, options.sglang_python, options.sglang_args, options.models
        )
        answer_step(next(step for step in STEPS if step.name == options.step), place, options.answer)
        return
    chosen = [step for step in STEPS if not options.only or step.name.startswith(tuple(options.only))]
    if not chosen:
        raise SystemExit(f"--only {' '.join(options.only)}: the steps are {', '.join(step.name for step in STEPS)}")
    if all(step.measure is not models for step in chosen) and any(step.measure for step in chosen):
        chosen.insert(0, STEPS[0])
    end_at = time.monotonic() + options.seconds
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="streamrl-gpu-", dir=roomy())))
        needed = [BILLION, *([SEVEN] if any("7B" in step.name for step in chosen) else [])]
        place = Place(options.device, options.tiny, folder, options.sglang_python, options.sglang_args, needed)
        name = f"gpu-{device_name(place)}"
        settings = {"quick": options.tiny, "device": options.device, "steps": [step.name for step in chosen]}
        rows: list[Row] = []
        for step in chosen:
            left = end_at - time.monotonic()
            if options.dry_run:
                made = try_step(step, place)
            elif left < 10:
                made = [{"step": step.name, "seconds": 0.0, "ok": None, "note": "no time was left (--seconds)"}]
            else:
                made = run_step(step, place, seconds=min(step.seconds, left))
            rows += made
            for row in made:
                print(told(row), flush=True)
            write_results(name, settings, rows)
    failed = sorted({row["step"] for row in rows if row["ok"] is False})
    print(f"written: {latest(f'{name}.json')}")
    if failed:
        raise SystemExit(f"{len(failed)} of {len(chosen)} steps failed: {', '.join(failed)}")


def roomy() -> str | None:
    """Memory, where it has room for the models; else where temporary files are."""
    memory = Path("/dev/shm")
    with suppress(OSError):
        if shutil.disk_usage(memory).free > 24 * GIB:
            return str(memory)
    return None


if __name__ == "__main__":
    main()
