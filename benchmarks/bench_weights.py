"""The cost of bringing new weights to gservers, by their number, the size of the model, and the way.

    python benchmarks/bench_weights.py [--quick] [--sizes 0.5M 5M 135M] [--gservers 1 2 4] [--modes collective ...]
                                       [--dtype bfloat16] [--engine simulated]

A real manager, real gservers (embedded, in processes of their own, otherwise idle) and the trainer's publisher.
With `--engine simulated` gservers receive the weights and throw them away: for models that have no room here twice.
The trainer has its weights in float32; with `--dtype bfloat16` they are converted on their way.

| figure | meaning |
|---|---|
| first token | from the end of a step, when the publisher is called, to the first token of a request after `publish` |
| publish | until the publisher has heard from all gservers |
| pause | longest pause of generation on any gserver |
| share | bytes per second of `publish`, relative to bare ones among the same processes in the same run |

Bare is a broadcast (gloo) of as many bytes in as many tensors from and into memory that is there (1 GiB of it, used
again for larger models), whatever the way. Repeats of both take turns, and of both the median counts.

Checksums are on, as they are in a run unless `weights.checksum` is off.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
from common import Row, earlier_rows, parser_of, report
from torch import Tensor

from streamrl import config as configuration
from streamrl.config import Config
from streamrl.device import resolve_device, resolve_dtype
from streamrl.gserver.manager.http import managing
from streamrl.gserver.server.process import serve
from streamrl.models import ensure_checkpoint
from streamrl.safetensors_files import TensorFiles
from streamrl.trainer.worker.publisher import Publisher, carriers_for
from streamrl.trainer.worker.weight_broadcast import backend_for
from streamrl.transport.addresses import LOOPBACK
from streamrl.transport.collective import broadcasts, destroy_group, form_group, open_store
from streamrl.transport.credentials import generation_key
from streamrl.transport.generation import GenerateRequest, GenerationClient, SamplingParams
from streamrl.transport.manager_client import ControlClient
from streamrl.transport.secret import Secret, of_run_at

Mode = Literal["collective", "disk", "shared_memory"]
MODES: tuple[Mode, ...] = ("collective", "disk", "shared_memory")
SIZES: dict[str, dict[str, int]] = {
    "0.5M": {"hidden_size": 128, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 32},
    "5M": {"hidden_size": 320, "layers": 5, "heads": 5, "kv_heads": 5, "head_dim": 64},
    "135M": {"hidden_size": 1024, "layers": 11, "heads": 16, "kv_heads": 16, "head_dim": 64},
    "1.5B": {"hidden_size": 2048, "layers": 30, "heads": 16, "kv_heads": 16, "head_dim": 128},
}
"""About so many parameters; vocabulary and context are tiny."""
START_SECONDS = 300.0
BARE_SECONDS = 120.0
"""Deadline of a bare broadcast."""
BARE_MEMORY = 2**30
"""Most bytes of memory of a bare broadcast, which uses it again for larger models."""
GSERVER = "gserver"
"""First argument of this script in a gserver's process."""


class Weights:
    """Stands in for a `WeightSource`: weights of the trainer that are in memory."""

    def __init__(self, tensors: dict[str, Tensor], *, dtype: torch.dtype) -> None:
        """`dtype`: of the weights in gservers."""
        self.tensors = tensors
        self.parameters = sum(tensor.numel() for tensor in tensors.values())
        self.sizes = [tensor.numel() * dtype.itemsize for tensor in tensors.values()]
        """Bytes of each, as it is sent."""

    def specs(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(name, tuple(tensor.shape)) for name, tensor in self.tensors.items()]

    def weights(self) -> Generator[tuple[str, Tensor]]:
        yield from self.tensors.items()

    def end(self) -> None:
        """No other process has a part of them."""


def read_weights(folder: Path) -> dict[str, Tensor]:
    files = TensorFiles(folder, "model")
    return {name: files.read(name).float() for name in files.names()}


# --- a gserver's process -------------------------------------------------------------------------


