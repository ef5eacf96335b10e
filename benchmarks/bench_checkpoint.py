"""The cost of a checkpoint: how long training stands still, the time until it is on the disk, and its memory.

    python benchmarks/bench_checkpoint.py [--quick] [--workers N ...] [--repeats N] [--folder DIR]

Model workers with random weights and moments (a process each, one thread, FSDP2 where there are several) save as a run
does: each copies its tensors into host memory, for which training stands still, and a thread of its own writes the
copy. The yardsticks, on the same workers and at the same time on all of them: copying these tensors in memory, and
writing them to one file with `fsync`. Shown are medians of the slowest worker; memory is the most by which its process
grew while it saved.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from common import Row, begin_peak, parser_of, report, resident
from transformers import Qwen3Config, Qwen3ForCausalLM, logging

from streamrl.config import from_dict
from streamrl.device import compute_with
from streamrl.records.progress import Progress
from streamrl.trainer.worker.assembly import Assembly
from streamrl.trainer.worker.checkpoint import CheckpointWriter, Together, take_snapshot
from streamrl.transport.collective import join_world, open_store

SHAPE = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
WORKERS = (1, 2, 4)
SECONDS = 300.0
"""Deadline of a save, and of other waits of the workers."""


def measure(model: Path, folder: Path, *, rank: int, world: int, port: int, repeats: int) -> Row:
    """Of one worker, in this process; the others are others."""
    compute_with(1)
    if world > 1:
        join_world(address="127.0.0.1", port=port, rank=rank, world_size=world, backend="gloo", timeout=SECONDS)
    config = from_dict(
        {"trainer": {"dtype": "float32", "data_parallel": world, "shard": world > 1}, "run": {"device": "cpu"}}
    )
    assembly = Assembly(config, roles=frozenset(), model_dir=model, rank=rank, device=torch.device("cpu"))
    role = assembly.actor.model
    writer = CheckpointWriter(Together(rank, world, seconds=SECONDS), keep=1, spare=None)
    held = [part.values for part in (*role.weight_parts(), *role.optimizer_parts())]
    found: dict[str, list[float]] = {name: [] for name in ("copy", "standstill", "bare_write", "write", "grown")}

    def timed(name: str, act: Callable[[], Any]) -> Any:
        if world > 1:
            dist.barrier()
        began = time.perf_counter()
        done = act()
        found[name].append(time.perf_counter() - began)
        return done

    for number in range(repeats):
        timed("copy", lambda: [tensor.clone() for tensor in held])
        timed("bare_write", lambda: _write(held, folder / f"bare-{rank}"))
        before = resident("VmRSS")
        begin_peak()
        reached = Progress(policy_version=number, trained=[(0, 1)], rejected=[], prompts="")
        snapshot = timed("standstill", lambda reached=reached: take_snapshot(assembly, config, reached))
        timed("write", lambda at=folder / f"step-{number:06d}", what=snapshot: _save(writer, at, what))
        del snapshot
        found["grown"].append(resident("VmHWM") - before)
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()
    return {"bytes": sum(tensor.nbytes for tensor in held), **{name: median(times) for name, times in found.items()}}


def _write(tensors: list[torch.Tensor], file: Path) -> None:
    with file.open("wb") as opened:
        for tensor in tensors:
            opened.write(tensor.contiguous().numpy().data.cast("B"))
        opened.flush()
        os.fsync(opened.fileno())
    file.unlink()


def _save(writer: CheckpointWriter, folder: Path, snapshot: Any) -> None:
    writer.begin(folder, snapshot)
    if failure := writer.finish(limit=SECONDS):
        raise SystemExit(failure)


def row(model: Path, folder: Path, *, world: int, repeats: int) -> Row:
    """Of `world` workers, each in a process of its own: the slowest one of each."""
    store = open_store("127.0.0.1")
    command = [sys.executable, __file__, "--repeats", str(repeats), "--measure", str(model), str(folder)]
    ranks = [
        subprocess.Popen([*command, str(rank), str(world), str(store.port)], stdout=subprocess.PIPE, text=True)
        for rank in range(world)
    ]
    found: list[Row] = []
    try:
        for process in ranks:
            told, _ = process.communicate(timeout=2 * SECONDS)
            if process.returncode:
                raise SystemExit(f"a worker of {world} ended with {process.returncode}")
            found.append(json.loads(told.splitlines()[-1]))
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    shutil.rmtree(folder)
    return {"workers": world, **{name: max(one[name] for one in found) for name in found[0]}}


def main() -> None:
    parser = parser_of(__doc__, quick="a tenth of the weights, and one save each")
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; else for temporary files")
    parser.add_argument("--measure", nargs=5, metavar="WORD", help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if options.measure:
        model, folder, *numbers = options.measure
        rank, world, port = (int(number) for number in numbers)
        told = measure(Path(model), Path(folder), rank=rank, world=world, port=port, repeats=options.repeats)
        print(json.dumps(told))
        return
    repeats = 1 if options.quick else options.repeats
    shape = SHAPE | ({"num_hidden_layers": 1, "vocab_size": 512} if options.quick else {})
    rows = []
    with tempfile.TemporaryDirectory(dir=options.folder) as made:
        model = Path(made) / "model"
        torch.manual_seed(0)
        Qwen3ForCausalLM(Qwen3Config(**shape)).save_pretrained(model)
        for world in options.workers:
            folder = Path(made) / f"of-{world}"
            folder.mkdir()
            rows.append(row(model, folder, world=world, repeats=repeats))
            print(rows[-1], flush=True)
    settings = {"model": shape, "repeats": repeats, "quick": options.quick}
    report("bench_checkpoint", settings, rows)


if __name__ == "__main__":
    main()
