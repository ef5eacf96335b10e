"""Malformed and hostile messages at each listening port of a real run, which has to go on as if there were none.

    python benchmarks/fuzz.py [--messages 100000] [--engine sglang]

Controller, gserver, two model workers and a rollout worker with agents are started as a user would start them, with
taps between them (`fuzz_taps.py`) that record their messages. Then each port is sent so many messages in each of three
ways: without any key; with the token and the credentials of a rollout worker that has joined; and with a stolen
identity: the name of rollout/0 without a proof, a credential for another receiver, and at the gateway the key of an
episode that has ended. The messages are the recorded ones, mutated; messages that hypothesis makes from the wire's
types; and these, mutated (`tests/hostile.py`).

The ports of torch's process groups need no key. The benchmark tries to connect: no port may answer once a group has
formed. Where a store at which ranks meet does answer (SGLang's, or where ours are not closed), it is sent commands of
its protocol, whole and broken, in all three ways alike, and gloo is sent a few streams. With `--engine sglang` the
gserver is a real SGLang server, with the sockets by which its processes meet; it is sent no requests to generate from
one who may, since a token that its model does not have ends it.

Nothing may be accepted, no process end, and no group be trained on twice or get lost. After each way comes a pause of
the same length: the growth of each process under messages is compared with its growth without. A rollout worker may
ask for groups, beat, leave and fail the run; that is left out. All ports are sent to at the same time.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import re
import select
import socket
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
import numpy as np
import psutil
import uvloop
import zmq
from common import Row, parser_of, report

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from fuzz_taps import Taps  # noqa: E402

from streamrl import config as configuration  # noqa: E402
from streamrl.errors import UNDECODABLE  # noqa: E402
from streamrl.gserver.manager.http import CALLS, LOOKS  # noqa: E402
from streamrl.machine import machine_identity, process_space  # noqa: E402
from streamrl.rollout.agents.gateway import PROTOCOLS  # noqa: E402
from streamrl.rollout.agents.policy import Score  # noqa: E402
from streamrl.trainer.calls import CallDone, PublicationReply, StorageNotice, TrainReply  # noqa: E402
from streamrl.transport import generation  # noqa: E402
from streamrl.transport.codec import ARRAYS, GroupHeader  # noqa: E402
from streamrl.transport.control import FinishRun, Register, RegisterReply, Status  # noqa: E402
from streamrl.transport.credentials import bearer  # noqa: E402
from streamrl.transport.manager_client import ControlClient  # noqa: E402
from streamrl.transport.push_pull import Ask, Reply  # noqa: E402
from streamrl.transport.request_reply import FIRST_ROLLOUT_WORKER  # noqa: E402
from streamrl.transport.secret import VARIABLE, Secret  # noqa: E402
from streamrl.transport.session import Packet, Rejection  # noqa: E402
from tests import hostile  # noqa: E402
from tests.gserver.installed import sglang_python  # noqa: E402
from tests.hostile import Request  # noqa: E402
from tests.processes import lives  # noqa: E402

WAYS = ("no key", "a worker's key", "a stolen identity")
WORKER = 77
"""The number of the rollout worker that has joined."""
BATCH_GROUPS = 8
SETTINGS = {
    "run.name": "fuzzed",
    "run.total_train_steps": 10**6,
    "run.stop_at_reward": 2.0,
    "trainer.batch_groups": BATCH_GROUPS,
    "trainer.save_at_end": "false",
    "algorithm.epochs": 1,
    "algorithm.minibatches": 1,
    "rollout.max_concurrent_groups": 24,
    "staleness.over_age": "wait",
    "metrics.sinks": "[]",
    "metrics.plots": "false",
    "run.port": 0,
    "weights.mode": "collective",
    "trainer.data_parallel": 2,
}
SGLANG = {
    "gserver.engine": "sglang",
    "gserver.dtype": "float32",
    "weights.pause_mode": "retract",
    "limits.update_seconds": 60,
}
START_SECONDS = 600.0
AT_ONCE = 4
"""Connections to one HTTP port."""
PIPELINED = 32
"""Requests that are sent together. The last one ends the connection: it is no HTTP, or not quite."""
ANSWER_SECONDS = 30.0
"""A server that answers nothing for so long hangs."""
RAW_SHARE = 0.02
"""Share of messages to a ZMQ port that are bytes which its protocol does not know."""
KNOCKS = 5
"""At ports of torch's that are to answer nobody: how often somebody tries, in each way."""
KNOCK_SECONDS = 0.5
MOST_STREAMS = 500
"""That gloo is sent where it is not closed: it keeps a connection for each."""
STORE_SECONDS = 5.0
"""For which a store may think about a question."""
SETTLE_SECONDS = 2.0
GROWTH_MB = 32.0
"""A process that goes on growing by so much more under messages than without keeps some of them. The first way does not
count: with it come the buffers that later messages use again."""
GSERVER_BODIES: Mapping[str, Any] = {
    "/generate": generation.GenerateRequest,
    "/pause_generation": generation.PauseGeneration,
    "/continue_generation": generation.Empty,
    "/abort_request": generation.AbortRequest,
    "/init_weights_update_group": generation.InitWeightsUpdateGroup,
    "/destroy_weights_update_group": generation.DestroyWeightsUpdateGroup,
    "/begin_weight_update": generation.Empty,
    "/update_weights_from_distributed": generation.UpdateWeightsFromDistributed,
    "/end_weight_update": generation.Empty,
    "/update_weights_from_disk": generation.UpdateWeightsFromDisk,
    "/update_weight_version": generation.UpdateWeightVersion,
    "/weights_checker": generation.WeightsChecker,
}
WORKERS_CALLS = {"POST /in_flight", "POST /reject", "POST /route"}
"""That a rollout worker may make in its own name."""
LEFT_OUT = {"POST /admit", "POST /keep", "POST /fail_run", "POST /leave", "POST /heartbeat", "GET /topology"}
"""What it may do as well, and what would change the run or take long."""
HARMLESS = {*LOOKS, "GET /health"}


