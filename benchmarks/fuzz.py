"""Malformed and hostile messages at each listening port of a real small run, which has to go on as if there were none.

    python benchmarks/fuzz.py [--messages 100000] [--steps 40]

Each port is sent so many messages in each of three ways: without any key; with the token and the credential of a
rollout worker that has joined; and in the name of rollout/0, without what proves it. HTTP requests are mutations of
valid ones to all of the server's calls, ZMQ messages mutations of what members say. Counted is what was accepted, how
much memory each process has grown by, and whether the run ended well. The worker neither asks for groups, which it
might then push, nor says that it fails: that it may do.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
import zmq
import zmq.asyncio
from common import write_results
from rich.console import Console

from streamrl import config as configuration
from streamrl.gserver.manager.access import ALLOWED, LOOKS
from streamrl.machine import machine_identity
from streamrl.transport.control import Register, Status
from streamrl.transport.keys import GENERATION_CALLS
from streamrl.transport.manager_client import ControlClient
from streamrl.transport.push_pull import Ask
from streamrl.transport.secret import VARIABLE, Secret

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from tests import hostile  # noqa: E402

WAYS = ("no key", "a worker's key", "a stolen name")
WORKER = 77
"""The number of the rollout worker that has joined."""
ANSWER_SECONDS = 0.5
"""What is cut short is waited for as long: the server waits for the rest."""
AT_ONCE = 8
MINE = {"POST /heartbeat", "POST /in_flight", "POST /leave", "POST /reject", "POST /route", "GET /topology"}
"""Calls that a rollout worker may make in its own name."""
GSERVER_CALLS = (*sorted(GENERATION_CALLS), "/pause_generation", "/update_weights_from_disk", "/end_weight_update")


def requests(calls: Sequence[str], *, count: int, headers: str, seed: int) -> Iterator[tuple[str, bytes]]:
    """`count` mutated requests with `headers`, each with the call that it began as."""
    dice = random.Random(seed)
    for _ in range(count):
        call = dice.choice(calls)
        fields: dict[str, Any] = {"worker": dice.choice((0, WORKER)), "evaluator": 0, "role": "rollout", "seq": 1}
        fields |= {"index": dice.choice((0, WORKER)), "stats": {}, "count": 5, "groups": [], "reason": "", "error": "x"}
        body = bytearray(msgspec.json.encode(fields))
        for _ in range(dice.randrange(4)):
            at = dice.randrange(len(body) + 1)
            body[at : at + dice.randrange(3)] = dice.randbytes(dice.randrange(6))
        head = f"{call} HTTP/1.1\r\nHost: localhost\r\n{headers}Content-Length: {len(body)}\r\n\r\n"
        raw = bytearray(head.encode() + body)
        if dice.random() < 0.3:
            raw[dice.randrange(len(raw))] = dice.randrange(256)
        yield call, bytes(raw)


async def fuzz_http(address: str, messages: Iterator[tuple[str, bytes]], allowed: set[str]) -> Counter[str]:
    """Send each on a connection of its own; return how often what happened. `accepted` is what should not have been."""
    host, _, port = address.rpartition("/")[2].rpartition(":")
    found: Counter[str] = Counter()

    async def one(call: str, raw: bytes) -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(raw)
            async with asyncio.timeout(ANSWER_SECONDS):
                line = await reader.readline()
            status = line.split(b" ")[1].decode() if line.startswith(b"HTTP/") else "cut off"
        except (TimeoutError, OSError):
            status = "no answer"
        finally:
            writer.close()
        found[status] += 1
        if status.startswith("2") and call not in allowed and not raw.startswith((b"GET /health", b"GET /status")):
            found["accepted"] += 1
            print(f"accepted: {raw[:300]!r}", file=sys.stderr)

    async def lane() -> None:
        for call, raw in messages:
            await one(call, raw)

    await asyncio.gather(*(lane() for _ in range(AT_ONCE)))
    return found


def members_messages(credential: str) -> list[list[bytes]]:
    """What members say to a head and to the master."""
    incarnation = bytes(16)
    ask = msgspec.msgpack.encode(Ask(offered=[1, 2, 3], permits=["0" * 32] * 3, withdrawn=[0]))
    header = {"type": "group", "seq": 3, "worker": "rollout/0", "prompt_length": 1, "finish_reasons": ["stop"]}
    header |= {"generation_seconds": 1.0, "dtypes": ["int32"] * 7, "size": 1, "tokens": 4, "permit": "0" * 32}
    group = [msgspec.msgpack.encode(header), bytes(64)]
    numbered = [[kind, bytes(8), incarnation + b"\x80"] for kind in (b"H", b"N", b"R", b"E", b"A")]
    return [[ask], group, *numbered, [credential.encode()]]


async def fuzz_zmq(address: str, identity: bytes, *, credential: str, count: int, seed: int) -> Counter[str]:
    """Send `count` messages under the routing id `identity`; return what was replied to them."""
    found: Counter[str] = Counter()
    context = zmq.asyncio.Context()
    with context.socket(zmq.DEALER) as endpoint:
        endpoint.set(zmq.LINGER, 2000)
        endpoint.set(zmq.RCVHWM, 100)
        if identity:
            endpoint.set(zmq.ROUTING_ID, identity)
        endpoint.connect(address)
        for frames in hostile.messages(members_messages(credential), count=count, seed=seed):
            await endpoint.send_multipart(frames)
            found["sent"] += 1
            while await endpoint.poll(0):
                reply = await endpoint.recv_multipart()
                with_places = reply and b"send" in reply[0]
                told = msgspec.msgpack.decode(reply[0]) if with_places else {}
                found["accepted"] += len(told.get("stored", ())) + len(told.get("send", ()))
                found["replies"] += 1
            if found["sent"] % 200 == 0:
                await asyncio.sleep(0)
    context.term()
    return found


async def fuzz(messages: int, steps: int, folder: Path, console: Console) -> list[dict[str, Any]]:
    secret = Secret.make()
    secret_file = folder / "secret"
    secret.write(secret_file)
    file = ROOT / "examples" / "copy_scratch.toml"
    overrides = [f"run.dir={folder}", "run.name=fuzzed", f"run.total_train_steps={steps}", "trainer.batch_groups=8"]
    overrides += ["rollout.group_size=4", "metrics.sinks=[]", "metrics.plots=false"]
    overrides += ["manager.port=0", f"security.secret_file={secret_file}"]
    config = configuration.load(file, overrides)
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    log = (folder / "run.log").open("wb")
    command = [sys.executable, "-m", "streamrl", "run", str(file), *overrides]
    run = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log, env=environment, cwd=ROOT)
    try:
        url = await manager_url(folder / "fuzzed" / "logs" / "manager-0.log")
        client = ControlClient(url, secret=secret)
        status = await until_running(client)
        message = Register("rollout", WORKER, "", config.digest(), os.getpid(), "fuzz", config.shared_changes())
        message = msgspec.structs.replace(message, machine=machine_identity())
        member = ControlClient(url, secret=secret)
        granted = await member.register(message, patience=10)
        before = {f"{p.role}/{p.index}": memory(p.pid) for p in status.processes}
        manager_calls, rows = sorted(ALLOWED), []
        http = [("manager", url, manager_calls)] + [
            (p.role, p.address, [f"POST {path}" for path in GSERVER_CALLS])
            for p in status.processes
            if p.role == "gserver"
        ]
        for seed, way in enumerate(WAYS):
            shown = {WAYS[0]: "", WAYS[1]: granted.token, WAYS[2]: "rollout/0." + "0" * 64}[way]
            headers = f"Authorization: Bearer {shown}\r\n" if shown else ""
            for name, address, calls in http:
                allowed = set(LOOKS) | (MINE if way == WAYS[1] and name == "manager" else set())
                if way == WAYS[1]:
                    calls = [call for call in calls if call not in ("POST /admit", "POST /fail_run", "POST /leave")]
                    calls = [call for call in calls if call != "POST /heartbeat"]
                    # what it may say of itself, it may: that it gives up, for example
                began = time.monotonic()
                mutated = requests(calls, count=messages, headers=headers, seed=seed)
                found = await fuzz_http(address, mutated, allowed)
                rows.append(row(name, way, found, time.monotonic() - began))
                console.print(rows[-1])
            for process in status.processes:
                if process.role not in ("model_worker", "master") or not process.address:
                    continue
                credential = granted.credentials.get(process.role, "")
                identity = {WAYS[0]: b"", WAYS[1]: f"{credential} fuzz".encode(), WAYS[2]: b"rollout/0"}[way]
                began = time.monotonic()
                found = await fuzz_zmq(
                    process.address, identity, credential=granted.credentials["model_worker"], count=messages, seed=seed
                )
                rows.append(row(process.role, way, found, time.monotonic() - began))
                console.print(rows[-1])
        grown = {f"{p.role}/{p.index}": memory(p.pid) - before[f"{p.role}/{p.index}"] for p in status.processes}
        rows.append({"memory_grown_mb": {name: round(size / 2**20, 1) for name, size in grown.items()}})
        await client.close()
        await member.close()
        code = await asyncio.wait_for(run.wait(), 900)
        summary = msgspec.json.decode((folder / "fuzzed" / "summary.json").read_bytes())
        rows.append({"exit_code": code} | {k: summary[k] for k in ("steps", "groups_trained", "groups_lost")})
        console.print(rows[-2:])
        return rows
    finally:
        if run.returncode is None:
            run.terminate()
            await run.wait()
        log.close()


def row(port: str, way: str, found: Counter[str], seconds: float) -> dict[str, Any]:
    return {"port": port, "way": way, "accepted": found["accepted"], "found": dict(found), "seconds": round(seconds, 1)}


def memory(pid: int) -> int:
    return int(psutil.Process(pid).memory_info().rss)


async def manager_url(log: Path) -> str:
    async with asyncio.timeout(120):
        while not (log.exists() and "listens at " in log.read_text()):  # noqa: ASYNC110, ASYNC240
            await asyncio.sleep(0.2)
    return log.read_text().partition("listens at ")[2].split()[0]  # noqa: ASYNC240


async def until_running(client: ControlClient) -> Status:
    async with asyncio.timeout(120):
        while (status := await client.status()).state != "running":  # noqa: ASYNC110
            await asyncio.sleep(0.2)
    return status


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--messages", type=int, default=100_000, help="at each port, in each way")
    parser.add_argument("--steps", type=int, default=2000, help="of the run meanwhile")
    options = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        rows = asyncio.run(fuzz(options.messages, options.steps, Path(folder), console))
    console.print(f"written to {write_results('fuzz', {'messages': options.messages}, rows)}")
    accepted = sum(each.get("accepted", 0) for each in rows)
    if accepted or rows[-1]["exit_code"] or rows[-1]["groups_lost"]:
        raise SystemExit(f"{accepted} messages were accepted; the run: {rows[-1]}")


if __name__ == "__main__":
    main()