def bare_broadcast(order: dict[str, Any], *, rank: int, store: Any = None) -> float:
    """Send or receive tensors of `order["sizes"]` bytes in a process group, into memory that is there; return the
    seconds. Rank 0 passes its store."""
    group = form_group(
        address="127.0.0.1",
        port=order["port"],
        rank=rank,
        world_size=order["world_size"],
        name=order["name"],
        backend="gloo",
        timeout=BARE_SECONDS,
        store=store,
    )
    sizes = order["sizes"]
    memory = torch.ones(min(sum(sizes), max(BARE_MEMORY, *sizes)), dtype=torch.uint8)
    tensors = []
    place = 0
    for size in sizes:
        place = place if place + size <= len(memory) else 0
        tensors.append(memory[place : place + size])
        place += size
    list(broadcasts([("a first byte, when all are there", memory[:1])], group))
    began = time.perf_counter()
    for tensor in tensors:
        list(broadcasts([("bare bytes", tensor)], group))
    seconds = time.perf_counter() - began
    destroy_group(group)
    return seconds


def serve_weights(file: str, manager_url: str, index: int, folder: str) -> None:
    """Serve as any gserver. Each line on stdin is the order of a bare broadcast; its seconds go to stdout."""

    def follow_orders() -> None:
        for line in sys.stdin:
            print(json.dumps(bare_broadcast(json.loads(line), rank=index + 1)), flush=True)

    threading.Thread(target=follow_orders, daemon=True).start()
    asyncio.run(serve(configuration.load(file), manager_url=manager_url, index=index, model_dir=Path(folder)))


# --- one run -------------------------------------------------------------------------------------


class Point:
    """A run: a manager, gservers, and a publisher."""

    def __init__(
        self,
        config: Config,
        client: ControlClient,
        gservers: list[asyncio.subprocess.Process],
        urls: list[str],
        *,
        secret: Secret,
    ) -> None:
        device = resolve_device(config.run.device)
        self.dtype = resolve_dtype(config.gserver.dtype, device)
        self._gservers = gservers
        self._urls = urls
        self._generation = GenerationClient(timeout=START_SECONDS, key=generation_key(config, secret))
        self._store = open_store("127.0.0.1")
        self._bare = 0
        carriers = carriers_for(
            config,
            reach=LOOPBACK,
            backend=backend_for(config.weights, device),
            dtype=self.dtype,
            device=device,
            numbers=0,
        )
        self._publisher = Publisher(client=client, config=config, carriers=carriers, in_thread=asyncio.to_thread)

    async def publish(self, version: int, weights: Weights) -> dict[str, float]:
        began = time.perf_counter()
        published = await self._publisher.publish(version, weights)  # type: ignore[arg-type]
        publish_seconds = time.perf_counter() - began
        await self._first_token(version)
        return {
            "publish_seconds": publish_seconds,
            "first_token_seconds": time.perf_counter() - began,
            "pause_seconds": published.pause_seconds,
        }

    async def bare(self, weights: Weights) -> float:
        """Return the seconds of a broadcast of as many bytes among the same processes."""
        self._bare += 1
        order: dict[str, Any] = {
            "port": self._store.port,
            "world_size": len(self._gservers) + 1,
            "name": f"bare-{self._bare}",
            "sizes": weights.sizes,
        }
        others = [asyncio.create_task(self._order(gserver, order)) for gserver in self._gservers]
        await asyncio.to_thread(bare_broadcast, order, rank=0, store=self._store)
        return max(await asyncio.gather(*others))

    async def close(self) -> None:
        self._publisher.close()
        await self._generation.close()

    async def _first_token(self, version: int) -> None:
        request = GenerateRequest(
            input_ids=[1, 2, 3], sampling_params=SamplingParams(max_new_tokens=1, ignore_eos=True)
        )
        reply = await self._generation.generate(self._urls[0], request)
        assert reply.meta_info.weight_version == str(version), reply.meta_info.weight_version

    async def _order(self, gserver: asyncio.subprocess.Process, order: dict[str, Any]) -> float:
        assert gserver.stdin is not None
        assert gserver.stdout is not None
        gserver.stdin.write(json.dumps(order).encode() + b"\n")
        await gserver.stdin.drain()
        seconds: float = json.loads(await gserver.stdout.readline())
        return seconds