# --- the run -------------------------------------------------------------------------------------


class Port(NamedTuple):
    process: str
    """With what is there, for ports of torch's."""
    pid: int
    address: str
    more: tuple[str, ...] = ()
    """Of the same kind: torch has a port for each group, and for each store."""

    @property
    def role(self) -> str:
        """Whose port it is; `zmq`: the controller's for calls; `store`, `gloo`, or `torch` (closed): torch's."""
        name, _, kind = self.process.partition(" ")
        return kind or name.partition("/")[0]


class Run:
    """The processes of a run, each by its own command; ended with `end`."""

    def __init__(self, folder: Path, taps: Taps, engine: str) -> None:
        self._folder = folder
        self._taps = taps
        self._begun: dict[str, asyncio.subprocess.Process] = {}
        self._file = ROOT / "examples" / "guess_number.toml"
        self._overrides = [f"run.dir={folder}", f"security.secret_file={folder / 'secret'}"]
        settings: dict[str, Any] = dict(SETTINGS)
        if engine == "sglang":
            settings |= SGLANG | {"gserver.sglang.python": sglang_python()}
        self._overrides += [f"{key}={value}" for key, value in settings.items()]
        self.secret = Secret.make()
        self.config = configuration.load(self._file, self._overrides)

    async def begin(self) -> None:
        self.secret.write(self._folder / "secret")
        await self._start("controller")
        log = self._folder / "controller.log"
        async with asyncio.timeout(120):
            while "listens at " not in log.read_text():  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        self.url = log.read_text().partition("listens at ")[2].split(";")[0].split()[0]
        self.client = ControlClient(self.url, secret=self.secret)
        tap = await self._taps.before_controller(self.url)
        proxy = await self._taps.before_gateways()
        for role in ("gserver", "trainer"):
            await self._start(role, "--manager", tap)
        await self._start("rollout", "--manager", tap, HTTP_PROXY=proxy)

    async def _start(self, role: str, *options: str, **variables: str) -> None:
        environment = {name: value for name, value in os.environ.items() if name != VARIABLE} | variables
        environment |= {"OMP_NUM_THREADS": "1"}
        log = (self._folder / f"{role}.log").open("wb")
        command = [sys.executable, "-m", "streamrl", role, str(self._file), *self._overrides, *options]
        self._begun[role] = await asyncio.create_subprocess_exec(
            *command, stdout=log, stderr=log, env=environment, cwd=ROOT
        )
        log.close()

    async def until_steps(self, count: int) -> Status:
        """Wait until so many training steps were made."""
        async with asyncio.timeout(START_SECONDS):
            while len(self.steps()) < count:
                self.check()
                await asyncio.sleep(0.2)
        return await self.client.status()

    def check(self, ports: Sequence[Port] = ()) -> None:
        """Exit if a process has ended, of those that were begun or that listen at `ports`."""
        ended = [role for role, process in self._begun.items() if process.returncode is not None]
        ended += [port.process for port in ports if not lives(port.pid)]
        for name in ended:
            role = name.partition("/")[0].replace("model_worker", "trainer")
            log = (self._folder / f"{role}.log").read_text()
            raise SystemExit(f"{name} has ended:\n{log[-12000:]}")

    def steps(self) -> list[Row]:
        path = self.config.run_dir / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def ports(self, status: Status) -> list[Port]:
        """All ports at which processes of the run listen."""
        pids = {f"{p.role}/{p.index}": p.pid for p in status.processes if (p.role, p.index) != ("rollout", WORKER)}
        listening = [
            (name, each.pid, one.laddr.port)
            for name, pid in {"controller/0": self._begun["controller"].pid, **pids}.items()
            for each in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
            for one in each.net_connections("tcp")
            if one.status == psutil.CONN_LISTEN
        ]
        own = ("controller", "rollout")
        of_torch = torchs([n for name, _, n in listening if not name.startswith(own) and n not in self._taps.tapped])
        found: dict[str, Port] = {}
        for name, pid, number in listening:
            calls = name == "controller/0" and number != urlsplit(self.url).port
            what = "zmq" if calls else of_torch.get(number, "")
            scheme = "tcp" if what or name.startswith("model_worker") else "http"
            port = Port(f"{name} {what}".strip(), pid, f"{scheme}://127.0.0.1:{number}")
            first = found.setdefault(port.process, port)
            if first != port:
                found[port.process] = first._replace(more=(*first.more, port.address))
        return list(found.values())

    async def join(self) -> RegisterReply:
        """Join as another rollout worker."""
        config = self.config
        message = Register("rollout", WORKER, "", config.digest(), os.getpid(), "fuzz", config.shared_changes())
        message = msgspec.structs.replace(message, machine=machine_identity(), process_space=process_space())
        client = ControlClient(self.url, secret=self.secret)
        granted = await client.register(message, patience=10)
        await client.close()
        return granted

    async def finish(self) -> dict[str, Any]:
        """End the run; return what became of its groups."""
        self.check()
        await self.client.finish_run(FinishRun(reason="enough was sent"))
        codes = {}
        for role, process in self._begun.items():
            codes[role] = await asyncio.wait_for(process.wait(), 120)
        steps = self.steps()
        trained = [seq for step in steps for seq in step["seqs"]]
        return {
            "steps": len(steps),
            "groups_trained": len(trained),
            "groups_twice": len(trained) - len(set(trained)),
            "groups_lost": len(set(range(len(trained))) - set(trained)),
            "whole_steps": sum(len(step["seqs"]) == BATCH_GROUPS for step in steps),
            "exit_codes": codes,
        }

    async def end(self) -> None:
        for process in self._begun.values():
            if process.returncode is None:
                process.terminate()
        for process in self._begun.values():
            try:
                await asyncio.wait_for(process.wait(), 20)
            except TimeoutError:
                process.kill()
        await self.client.close()


