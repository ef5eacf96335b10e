"""The cost of a large run for its controller and its stream.

    python benchmarks/bench_scale.py [--quick] [--workers 100 1000] [--gservers 16 256]

Controller, model worker, ledger and streams are the real ones, each a process of its own, as a user would start them;
the model worker really trains (0.1 million parameters, so that it is not the limit). gservers are
SIMULATED, and rollout workers are real but for what generates (`scale_load.py`); all of them share one process, which
is the limit where its share of a core is near 1.

All rows have the same groups in flight and the same time of a group, so the same work is spread over more or fewer
workers: `cpu per worker` is the cost of one more worker for the controller. Latency is measured with a call that the
controller answers at once, from this process, which is otherwise idle. Rollout workers and gservers make the calls to
the controller; `calls/update` counts its calls to one gserver for one weight update (through files).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import psutil
from common import Row, cpu_seconds, parser_of, percentile, report, write_results
from scale_load import Settings

from streamrl.config import Config, from_dict, to_toml
from streamrl.transport.control import Heartbeat
from streamrl.transport.manager_client import ControlClient

IN_FLIGHT = 1200
"""Groups, over all workers."""
GROUP_SECONDS = 12.0
TOKENS = 8
BATCH = 256
PROBE_SECONDS = 0.02
"""Between two measured calls."""
WARM_UP_SECONDS = 40.0
DEADLINE_SECONDS = 300.0
"""Until all members have joined."""


def settings_of(folder: str, *, workers: int, gservers: int, port: int) -> Row:
    return {
        "run": {"dir": folder, "name": "scale", "port": port, "total_train_steps": 10**6, "stop_at_reward": 1e9},
        "model": {
            "path": "scratch",
            "scratch": {"hidden_size": 64, "layers": 1, "heads": 2, "kv_heads": 1, "max_position_embeddings": 32},
        },
        "data": {"source": "python", "path": "streamrl.rollout.tasks:copy_digits", "max_prompt_tokens": 16},
        "rollout": {
            "workers": workers,
            "group_size": 2,
            "max_concurrent_groups": max(1, -(-IN_FLIGHT // workers)),
            "sampling": {"max_new_tokens": TOKENS},
            "reward": {"function": "streamrl.rollout.tasks:copy_reward"},
        },
        "gserver": {"engine": "simulated", "count": gservers, "max_context": 32},
        "staleness": {"max_staleness": IN_FLIGHT // BATCH + 2, "most_drift": 0.0},
        "trainer": {"batch_groups": BATCH, "dtype": "float32", "save_at_end": False},
        "weights": {"mode": "disk", "checksum": False},
        "metrics": {"sinks": [], "plots": False},
    }


class Processes:
    """Controller, trainer and load; ended, and waited for, at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._begun: list[subprocess.Popen[str]] = []

    def start(self, name: str, words: list[str], **options: Any) -> subprocess.Popen[str]:
        said = (self._folder / f"{name}.log").open("w")
        options = {"stdout": said} | options
        begun = subprocess.Popen([sys.executable, *words], stderr=said, text=True, **options)
        self._begun.append(begun)
        return begun

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *error: object) -> None:
        for begun in reversed(self._begun):
            begun.terminate()
        for begun in self._begun:
            try:
                begun.wait(30)
            except subprocess.TimeoutExpired:
                begun.kill()


