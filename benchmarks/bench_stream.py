"""Groups per second from one process to another: streamrl's stream against plainer ways.

    python benchmarks/bench_stream.py [--quick]

| contender | its work for each group |
|---|---|
| `streamrl` | asks for a place, sends; the head checks every value, de-duplicates, holds, acknowledges |
| `bare` | pyzmq: header and one frame per array, zero-copy where it pays; received as arrays; acknowledged in batches |
| `send_pyobj` | pyzmq's pickling of the whole group; acknowledged in batches |
| `mp_queue` | `multiprocessing.Queue` with room for a window of groups; only the last one is acknowledged |

All four keep at most `window` groups unacknowledged. Repeats are interleaved, medians reported.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import multiprocessing
import queue
import statistics
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np
import uvloop
import zmq
from common import Row, parser_of, report

from streamrl.stream_dataset import StreamDataset
from streamrl.transport import codec
from streamrl.transport.control import Peer
from streamrl.transport.credentials import ReceiverKeys
from streamrl.transport.puller import GroupPuller
from streamrl.transport.push_pull import GroupPusher
from streamrl.transport.secret import Secret
from streamrl.transport.session import COPIED_BELOW
from streamrl.types import NO_VERSION, SampleMeta, TrajectoryGroup

WINDOW = 64
BATCH = 16
"""Groups that the consumer of the receiving side takes together, and of one acknowledgement."""
SIBLINGS = 16
PROMPT = 128
MAX_GROUP_BYTES = 1 << 28
KEYS = ReceiverKeys.derive(Secret("0" * 64, origin="the benchmark"), "model_worker")


def make_groups(length: int, count: int) -> list[TrajectoryGroup]:
    """Groups of `SIBLINGS` responses, prompt included, of `length` tokens each."""
    random = np.random.default_rng(0)
    shape = (SIBLINGS, length)
    mask = np.ones(shape, dtype=np.bool_)
    mask[:, :PROMPT] = False
    groups = []
    for seq in range(count):
        ids = random.integers(0, 49152, shape, dtype=np.int32)
        ids[:, :PROMPT] = ids[0, :PROMPT]
        versions = np.full(shape, 3, dtype=np.int32)
        versions[:, length // 2 :] = 4
        groups.append(
            TrajectoryGroup(
                seq=seq,
                worker="rollout/0",
                prompt_length=PROMPT,
                seqlens=np.full(SIBLINGS, length, dtype=np.int32),
                rewards=random.random(SIBLINGS, dtype=np.float32),
                packed_input_ids=ids.ravel(),
                packed_loss_mask=mask.ravel(),
                packed_behavior_logprobs=np.where(mask, -random.random(shape, dtype=np.float32), np.float32(0)).ravel(),
                packed_policy_versions=np.where(mask, versions, np.int32(NO_VERSION)).ravel(),
                finish_reasons=["stop"] * SIBLINGS,
            )
        )
    return groups


# --- receiving process ---------------------------------------------------------------------------


def receiver(control: Connection, groups: Any, done: Any, encrypted: bool) -> None:
    """Send the endpoints, then serve one run after another as `control` asks."""
    context = zmq.Context.instance()
    bare, pyobj = context.socket(zmq.ROUTER), context.socket(zmq.PAIR)
    bare.set(zmq.MAXMSGSIZE, MAX_GROUP_BYTES)
    for endpoint in (bare, pyobj):
        endpoint.bind("tcp://127.0.0.1:0")
    arrivals = Arrivals()
    dataset = StreamDataset(rank=0, capacity_groups=4 * WINDOW, on_stored=arrivals.put)
    limits = codec.Limits(max_group_bytes=MAX_GROUP_BYTES)
    ingress = GroupPuller(dataset, keys=KEYS, limits=limits, encrypted=encrypted)
    ingress.start()
    control.send((ingress.endpoint, bare.get_string(zmq.LAST_ENDPOINT), pyobj.get_string(zmq.LAST_ENDPOINT)))
    while (order := control.recv()) is not None:
        contender, count = order
        match contender:
            case "streamrl":
                consume(dataset, arrivals, count)
            case "bare":
                receive_bare(bare, count)
            case "send_pyobj":
                receive_pyobj(pyobj, count)
            case "mp_queue":
                for _ in range(count):
                    groups.get()
                done.put(None)
    ingress.close()
    context.destroy(linger=0)


class Arrivals:
    """Hands stored groups to the consumer, a batch at a time."""

    def __init__(self) -> None:
        self._batch: list[int] = []
        self._batches: queue.SimpleQueue[list[int]] = queue.SimpleQueue()

    def put(self, meta: SampleMeta) -> None:
        self._batch.append(meta.seq)
        if len(self._batch) == BATCH:
            self._batches.put(self._batch)
            self._batch = []

    def take(self) -> list[int]:
        return self._batches.get()


def consume(dataset: StreamDataset, arrivals: Arrivals, count: int) -> None:
    """Take a batch once it is there, and discard it, as a trainer does."""
    for _ in range(count // BATCH):
        seqs = arrivals.take()
        assert all(dataset.find(seq) is not None for seq in seqs)
        dataset.discard(seqs, forget=False)


def receive_bare(endpoint: zmq.Socket[bytes], count: int) -> None:
    decoder = msgspec.msgpack.Decoder(codec.GroupHeader)
    dtypes = list(codec.ARRAYS.values())
    received = 0
    while received < count:
        endpoint.poll()
        batch = 0
        while batch < BATCH:
            try:
                sender, header, *frames = endpoint.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            decoder.decode(header.buffer)
            arrays = [np.frombuffer(frame.buffer, dtype) for frame, dtype in zip(frames, dtypes, strict=True)]
            assert len(arrays[0]) == SIBLINGS
            batch += 1
        if batch:
            received += batch
            endpoint.send_multipart([sender.bytes, b"%d" % batch])


def receive_pyobj(endpoint: zmq.Socket[bytes], count: int) -> None:
    received = 0
    while received < count:
        endpoint.poll()
        batch = 0
        while batch < BATCH and endpoint.poll(0):
            assert endpoint.recv_pyobj().size == SIBLINGS
            batch += 1
        received += batch
        endpoint.send(b"%d" % batch)


# --- sending process -----------------------------------------------------------------------------


async def push_all(pusher: GroupPusher, groups: Iterator[TrajectoryGroup]) -> None:
    async def push_some() -> None:
        for group in groups:
            await pusher.push(group, permit=KEYS.permit(group.seq, "rollout/0"))

    await asyncio.gather(*(push_some() for _ in range(WINDOW)))


def send_windowed(
    endpoint: zmq.Socket[bytes], groups: Iterator[TrajectoryGroup], send: Callable[[TrajectoryGroup], None]
) -> None:
    """Send all with at most `WINDOW` unacknowledged."""
    unacknowledged = 0
    for group in groups:
        while unacknowledged >= WINDOW or endpoint.poll(0):
            unacknowledged -= int(endpoint.recv())
        send(group)
        unacknowledged += 1
    while unacknowledged:
        unacknowledged -= int(endpoint.recv())


def array_frames(group: TrajectoryGroup) -> list[memoryview]:
    return [getattr(group, name).data for name in codec.ARRAYS]


def stamped(pool: list[TrajectoryGroup], seqs: Iterator[int], count: int) -> Iterator[TrajectoryGroup]:
    """`count` groups with fresh sequence numbers, over the arrays of `pool`."""
    for group, seq in itertools.islice(zip(itertools.cycle(pool), seqs, strict=False), count):
        yield msgspec.structs.replace(group, seq=seq)


def measure(sizes: dict[int, int], repeats: int, *, encrypted: bool) -> list[Row]:
    """Groups per second of each contender at each size; `sizes`: tokens of a sibling → groups of a run; `encrypted`:
    streamrl's own stream."""
    spawn = multiprocessing.get_context("spawn")
    control, theirs = spawn.Pipe()
    groups, done = spawn.Queue(WINDOW), spawn.Queue()
    process = spawn.Process(target=receiver, args=(theirs, groups, done, encrypted), daemon=True)
    process.start()
    stream_endpoint, bare_endpoint, pyobj_endpoint = control.recv()
    context = zmq.Context.instance()
    bare, pyobj = context.socket(zmq.DEALER, copy_threshold=COPIED_BELOW), context.socket(zmq.PAIR)
    bare.connect(bare_endpoint)
    pyobj.connect(pyobj_endpoint)
    encoder = msgspec.msgpack.Encoder()
    loop = uvloop.new_event_loop()  # what streamrl's processes run

    async def connect() -> GroupPusher:
        return GroupPusher(
            worker="rollout/0",
            heads=[Peer("model_worker", 0, stream_endpoint)],
            credential=KEYS.credential("rollout", 0, number=1),
            max_group_bytes=MAX_GROUP_BYTES,
        )

    pusher = loop.run_until_complete(connect())

    def send_bare(group: TrajectoryGroup) -> None:
        bare.send_multipart([encoder.encode(codec.header_of(group)), *array_frames(group)], copy=False)

    def send_queue(run: Iterator[TrajectoryGroup]) -> None:
        for group in run:
            groups.put(group)
        done.get()

    contenders: dict[str, Callable[[Iterator[TrajectoryGroup]], None]] = {
        "streamrl": lambda run: loop.run_until_complete(push_all(pusher, run)),
        "bare": lambda run: send_windowed(bare, run, send_bare),
        "send_pyobj": lambda run: send_windowed(pyobj, run, lambda group: pyobj.send_pyobj(group)),
        "mp_queue": send_queue,
    }
    rows: list[Row] = []
    seqs = itertools.count()
    for length, count in sizes.items():
        pool = make_groups(length, 16)
        megabytes = codec.group_bytes(pool[0]) / 1e6
        rates: dict[str, list[float]] = collections.defaultdict(list)
        for repeat in range(repeats + 1):
            for name, send in contenders.items():
                run_count = count if repeat else BATCH * 4  # the first repeat warms up
                control.send((name, run_count))
                begin = time.perf_counter()
                send(stamped(pool, seqs, run_count))
                if repeat:
                    rates[name].append(run_count / (time.perf_counter() - begin))
            print(f"{SIBLINGS} × {length}: repeat {repeat} of {repeats} done", flush=True)
        for name, measured in rates.items():
            median = statistics.median(measured)
            rows.append(
                {
                    "siblings": SIBLINGS,
                    "tokens": length,
                    "contender": name,
                    "groups_per_second": round(median, 1),
                    "megabytes_per_second": round(median * megabytes, 1),
                    "ratio_to_bare": round(median / statistics.median(rates["bare"]), 3),
                    "repeats": [round(rate, 1) for rate in measured],
                }
            )
    loop.run_until_complete(pusher.close())
    loop.close()
    control.send(None)
    process.join(10)
    context.destroy(linger=0)
    return rows


def main() -> None:
    parser = parser_of(__doc__, quick="under half a minute")
    parser.add_argument("--encrypted", action="store_true", help="streamrl's stream over CURVE")
    options = parser.parse_args()
    quick = options.quick
    sizes = {512: 1600, 8192: 320} if quick else {512: 4000, 8192: 640}  # multiples of BATCH
    repeats = 3 if quick else 7
    rows = measure(sizes, repeats, encrypted=options.encrypted)
    settings = {
        "window": WINDOW,
        "batch": BATCH,
        "prompt_tokens": PROMPT,
        "repeats": repeats,
        "quick": quick,
        "encrypted": options.encrypted,
    }
    report("bench_stream", settings, rows)


if __name__ == "__main__":
    main()