def torchs(numbers: Sequence[int]) -> dict[int, str]:
    """What of torch's listens at each of these ports: a `store`, which says how many keys it has; gloo, which takes a
    connection and says nothing; or something that is closed (`torch`)."""
    found = dict.fromkeys(numbers, "torch")
    asked: dict[socket.socket, int] = {}
    for number, connection in zip(numbers, knocked([("127.0.0.1", n) for n in numbers]), strict=True):
        if connection is not None:
            found[number] = "gloo"
            connection.sendall(hostile.STORE_QUESTION)
            asked[connection] = number
    deadline = time.monotonic() + STORE_SECONDS
    waiting = set(asked)
    while waiting and (left := deadline - time.monotonic()) > 0:
        for connection in select.select(waiting, [], [], left)[0]:
            waiting.remove(connection)
            with suppress(OSError):
                if len(connection.recv(8)) == 8:
                    found[asked[connection]] = "store"
    for connection in asked:
        connection.close()
    return found


def knocked(addresses: Sequence[tuple[str, int]]) -> list[socket.socket | None]:
    """Try all `addresses` at once; return a connection to each, or None where nobody answers in `KNOCK_SECONDS`, or
    where nothing listens any more."""
    tried = [socket.socket() for _ in addresses]
    for one, address in zip(tried, addresses, strict=True):
        one.setblocking(False)
        one.connect_ex(address)
    waiting, deadline = {*tried}, time.monotonic() + KNOCK_SECONDS
    while waiting and (left := deadline - time.monotonic()) > 0:
        waiting.difference_update(select.select([], waiting, [], left)[1])
    found: list[socket.socket | None] = []
    for one, address in zip(tried, addresses, strict=True):
        error = errno.ETIMEDOUT if one in waiting else one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error not in (0, errno.ETIMEDOUT, errno.ECONNREFUSED):
            raise OSError(error, f"{os.strerror(error)} at {address}")
        if error:
            one.close()
        found.append(None if error else one)
    return found


