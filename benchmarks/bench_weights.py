"""What it costs to bring new weights to gservers, by their number, the size of the model, and the way.

    python benchmarks/bench_weights.py [--quick] [--sizes 0.5M 5M 135M] [--gservers 1 2 4] [--modes collective ...]
                                       [--dtype bfloat16] [--engine simulated] [--changed 0.01 0.05 0.2]
                                       [--senders 1 2 4]

A real manager, real gservers (embedded, in processes of their own, otherwise idle) and the trainer's publisher.
With `--engine simulated` gservers receive the weights and throw them away: for models that have no room here twice.
The trainer has its weights in float32; with `--dtype bfloat16` they are converted on their way.

| figure | meaning |
|---|---|
| first token | from the end of a step, when the publisher is called, to the first token of a request after `publish` |
| publish | until the publisher knows that all gservers have them |
| pause | longest pause of generation on any gserver |
| share | bytes per second of `publish`, relative to bare ones among the same processes in the same run |

With `--changed` the same is measured with `weights.delta`, when so large a share of the numbers of each weight has
changed since the version before, beside 1 for all of them; what was sent is a column of its own.

With `--senders` so many model workers, each a process of its own that has all weights, broadcast a part each; the most
that one of them sent is a column of its own.

Bare is a broadcast (gloo) of as many bytes in as many tensors from and into memory that is there (1 GiB of it, used
again for what is larger), whatever the way. Repeats of both take turns, and of both the median counts.

Checksums are on, as they are in a run unless `weights.checksum` says otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Generator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from common import earlier_rows, latest, write_results
from rich.console import Console
from rich.table import Table
from torch import Tensor
from weights_gserver import bare_broadcast
from weights_rank import read_weights, source_of

from streamrl import config as configuration
from streamrl.config import Config
from streamrl.device import resolve_device, resolve_dtype
from streamrl.gserver.manager.process import managing
from streamrl.models import ensure_checkpoint
from streamrl.trainer.worker.publisher import Carriers, Publisher, carriers_for
from streamrl.trainer.worker.weight_source import Senders, WeightSource
from streamrl.transport.addresses import LOOPBACK
from streamrl.transport.collective import backend_for, join_world, open_store
from streamrl.transport.generation import GenerateRequest, GenerationClient, SamplingParams
from streamrl.transport.keys import generation_key
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
AIM = 0.9
"""For the share of a bare broadcast's bytes per second."""


class Weights:
    """What a `WeightSource` is to the publisher, of tensors that are there."""

    def __init__(self, tensors: dict[str, Tensor], *, dtype: torch.dtype) -> None:
        """`dtype`: as which gservers get them."""
        self.tensors = tensors
        self.parameters = sum(tensor.numel() for tensor in tensors.values())
        self.sizes = [tensor.numel() * dtype.itemsize for tensor in tensors.values()]
        """Bytes of each, as it is sent."""

    def change(self, share: float) -> None:
        """Give so large a share of the numbers of each weight another sign."""
        for tensor in self.tensors.values():
            tensor.view(-1)[:: round(1 / share)] *= -1

    def specs(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(name, tuple(tensor.shape)) for name, tensor in self.tensors.items()]

    def weights(self) -> Generator[tuple[str, Tensor]]:
        yield from self.tensors.items()

    def end(self) -> None:
        """Nobody else has a part of them."""


class Point:
    """One run: a manager, `count` gservers, and a publisher."""

    def __init__(
        self,
        config: Config,
        client: ControlClient,
        gservers: list[asyncio.subprocess.Process],
        urls: list[str],
        *,
        secret: Secret,
        senders: Senders | None = None,
    ) -> None:
        """`senders`: what brings the weights where several model workers do."""
        self.config = config
        device = resolve_device(config.run.device)
        self.dtype = resolve_dtype(config.gserver.dtype, device)
        self._client = client
        self._gservers = gservers
        self._urls = urls
        self._generation = GenerationClient(timeout=START_SECONDS, key=generation_key(config, secret))
        self._store = open_store("127.0.0.1")
        self._bare = 0
        self._senders = senders
        carriers = (
            Carriers(senders)
            if senders is not None
            else carriers_for(
                config,
                listening=LOOPBACK,
                backend=backend_for(config.weights, device),
                dtype=self.dtype,
                device=device,
                numbers=0,
            )
        )
        self._publisher = Publisher(
            client=client, config=config.weights, carriers=carriers, in_thread=asyncio.to_thread
        )

    async def publish(self, version: int, weights: Weights | WeightSource) -> dict[str, float]:
        before = self._senders.sent_by_rank if self._senders is not None else []
        began = time.perf_counter()
        published = await self._publisher.publish(version, weights)  # type: ignore[arg-type]
        publish_seconds = time.perf_counter() - began
        await self._first_token(version)
        first_token = time.perf_counter() - began
        return {
            "publish_seconds": publish_seconds,
            "first_token_seconds": first_token,
            "pause_seconds": published.pause_seconds,
            "sent_megabytes": published.bytes / 2**20,
            "most_sent_megabytes": self._most_sent(before, published.bytes) / 2**20,
        }

    def _most_sent(self, before: list[int], all_bytes: int) -> int:
        """The most bytes that one sender has sent since `before`."""
        if self._senders is None:
            return all_bytes
        now = self._senders.sent_by_rank
        return max(b - a for a, b in zip(before or [0] * len(now), now, strict=True))

    async def bare(self, weights: Weights) -> float:
        """Seconds of a broadcast of the same bytes without anything around it."""
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
        answer: float = json.loads(await gserver.stdout.readline())
        return answer