@asynccontextmanager
async def point(config: Config, folder: Path, model_dir: Path) -> AsyncIterator[Point]:
    """Start the processes of a run of `config`."""
    file = folder / "config.toml"
    file.write_text(configuration.to_toml(config))
    async with (
        managing(config, host="127.0.0.1", port=0) as managed,
        _point_of(managed.url, config, file, model_dir) as found,
    ):
        yield found


@asynccontextmanager
async def _point_of(url: str, config: Config, file: Path, model_dir: Path) -> AsyncIterator[Point]:
    client = ControlClient(url, secret=of_run_at(url))
    gservers = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, __file__, GSERVER, str(file), url, str(index), str(model_dir)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for index in range(config.gserver.count)
    ]
    try:
        peers = await client.topology("gserver", config.gserver.count, patience=START_SECONDS)
        found = Point(config, client, gservers, [peer.address for peer in peers], secret=of_run_at(url))
        try:
            yield found
        finally:
            await found.close()
    finally:
        await client.close()
        for gserver in gservers:
            gserver.kill()
            await gserver.wait()


async def measure(size: str, count: int, mode: Mode, *, engine: str, repeats: int, dtype: str = "float32") -> Row:
    """One row."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = configuration.from_dict(
            {
                "run": {"dir": name, "device": "cpu"},
                "model": {"path": "scratch", "scratch": SIZES[size]},
                "data": {"max_prompt_tokens": 64},
                "rollout": {"sampling": {"max_new_tokens": 64}},
                "gserver": {"engine": engine, "count": count, "max_context": 256, "max_running": 4, "dtype": dtype},
                "weights": {"mode": mode},
                "limits": {"heartbeat_seconds": 0.5},
            }
        )
        model_dir = ensure_checkpoint(config, cache=folder / "cache")
        rows, bare = [], []
        async with point(config, folder, model_dir) as here:
            weights = Weights(read_weights(model_dir), dtype=here.dtype)
            await here.publish(1, weights)  # forms the group, makes the second set of weights
            for version in range(2, repeats + 2):
                bare.append(await here.bare(weights))
                rows.append(await here.publish(version, weights))
        figures = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        bare_seconds = statistics.median(bare)
        return {
            "mode": mode,
            "engine": engine,
            "size": size,
            "repeats": repeats,
            "parameters": weights.parameters,
            "dtype": dtype,
            "gservers": count,
            "megabytes": sum(weights.sizes) / 2**20,
            **figures,
            "bare_seconds": bare_seconds,
            "share": bare_seconds / figures["publish_seconds"],
        }


def main() -> None:
    parser = parser_of(__doc__, quick="small models, at most two gservers")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES))
    parser.add_argument("--gservers", nargs="+", type=int)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--engine", choices=("embedded", "simulated"), default="embedded")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--append", action="store_true", help="keep the points that the last run has written")
    chosen = parser.parse_args()
    sizes = chosen.sizes or (["0.5M", "5M"] if chosen.quick else ["0.5M", "5M", "135M"])
    counts = chosen.gservers or ([1, 2] if chosen.quick else [1, 2, 4])
    torch.set_num_threads(1)
    rows = earlier_rows("bench_weights") if chosen.append else []
    for mode, size, count in product(chosen.modes, sizes, counts):
        options = {"engine": chosen.engine, "repeats": chosen.repeats, "dtype": chosen.dtype}
        rows.append(asyncio.run(measure(size, count, mode, **options)))
        print(rows[-1], flush=True)
    report("bench_weights", {"checksum": True, "quick": chosen.quick}, rows)


if __name__ == "__main__":
    if sys.argv[1:2] == [GSERVER]:
        serve_weights(sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])
    else:
        main()