# --- what is sent --------------------------------------------------------------------------------


class Requests:
    """What an HTTP port is sent: `made` by hypothesis, and `recorded`."""

    def __init__(self, made: Sequence[Request], recorded: Sequence[Request]) -> None:
        self.made = made
        self.recorded = recorded or made

    def without(self, calls: set[str]) -> Requests:
        def kept(requests: Sequence[Request]) -> list[Request]:
            return [each for each in requests if call_of(each) not in calls]

        return Requests(kept(self.made), kept(self.recorded))

    def draw(self, dice: random.Random) -> Request:
        which = dice.random()
        if which < 0.4:
            return dice.choice(self.made)
        return hostile.mutated_body(dice.choice(self.recorded if which < 0.7 else self.made), dice)


class Messages:
    """What a ZMQ port is sent, and whole streams of bytes for it."""

    def __init__(self, made: Sequence[list[bytes]], recorded: Sequence[list[bytes]], streams: Sequence[bytes]) -> None:
        self.made = made
        self.recorded = recorded or made
        self.streams = streams or [bytes(64)]

    def draw(self, dice: random.Random) -> list[bytes]:
        which = dice.random()
        if which < 0.4:
            return dice.choice(self.made)
        return hostile.mutated(dice.choice(self.recorded if which < 0.7 else self.made), dice) or [b""]

    def draw_stream(self, dice: random.Random) -> bytes:
        begin = dice.choice(self.streams)[: dice.choice((11, 64, 120, 4000))]
        (broken,) = hostile.mutated([begin], dice)[:1] or [b""]
        return broken[:20_000]


def call_of(request: Request) -> str:
    return f"{request.method} {request.target.partition('?')[0]}"