@asynccontextmanager
async def point(
    config: Config, folder: Path, model_dir: Path, *, senders: Senders | None = None
) -> AsyncIterator[Point]:
    file = folder / "config.toml"
    file.write_text(configuration.to_toml(config))
    async with (
        managing(config, host="127.0.0.1", port=0) as managed,
        _point_of(managed.url, config, file, model_dir, senders) as found,
    ):
        yield found


@asynccontextmanager
async def _point_of(
    url: str, config: Config, file: Path, model_dir: Path, senders: Senders | None
) -> AsyncIterator[Point]:
    client = ControlClient(url, secret=of_run_at(url))
    gservers = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, str(Path(__file__).with_name("weights_gserver.py")), str(file), url, str(index)),
            str(model_dir),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for index in range(config.gserver.count)
    ]
    try:
        peers = await client.topology("gserver", config.gserver.count, patience=START_SECONDS)
        found = Point(
            config, client, gservers, [peer.address for peer in peers], secret=of_run_at(url), senders=senders
        )
        try:
            yield found
        finally:
            await found.close()
    finally:
        await client.close()
        for gserver in gservers:
            gserver.kill()
            await gserver.wait()


@asynccontextmanager
async def ranks(
    config: Config, folder: Path, model_dir: Path, tensors: dict[str, Tensor], *, world: int
) -> AsyncIterator[WeightSource]:
    """The source of weights on rank 0 of `world` model workers, whose others are processes of their own."""
    file = folder / "ranks.toml"
    file.write_text(configuration.to_toml(config))
    store = open_store("127.0.0.1")
    others = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, str(Path(__file__).with_name("weights_rank.py")), str(file), str(model_dir)),
            *(str(rank), str(world), str(store.port)),
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(1, world)
    ]

    def join() -> WeightSource:
        join_world(
            address="127.0.0.1",
            port=store.port,
            rank=0,
            world_size=world,
            backend="gloo",
            timeout=START_SECONDS,
            store=store,
        )
        return source_of(config, tensors, rank=0, world=world)

    try:
        source = await asyncio.to_thread(join)
        yield source
        source.close()
    finally:
        for other in others:
            other.kill()
        for other in others:
            await other.wait()
        dist.destroy_process_group()