def measure(*, workers: int, gservers: int, seconds: float) -> Row:
    """One row."""
    with tempfile.TemporaryDirectory() as folder, Processes(Path(folder)) as processes:
        port = free_port()
        config_file = Path(folder) / "config.toml"
        config = from_dict(settings_of(folder, workers=workers, gservers=gservers, port=port))
        config_file.write_text(to_toml(config))
        url = f"http://127.0.0.1:{port}"
        streamrl = ["-m", "streamrl"]
        controller = processes.start("controller", [*streamrl, "controller", str(config_file)])
        await_listening(port, controller)
        trainer = processes.start("trainer", [*streamrl, "trainer", str(config_file), "--manager", url])
        asked = Settings(workers, gservers, GROUP_SECONDS, TOKENS, slots=64)
        load = processes.start(
            "load",
            [str(Path(__file__).parent / "scale_load.py"), str(config_file), url, msgspec.json.encode(asked).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        run_dir = Path(folder) / "scale"
        try:
            await_steps(run_dir, 2, processes=(controller, trainer, load))
            time.sleep(WARM_UP_SECONDS)
            before = snapshot(run_dir, controller, trainer, load)
            latencies = asyncio.run(probe(config, url, seconds=seconds))
            after = snapshot(run_dir, controller, trainer, load)
        except RuntimeError as error:
            logs = [f"--- {path.name}\n{path.read_text()[-3000:]}" for path in Path(folder).glob("*.log")]
            raise SystemExit("\n".join([str(error), *logs])) from error
    answered = {f"p{part}_ms": round(1e3 * percentile(latencies, part / 100), 2) for part in (50, 99)}
    return {"workers": workers, "gservers": gservers, **answered, **between(before, after)}


async def probe(config: Config, url: str, *, seconds: float) -> list[float]:
    """Return the seconds that the controller took for each heartbeat of a process that is no member."""
    client = ControlClient.of(config, url)
    message = Heartbeat(role="gserver", index=1_000_000, stats={})
    latencies = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.monotonic()
        await client.heartbeat(message)
        latencies.append(time.monotonic() - began)
        await asyncio.sleep(PROBE_SECONDS)
    await client.close()
    return latencies


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def await_listening(port: int, controller: subprocess.Popen[str]) -> None:
    """Wait until the controller takes connections."""
    end = time.monotonic() + DEADLINE_SECONDS
    while controller.poll() is None and time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)


def await_steps(run_dir: Path, count: int, *, processes: tuple[subprocess.Popen[str], ...]) -> None:
    """Wait until the run has made `count` training steps."""
    end = time.monotonic() + DEADLINE_SECONDS
    while len(steps(run_dir)) < count:
        if any(process.poll() is not None for process in processes) or time.monotonic() > end:
            raise RuntimeError("the run did not begin")
        time.sleep(0.5)


def steps(run_dir: Path) -> list[Row]:
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def snapshot(run_dir: Path, controller: Any, trainer: Any, load: Any) -> Row:
    """Counters up to now."""
    load.stdin.write("\n")
    load.stdin.flush()
    found: dict[str, Any] = json.loads(load.stdout.readline())
    cpu = {"controller": controller.pid, "load": load.pid}
    for child in psutil.Process(trainer.pid).children():
        cpu |= {"model_worker": child.pid} if "model-worker" in child.cmdline() else {}
    made = steps(run_dir)
    return found | {
        "time": time.monotonic(),
        "cpu": {name: cpu_seconds(pid) for name, pid in cpu.items()},
        "controller_mib": psutil.Process(controller.pid).memory_info().rss / 2**20,
        "timeline": (run_dir / "timeline.jsonl").stat().st_size,
        "groups": sum(step["metrics"]["groups"] for step in made),
        "versions": len(made),
        "oldest": max(int(age) for step in made for age in step["token_ages"]),
    }


def between(before: dict[str, Any], after: dict[str, Any]) -> Row:
    """The figures of the time between two snapshots."""
    seconds = after["time"] - before["time"]
    calls = {name: count - before["calls"].get(name, 0) for name, count in after["calls"].items()}
    to_gservers = sum(after["gserver_calls"].values()) - sum(before["gserver_calls"].values())
    gservers = max(1, len(after["gserver_calls"]))
    shares = {f"{name}_cpu_share": (used - before["cpu"][name]) / seconds for name, used in after["cpu"].items()}
    versions = after["versions"] - before["versions"]
    rounded = {
        "groups_per_second": (after["groups"] - before["groups"]) / seconds,
        "calls_per_second": sum(calls.values()) / seconds,
        **shares,
        "controller_cpu_us_per_call": 1e6 * shares["controller_cpu_share"] * seconds / max(1, sum(calls.values())),
        "controller_mib": after["controller_mib"],
        "timeline_kib_per_second": (after["timeline"] - before["timeline"]) / 1024 / seconds,
    }
    return {
        **{name: round(value, 2) for name, value in rounded.items()},
        "updates": versions,
        "gserver_calls": to_gservers,
        "calls_by_path": {name: round(count / seconds, 1) for name, count in sorted(calls.items()) if count},
        "gserver_calls_by_path": sorted(after["gserver_calls"]),
        "oldest_token": after["oldest"],
        "calls_per_update": round(to_gservers / max(1, versions), 1) if gservers else 0,
    }


def main() -> None:
    parser = parser_of(__doc__, quick="one small row")
    parser.add_argument("--workers", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--gservers", type=int, nargs="+", default=[16, 256])
    parser.add_argument("--seconds", type=float, default=30.0, help="that are measured, for each row")
    options = parser.parse_args()
    settings: dict[str, Any] = {"in_flight": IN_FLIGHT, "group_seconds": GROUP_SECONDS, "batch": BATCH}
    settings |= {"seconds": options.seconds, "quick": options.quick}
    rows: list[Row] = []
    for workers, gservers in [(20, 4)] if options.quick else product(options.workers, options.gservers):
        rows.append(measure(workers=workers, gservers=gservers, seconds=options.seconds))
        rows[-1]["calls_per_update"] = round(rows[-1]["calls_per_update"] / gservers, 2)
        print(rows[-1], flush=True)
        write_results("bench_scale", settings, rows)
    report("bench_scale", settings, rows)


if __name__ == "__main__":
    main()