def requests_of(calls: Mapping[str, Any], gets: Sequence[str], *, count: int, begin: int) -> list[Request]:
    """`count` requests to all `calls` (POST, by path with the type of the body) and `gets`."""
    found = []
    each = max(2, count // (len(calls) + len(gets)))
    for number, (path, body) in enumerate(calls.items()):
        values = hostile.examples(hostile.values_of(body), count=each, begin=begin + number)
        for content in hostile.encoded(values, msgspec.json.encode):
            found.append(Request("POST", path, {"Content-Type": "application/json"}, content))
    dice = random.Random(begin)
    queries = (
        "",
        "?after=0",
        "?after=-1",
        "?after=1e400",
        "?count=9999999999",
        "?name=../../etc/passwd&begin=0",
        "?%00",
    )
    for path in gets:
        found += [Request("GET", path + dice.choice(queries), {}, b"") for _ in range(each)]
    return found


def groups_of(count: int, begin: int) -> list[list[bytes]]:
    """Messages with groups, of headers and arrays that fit together or do not."""
    found = []
    dice = random.Random(begin)
    sizes = [np.dtype(kind).itemsize for kind in ARRAYS.values()]
    for header in hostile.examples(hostile.values_of(GroupHeader), count=count, begin=begin):
        if isinstance(header, dict):
            header |= {"dtypes": list(ARRAYS.values())} if dice.random() < 0.8 else {}
            header |= {"size": 4, "tokens": 12, "routes": 0} if dice.random() < 0.8 else {}
        lengths = [4 * size for size in sizes[:3]] + [12 * size for size in sizes[3:-1]] + [0]
        arrays = [dice.randbytes(length) for length in lengths]
        packed = [b"".join(arrays)] if dice.random() < 0.5 else arrays
        found += [[packet_of(1, head), *packed] for head in hostile.encoded([header], msgspec.msgpack.encode)]
    return found


def controllers_messages(count: int, begin: int) -> list[list[bytes]]:
    """Return messages of workers to the controller, also about groups that they hold."""
    dice = random.Random(begin)
    kinds = [
        ("notice", StorageNotice),
        ("result", CallDone),
        ("result", TrainReply),
        ("result", PublicationReply),
        ("text", str),
    ]
    types = {"notice": "notice", "result": "reply", "text": "error"}
    meta = {"seq": 3, "head": FIRST_ROLLOUT_WORKER + WORKER, "worker": f"rollout/{WORKER}", "size": 1, "tokens": 2}
    meta |= {"rewards": [1.0], "response_lengths": [1], "version_counts": {0: 1}, "generation_seconds": 1.0}
    found: list[dict[str, Any]] = [{"type": "notice", "notice": {"metas": [meta]}}]
    for number, (field, kind) in enumerate(kinds):
        for value in hostile.examples(hostile.values_of(kind), count=count // len(kinds), begin=begin + number):
            found.append({"type": types[field], "request": dice.randrange(1 << dice.choice((3, 10, 63))), field: value})
    return [[packet_of(1, content)] for content in hostile.encoded(found, msgspec.msgpack.encode)]


def packet_of(place: int, message: bytes) -> bytes:
    """Return the first frame of a message."""
    return msgspec.msgpack.encode(Packet(place, 0, 0, None, msgspec.Raw(message)))


def corpora(taps: Taps, *, count: int) -> dict[str, Requests | Messages]:
    """Role → what its port is sent; `count` messages are made for each."""
    gets = [call.removeprefix("GET ") for call in CALLS if call.startswith("GET")]
    agents: dict[str, Any] = {path: dict[str, Any] for path in PROTOCOLS} | {"/score": Score, "/episodes": None}
    agents |= {f"/episodes/{name}{path}": body for name in ("0-0", "..", "%00") for path, body in agents.items()}
    bodies = {key.removeprefix("POST "): call.message for key, call in CALLS.items() if key.startswith("POST")}
    asks = hostile.examples(hostile.values_of(Ask), count=count // 2, begin=1)
    return {
        "controller": Requests(requests_of(bodies, gets, count=count, begin=2), taps.requests("controller")),
        "gserver": Requests(
            requests_of(GSERVER_BODIES, ["/health", "/model_info", "/server_info"], count=count, begin=3),
            taps.requests("gserver"),
        ),
        "rollout": Requests(requests_of(agents, ["/v1/models"], count=count, begin=4), taps.requests("rollout")),
        "model_worker": Messages(
            [[packet_of(1, ask)] for ask in hostile.encoded(asks, msgspec.msgpack.encode)] + groups_of(count // 2, 5),
            taps.messages("model_worker"),
            taps.streams("model_worker"),
        ),
        "zmq": Messages(controllers_messages(count, 6), taps.messages("zmq"), taps.streams("zmq")),
    }


# --- how it is sent ------------------------------------------------------------------------------


HEAD = re.compile(rb"HTTP/1\.[01] (\d{3})[^\r]*(?:\r\n[^\r\n]+)*\r\n\r\n")
LENGTH = re.compile(rb"^content-length: *(\d+)", re.IGNORECASE | re.MULTILINE)
CHUNKED = re.compile(rb"^transfer-encoding: *chunked", re.IGNORECASE | re.MULTILINE)
LAST_CHUNK = b"0\r\n\r\n"


class _Replies:
    """Status codes of the whole replies that come by one connection."""

    def __init__(self) -> None:
        self.statuses: deque[int] = deque()
        self._received = b""

    def feed(self, data: bytes) -> None:
        self._received += data
        while head := HEAD.match(self._received):
            end = head.end()
            if CHUNKED.search(head[0]):
                last = self._received.find(LAST_CHUNK, end)
                end = last + len(LAST_CHUNK) if last >= 0 else sys.maxsize
            elif length := LENGTH.search(head[0]):
                end += int(length[1])
            if len(self._received) < end:
                return
            self._received = self._received[end:]
            if (status := int(head[1])) >= 200:  # 100: the body may come
                self.statuses.append(status)


class HttpFuzz:
    """Sends requests to one port over some connections."""

    def __init__(self, port: Port, requests: Requests, *, shown: str, allowed: set[str], count: int, seed: int) -> None:
        self.found: Counter[str] = Counter()
        self._host, self._port = urlsplit(port.address).hostname, urlsplit(port.address).port
        self._name = port.process
        self._requests = requests
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in bearer(shown).items())
        self._allowed = allowed
        self._left = count
        self._dice = random.Random(seed)

    async def run(self) -> None:
        await asyncio.gather(*(self._lane() for _ in range(AT_ONCE)))

    async def _lane(self) -> None:
        while self._left > 0:
            reader, writer = await asyncio.open_connection(self._host, self._port)
            try:
                await self._batch(reader, writer)
            finally:
                writer.close()

    async def _batch(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send some whole requests, and at last one that is none."""
        count = min(PIPELINED, self._left)
        whole = [self._requests.draw(self._dice) for _ in range(count - 1)]
        self._left -= count
        replies = _Replies()
        writer.write(b"".join(request.encode(self._headers) for request in whole))
        ended = not await self._until(replies, len(whole), reader)
        for request in whole:
            if not replies.statuses:
                self._left += len(whole) - whole.index(request) - 1  # those that follow were not looked at
                self.found["cut off"] += 1
                break
            self._count(call_of(request), replies.statuses.popleft(), request.body)
        if ended:
            self._left += 1
            return
        raw = hostile.mutated_head(self._requests.draw(self._dice).encode(self._headers), self._dice)
        try:
            writer.write(raw)
            writer.write_eof()
            await self._until(replies, sys.maxsize, reader)
        except OSError:
            pass
        said = " ".join(raw.lstrip(b"\r\n").split(b"\r\n", 1)[0].decode("latin-1").split(" ")[:2]).partition("?")[0]
        if not replies.statuses:
            self.found["cut off"] += 1
        for status in replies.statuses:
            self._count(said, status, raw)

    async def _until(self, replies: _Replies, count: int, reader: asyncio.StreamReader) -> bool:
        """Read until there are `count` replies; return whether there are, and not the end of the connection."""
        while len(replies.statuses) < count:
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    data = await reader.read(2**16)
                replies.feed(data)
            except OSError:
                return False
            except TimeoutError as error:
                raise SystemExit(f"{self._name} answers nothing for {ANSWER_SECONDS:.0f} s") from error
            if not data:
                return False
        return True

    def _count(self, call: str, status: int, content: bytes) -> None:
        self.found[str(status)] += 1
        if status < 300 and call not in self._allowed:
            self.found["accepted"] += 1
            print(f"{self._name} accepted: {call} {content[:100]!r}", file=sys.stderr)
        elif status == 500:
            print(f"{self._name} failed: {call} {content[:100]!r}", file=sys.stderr)


LAST = 2**40
"""The sequence number of the last offer: a head refuses it, and so shows that it has read all earlier messages."""
PLACED_SHARE = 0.7
"""Share of the messages that get the place that their receiver expects next."""


class ZmqFuzz:
    """A hostile sender on one ZMQ connection."""

    def __init__(self, port: Port, endpoint: zmq.Socket[bytes], identity: bytes, found: Counter[str]) -> None:
        self._port = port
        self._endpoint = endpoint
        self._found = found
        self._next = 1
        """The place that the receiver expects next, if it processes all messages under way."""
        endpoint.set(zmq.LINGER, int(1000 * ANSWER_SECONDS))
        endpoint.set(zmq.SNDTIMEO, int(1000 * ANSWER_SECONDS))
        endpoint.set(zmq.SNDHWM, 100)
        if identity:
            endpoint.set(zmq.ROUTING_ID, identity)
        endpoint.connect(port.address)

    def send(self, frames: list[bytes], *, placed: bool) -> None:
        """Send `frames`; `placed`: with the expected place, if the first of them is a packet."""
        if placed:
            with suppress(*UNDECODABLE):
                packet = msgspec.msgpack.decode(frames[0], type=Packet)
                frames = [packet_of(self._next, bytes(packet.message)), *frames[1:]]
                self._next += 1
        self._endpoint.send_multipart(frames)
        self._found["sent"] += 1

    def take(self) -> bool:
        """Read the replies; return whether the sender is rejected, or its last offer is refused. Groups that a head
        stores or asks for are accepted."""
        ended = False
        while self._endpoint.poll(0):
            reply = msgspec.msgpack.decode(self._endpoint.recv_multipart()[0], type=Packet | Rejection)
            self._found["replies"] += 1
            if isinstance(reply, Rejection):
                self._found["rejected"] += 1
                ended = True
                continue
            self._next = reply.processed + 1
            if not reply.is_beat and self._port.role == "model_worker":
                news = msgspec.msgpack.decode(reply.message, type=Reply)
                self._found["accepted"] += len(news.stored) + len(news.send)
                self._found["refused"] += len(news.refused)
                ended = ended or any(refusal.seq == LAST for refusal in news.refused)
        return ended

    def until_read(self) -> None:
        """Wait until a head has read everything."""
        offer = packet_of(1, msgspec.msgpack.encode(Ask(offered=[(LAST, "0" * 32)], withdrawn=[])))
        deadline = time.monotonic() + ANSWER_SECONDS
        while not self.take():
            if time.monotonic() > deadline:
                raise SystemExit(f"{self._port.process} does not reply for {ANSWER_SECONDS:.0f} s")
            self.send([offer], placed=True)
            self._found["sent"] -= 1
            self._endpoint.poll(100)


def fuzz_zmq(port: Port, messages: Messages, *, identities: Sequence[bytes], count: int, seed: int) -> Counter[str]:
    """Send `count` messages, some under each of the routing ids `identities`, and wait until they were read; for a
    thread. Return the numbers of replies by kind. Raises `zmq.Again` when nothing is read any more."""
    found: Counter[str] = Counter()
    dice = random.Random(seed)
    raw = int(RAW_SHARE * count)
    with zmq.Context() as context:
        for number, identity in enumerate(identities):
            with context.socket(zmq.DEALER) as endpoint:
                fuzz = ZmqFuzz(port, endpoint, identity, found)
                for sent in range((count - raw) * (number + 1) // len(identities) - found["sent"]):
                    fuzz.send(messages.draw(dice), placed=dice.random() < PLACED_SHARE)
                    if sent % 64 == 0:
                        fuzz.take()
                if port.role == "model_worker":
                    fuzz.until_read()
    address = (urlsplit(port.address).hostname, urlsplit(port.address).port)
    for _ in range(raw):
        with socket.create_connection(address, timeout=ANSWER_SECONDS) as connection:
            try:
                connection.sendall(messages.draw_stream(dice))
            except OSError:
                found["cut off"] += 1
            found["sent"] += 1
    return found


def fuzz_torch(port: Port, *, count: int, seed: int) -> Counter[str]:
    """Send `count` commands to a store, or a few streams to gloo, or knock at all ports of a process that are to be
    closed; for a thread."""
    found: Counter[str] = Counter()
    dice = random.Random(seed)
    addresses = [(str(urlsplit(each).hostname), urlsplit(each).port or 0) for each in (port.address, *port.more)]
    while found["sent"] < count and found["no answer"] < KNOCKS * len(addresses):
        for connection in knocked([dice.choice(addresses)] if port.role == "store" else addresses):
            if connection is None:
                found["sent"] += 1
                found["no answer"] += 1
                continue
            with connection:
                connection.settimeout(ANSWER_SECONDS)
                found["streams"] += 1
                stream = hostile.store_stream(dice) if port.role == "store" else hostile.gloo_stream(dice)
                try:
                    connection.sendall(stream)
                    connection.shutdown(socket.SHUT_WR)
                    while port.role == "store" and connection.recv(2**16):
                        found["replies"] += 1
                except TimeoutError as error:
                    raise SystemExit(f"{port.process} does not hang up within {ANSWER_SECONDS:.0f} s") from error
                except OSError:
                    found["cut off"] += 1
            found["sent"] += hostile.STREAM_COMMANDS if port.role == "store" else 1
        if port.role != "store" and found["streams"] >= MOST_STREAMS:
            break
    return found


class Sending:
    """All ports of a run, and what they are sent in each way."""

    def __init__(
        self, ports: Sequence[Port], taps: Taps, granted: RegisterReply, *, messages: int, engine: str
    ) -> None:
        self._ports = ports
        self._engine = engine
        self._messages = messages
        self._granted = granted
        self._ended_episode = next(iter(sorted(taps.keys)), "").removeprefix("Bearer ")
        self._corpora = corpora(taps, count=min(2000, max(100, messages // 5)))

    async def all_ports(self, way: str, seed: int) -> list[Row]:
        """Send everything to all ports at once; return a row for each."""
        return await asyncio.gather(*(self._one(port, way, seed + number) for number, port in enumerate(self._ports)))

    async def _one(self, port: Port, way: str, seed: int) -> dict[str, Any]:
        began = time.monotonic()
        corpus = self._corpora.get(port.role)
        if corpus is None:
            found = await asyncio.to_thread(fuzz_torch, port, count=self._messages, seed=seed)
        elif isinstance(corpus, Requests):
            found = await self._http(port, corpus, way, seed)
        else:
            identities = self._identities(port)[way]
            found = await asyncio.to_thread(
                fuzz_zmq, port, corpus, identities=identities, count=self._messages, seed=seed
            )
        seconds = time.monotonic() - began
        return {
            "port": port.process,
            "way": way,
            "messages": found.pop("sent") if corpus is None else self._messages,
            "accepted": found.pop("accepted", 0),
            "seconds": round(seconds, 1),
            "found": dict(sorted(found.items())),
        }

    async def _http(self, port: Port, requests: Requests, way: str, seed: int) -> Counter[str]:
        stolen = self._ended_episode if port.role == "rollout" else "rollout/0." + "0" * 64
        own = self._granted.gserver_key if port.role == "gserver" else self._granted.token
        allowed = HARMLESS if port.role == "controller" else {"GET /health"} if port.role == "gserver" else set()
        if way == WAYS[1] and port.role == "controller":
            allowed, requests = allowed | WORKERS_CALLS | {"GET /model"}, requests.without(LEFT_OUT)
        if way == WAYS[1] and port.role == "gserver":
            allowed = allowed | {
                f"{method} {path}" for method in ("GET", "POST") for path in generation.GENERATION_CALLS
            }
        if port.role == "gserver" and self._engine == "sglang":
            allowed = allowed | {"GET /metrics"}
            requests = requests.without({"POST /generate"}) if way == WAYS[1] else requests
        shown = dict(zip(WAYS, ("", own, stolen), strict=True))[way]
        fuzz = HttpFuzz(port, requests, shown=shown, allowed=allowed, count=self._messages, seed=seed)
        await fuzz.run()
        return fuzz.found

    def _identities(self, port: Port) -> dict[str, list[bytes]]:
        """Way → routing ids."""
        mine = {receiver: each.text for receiver, each in self._granted.credentials.items()}
        role, other = ("controller", "model_worker") if port.role == "zmq" else ("model_worker", "controller")
        others = mine[other]
        forged = mine[role].replace(f"rollout/{WORKER}", "rollout/0", 1)
        return {
            WAYS[0]: [b""],
            WAYS[1]: [f"{mine[role]} fuzz".encode()],
            WAYS[2]: [b"rollout/0", f"{others} fuzz".encode(), f"{forged} fuzz".encode()],
        }


async def fuzz(messages: int, folder: Path, engine: str) -> list[Row]:
    taps = Taps()
    run = Run(folder, taps, engine)
    rows: list[Row] = []
    try:
        await run.begin()
        status = await run.until_steps(10)
        taps.recording = False
        ports = await asyncio.to_thread(run.ports, status)  # the taps continue
        print(f"{len(ports)} ports: {', '.join(port.process for port in ports)}")
        granted = await run.join()
        sending = await asyncio.to_thread(Sending, ports, taps, granted, messages=messages, engine=engine)
        grown: dict[str, dict[bool, list[float]]] = {port.process: {False: [], True: []} for port in ports}
        made = [0, 0]
        for seed, way in enumerate(WAYS):
            seconds = 0.0
            for quiet in (False, True):
                run.check(ports)
                began, before, steps = time.monotonic(), memory(ports), len(run.steps())
                if quiet:
                    await asyncio.sleep(seconds)
                else:
                    try:
                        rows += await sending.all_ports(way, 100 * seed)
                    except OSError:
                        run.check(ports)  # rather who has ended, and with which words
                        raise
                    await asyncio.sleep(SETTLE_SECONDS)
                run.check(ports)
                seconds = time.monotonic() - began
                made[quiet] += len(run.steps()) - steps
                for name, size in memory(ports).items():
                    grown[name][quiet].append(round(size - before[name], 1))
            for row in rows[-len(ports) :]:
                print(row, flush=True)
        rows += [
            {"port": name, "grown_mb": under[False], "grown_mb_without": under[True]} for name, under in grown.items()
        ]
        late = await run.client.status()
        rows.append(await run.finish() | {"steps_under": made[0], "steps_without": made[1]})
        others = [p for p in late.processes if p.pid != os.getpid()]
        rows[-1]["silent"] = [f"{p.role}/{p.index}" for p in others if p.state == "silent"]
        print(*rows[-len(ports) - 1 :], sep="\n", flush=True)
        return rows
    finally:
        await run.end()
        await taps.close()


def memory(ports: Sequence[Port]) -> dict[str, float]:
    """Megabytes that each process has in memory."""
    return {port.process: psutil.Process(port.pid).memory_info().rss / 2**20 for port in ports}


def problems(rows: Sequence[Row]) -> list[str]:
    """What should not be."""
    found = [f"{row['port']} accepted {row['accepted']} messages" for row in rows if row.get("accepted")]
    found += [f"{row['port']} failed at {row['found']['500']}" for row in rows if row.get("found", {}).get("500")]
    for row in rows:
        more = sum(row.get("grown_mb", ())[1:]) - max(0.0, sum(row.get("grown_mb_without", ())[1:]))
        if more > GROWTH_MB:
            found.append(f"{row['port']} went on growing, by {more:.0f} MB more under messages than without")
    end = rows[-1]
    whole = end["whole_steps"] == end["steps"] and not end["groups_twice"] and not end["groups_lost"]
    if not whole or any(end["exit_codes"].values()) or end["silent"]:
        found.append(f"the run suffered: {end}")
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--messages", type=int, default=100_000, help="at each port, in each way")
    parser.add_argument("--engine", choices=("embedded", "sglang"), default="embedded", help="of the gserver")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        rows = uvloop.run(fuzz(options.messages, Path(folder), options.engine))
        seconds = round(time.monotonic() - began)
    name = "fuzz" if options.engine == "embedded" else f"fuzz_{options.engine}"
    report(name, {"messages": options.messages, "seconds": seconds}, rows)
    if found := problems(rows):
        raise SystemExit("\n".join(found))


if __name__ == "__main__":
    main()