async def measure(
    size: str,
    count: int,
    mode: Mode,
    *,
    engine: str,
    repeats: int,
    dtype: str = "float32",
    changed: float | None = None,
    senders: int = 1,
) -> dict[str, Any]:
    """One row. `changed`: the share of numbers that differ from one version to the next, with deltas."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = configuration.from_dict(
            {
                "run": {"dir": name, "device": "cpu"},
                "model": {"path": "scratch", "scratch": SIZES[size]},
                "data": {"max_prompt_tokens": 64},
                "rollout": {"sampling": {"max_new_tokens": 64}},
                "gserver": {
                    "engine": engine,
                    "count": count,
                    "max_context": 256,
                    "max_running": 4,
                    "dtype": dtype,
                },
                "weights": {"mode": mode, "delta": changed is not None},
                "manager": {"heartbeat_seconds": 0.5},
            }
        )
        model_dir = ensure_checkpoint(config, cache=folder / "cache")
        rows, bare = [], []
        tensors = read_weights(model_dir)
        async with AsyncExitStack() as stack:
            source: WeightSource | None = None
            several: Senders | None = None
            if senders > 1:
                source = await stack.enter_async_context(ranks(config, folder, model_dir, tensors, world=senders))
                several = Senders(resolve_dtype(dtype, torch.device("cpu")))
            here = await stack.enter_async_context(point(config, folder, model_dir, senders=several))
            weights = Weights(tensors, dtype=here.dtype)
            await here.publish(1, source or weights)  # forms the group, makes the second set of weights
            for version in range(2, repeats + 2):
                if changed is not None:
                    weights.change(changed)
                bare.append(await here.bare(weights))
                rows.append(await here.publish(version, source or weights))
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
            "changed": changed,
            "senders": senders,
            **figures,
            "bare_seconds": bare_seconds,
            "share": bare_seconds / figures["publish_seconds"],
        }


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        *("way", "model", "weights", "gservers", "MiB", "changed", "senders", "sent MiB", "by one"),
        *("first token", "publish", "pause", "bare", "share of bare"),
    )
    for row in rows:
        simulated = " (simulated engine)" if row["engine"] == "simulated" else ""
        table.add_row(
            *(row["mode"] + simulated, row["size"], row["dtype"], str(row["gservers"]), f"{row['megabytes']:.1f}"),
            *(
                "–" if row.get("changed") is None else f"{row['changed']:.0%}",
                *(str(row.get("senders", 1)), f"{row.get('sent_megabytes', row['megabytes']):.1f}"),
                f"{row.get('most_sent_megabytes', row['megabytes']):.1f}",
            ),
            *(f"{1000 * row[f'{key}_seconds']:.1f} ms" for key in ("first_token", "publish", "pause", "bare")),
            f"{row['share']:.2f}",
        )
    return table


def plot(rows: Sequence[dict[str, Any]]) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (times, shares) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    kinds = dict.fromkeys(_kind(row) for row in rows)
    for kind in kinds:
        mode, engine, dtype, count = kind
        chosen = [row for row in rows if _kind(row) == kind]
        sizes = [row["megabytes"] for row in chosen]
        label = f"{mode}, {count} gserver{'s' * (count > 1)}" + " (simulated)" * (engine == "simulated")
        label += f", {dtype}" * (dtype != "float32")
        marker = {"float32": "o", "bfloat16": "^"}[dtype] if engine != "simulated" else "x"
        times.plot(sizes, [row["first_token_seconds"] for row in chosen], marker=marker, label=label)
        shares.plot(sizes, [row["share"] for row in chosen], marker=marker, label=label)
    shares.axhline(AIM, color="grey", linestyle="--", label="aim for large models")
    for axes, title in ((times, "end of step to first new token, s"), (shares, "share of bare bytes per second")):
        axes.set(xscale="log", xlabel="MiB of weights", title=title)
    times.set_yscale("log")
    shares.legend(fontsize="x-small")
    path = latest("bench_weights.png")
    figure.savefig(path, dpi=120)
    return path


def _kind(row: dict[str, Any]) -> tuple[str, str, str, int]:
    return row["mode"], row["engine"], row["dtype"], row["gservers"]


def main() -> None:
    parser = argparse.ArgumentParser(description="what it costs to bring new weights to gservers")
    parser.add_argument("--quick", action="store_true", help="small models, at most two gservers")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES))
    parser.add_argument("--gservers", nargs="+", type=int)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--engine", choices=("embedded", "simulated"), default="embedded")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--changed", nargs="+", type=float, help="shares of changed numbers, by broadcast with deltas")
    parser.add_argument("--senders", nargs="+", type=int, help="model workers that broadcast a part each")
    parser.add_argument("--append", action="store_true", help="keep the points that the last run has written")
    chosen = parser.parse_args()
    sizes = chosen.sizes or (["0.5M", "5M"] if chosen.quick else ["0.5M", "5M", "135M"])
    counts = chosen.gservers or ([1, 2] if chosen.quick else [1, 2, 4])
    torch.set_num_threads(1)
    console = Console(width=140)
    name = "bench_weights" if chosen.changed is None else "bench_weights_deltas"
    modes, shares = (chosen.modes, [None]) if chosen.changed is None else (["collective"], [*chosen.changed, 1.0, None])
    if chosen.senders is not None:
        name, modes = "bench_weights_senders", ["collective"]
    rows = earlier_rows(name) if chosen.append else []
    for mode, size, count, changed, senders in product(modes, sizes, counts, shares, chosen.senders or [1]):
        options = {"engine": chosen.engine, "repeats": chosen.repeats, "dtype": chosen.dtype}
        rows.append(asyncio.run(measure(size, count, mode, changed=changed, senders=senders, **options)))
        console.print(table_of(rows[-1:]))
    console.print(table_of(rows))
    settings = {"checksum": True, "quick": chosen.quick}
    console.print(f"written: {write_results(name, settings, rows)}")
    if name == "bench_weights":
        console.print(f"and {plot(rows)}")


if __name__ == "__main__":
    main()
