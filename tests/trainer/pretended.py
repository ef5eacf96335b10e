"""A run around a real master, in one process and in no time: the clock is virtual, and no model computes.

The rollout pool is a ledger and a few lists. Model workers hold real groups in real `StreamDataset`s and keep the order
of calls that real ones keep; a call takes as long as the test says. Rollout workers write groups token by token, under
the version that is served while they do.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from streamrl.architecture import Architecture, Rope
from streamrl.config import Config
from streamrl.errors import PeerLost
from streamrl.ledger import Ledger
from streamrl.records import progress
from streamrl.records.lineage import Lineage
from streamrl.stream_dataset import StreamDataset
from streamrl.trainer.calls import (
    CallDone,
    ClearDataCache,
    DataTransfer,
    FinishSave,
    Function,
    Inference,
    Initialize,
    ModelConfigRequest,
    OpenStore,
    PublicationReply,
    Publish,
    ResponseReply,
    ResponseRequest,
    Save,
    SaveReply,
    Spec,
    StorageNotice,
    StoreAddress,
    TrainReply,
    TrainStep,
    WorkerSpec,
)
from streamrl.trainer.graph import graph_of
from streamrl.trainer.layout import layout_of
from streamrl.trainer.master.process import Master
from streamrl.transport.control import DataFacts, EvaluationStatus, Scores
from streamrl.transport.request_reply import name_on_channel
from streamrl.transport.synchronous import GenerateGroups, GenerateGroupsReply, ScoreGroups, ScoreGroupsReply
from streamrl.types import NO_VERSION, TrajectoryGroup
from tests.evaluations import make_report
from tests.launch.statuses import status

TRANSFORMER = Architecture(
    vocab_size=50,
    hidden_size=16,
    intermediate_size=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=4,
    rms_norm_eps=1e-6,
    rope=Rope(10_000.0),
    max_position=64,
    tied=True,
    qkv_bias=False,
    o_bias=False,
    qk_norm=True,
)
LIMIT_SECONDS = 100_000.0
"""A run that takes longer, on the virtual clock, waits for something that never comes."""
PROMPT = 3
OPINION = -0.5
"""Log-probability of each token, whoever is asked."""


class _Jump(selectors.DefaultSelector):
    """Instead of waiting, moves the clock of its loop on."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready and timeout is None:
            raise AssertionError("everybody waits, and nothing is left that could happen")
        if not ready:
            self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its clock stands still while there is something to do, and jumps to the next timer when there is not."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now


def virtually(work: Coroutine[Any, Any, Any]) -> Any:
    """Run `work` on a virtual clock."""

    async def limited() -> Any:
        async with asyncio.timeout(LIMIT_SECONDS):
            return await work

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(limited())


def clock() -> float:
    return asyncio.get_running_loop().time()


class Event(NamedTuple):
    """Something that the workers were asked for, and when they were through with it."""

    name: str
    """Of the MFC, or of the call's type."""
    call: Any
    """What the first of the workers was asked."""
    begin: float
    end: float


class Workers:
    """Model workers, and rollout workers of a synchronous graph, as the master sees them through its channel."""

    def __init__(
        self, config: Config, *, manager: Manager, stored: asyncio.Queue[StorageNotice], script: Script
    ) -> None:
        self.events: list[Event] = []
        self.compute: Callable[[Any], Any] | None = None
        """What computes for the only worker, if anybody does: carries out a call, and answers as a worker."""
        self.stored = stored
        begun = progress.of_run(config)
        self.weights = begun.policy_version if begun else 0
        """The version that the workers' weights are."""
        self._config, self._manager, self._script = config, manager, script
        graph = graph_of(config)
        self._mfcs = {mfc.name: mfc for mfc in graph.mfcs}
        self._stream_keys = graph.stream_keys
        self.heads = layout_of(config.trainer, "actor").heads
        self.datasets = {
            rank: StreamDataset(
                rank=rank, capacity_groups=10**6, on_stored=lambda meta: stored.put_nowait(StorageNotice([meta]))
            )
            for rank in self.heads
        }
        self._has: dict[int, set[tuple[int, str]]] = defaultdict(set)
        """Arrays that each worker has beside its own groups."""
        self._turn = asyncio.Lock()
        self._weights_free = asyncio.Event()
        self._weights_free.set()
        self._lost: dict[int, asyncio.Event] = defaultdict(asyncio.Event)
        self._waiting: dict[int, list[TrajectoryGroup]] = defaultdict(list)
        """Groups that wait at a rollout worker to be scored."""
        if begun:
            for dataset in self.datasets.values():
                dataset.restore(begun.trained)

    def offer(self, group: TrajectoryGroup) -> None:
        """A rollout worker pushes a group."""
        self.datasets[self.heads[group.seq % len(self.heads)]].offer(group)

    def lose(self, worker: int) -> None:
        """The worker's process ends; the manager gives the prompts of a rollout worker to others."""
        self._lost[worker].set()
        self._waiting.pop(worker, None)
        self._manager.ledger.release(name_on_channel(worker))

    def named(self, name: str) -> list[Event]:
        return [event for event in self.events if event.name == name]

    async def wait_for(self, workers: set[int], *, patience: float, warn_after: float = 30.0) -> None:
        pass

    async def living(self, workers: Sequence[int], *, patience: float) -> list[int]:
        return [worker for worker in workers if not self._lost[worker].is_set()]

    async def call(self, worker: int, call: Any, reply: Any, *, timeout: float) -> Any:
        return (await self.request({worker: call}, reply, timeout=timeout))[worker]

    async def request(self, calls: Mapping[int, Any], reply: Any, *, timeout: float) -> dict[int, Any]:
        first = next(iter(calls.values()))
        name = getattr(first, "mfc", type(first).__name__)
        if isinstance(first, Publish):
            self._weights_free.clear()  # in the order of requests, whatever is being computed
        begin = clock()
        lost = [asyncio.ensure_future(self._lost[worker].wait()) for worker in calls]
        answering = asyncio.ensure_future(self._answer(name, calls))
        try:
            await asyncio.wait([answering, *lost], return_when=asyncio.FIRST_COMPLETED)
            for worker, gone in zip(calls, lost, strict=True):
                if gone.done():
                    raise PeerLost(f"{name_on_channel(worker)} is gone: its connection has ended")
            answers = answering.result()
        finally:
            for task in (answering, *lost):
                task.cancel()
            await asyncio.gather(answering, *lost, return_exceptions=True)
        self.events.append(Event(name, first, begin, clock()))
        assert all(type(answer) is reply for answer in answers.values())
        return answers

    async def _answer(self, name: str, calls: Mapping[int, Any]) -> dict[int, Any]:
        await asyncio.sleep(0)  # the wire
        match next(iter(calls.values())):
            case Spec():
                return {worker: WorkerSpec({"actor": "pretended"}, 0) for worker in calls}
            case ModelConfigRequest():
                return dict.fromkeys(calls, TRANSFORMER)
            case OpenStore():
                return dict.fromkeys(calls, StoreAddress("here", 1))
            case ClearDataCache():
                await self._script.happen(name)
                return {worker: self._clear(worker, call) for worker, call in calls.items()}
            case GenerateGroups() | ScoreGroups():
                return {worker: await self._roll_out_as_called(worker, call) for worker, call in calls.items()}
            case ResponseRequest():
                await self._script.happen(name)
                return {worker: self._response(worker, call) for worker, call in calls.items()}
            case Publish(version, resync):
                return dict.fromkeys(calls, await self._publish(version, resync=resync))
        async with self._turn:
            await self._script.happen(name)
            match next(iter(calls.values())):
                case Initialize():
                    return dict.fromkeys(calls, CallDone(0.0))
                case Inference() | Function():
                    return self._infer(name, calls)
                case TrainStep():
                    return await self._train(name, calls)
                case Save() as save:
                    await self._weights_free.wait()
                    return dict.fromkeys(calls, self._save(save))
                case FinishSave():
                    return dict.fromkeys(calls, SaveReply())
        raise AssertionError(name)

    def _response(self, worker: int, call: ResponseRequest) -> ResponseReply:
        group = self.datasets[worker].find(call.response.seq)
        if group is None:
            return ResponseReply([], [])
        response = group.alone(call.response.index)
        return ResponseReply(response.packed_input_ids.tolist(), np.flatnonzero(response.packed_loss_mask).tolist())

    async def _publish(self, version: int, *, resync: bool) -> PublicationReply:
        """Read the weights, then have them taken on by the gservers that are there."""
        assert version == self.weights
        lacking = set(self._manager.lacking)
        try:
            await self._script.happen("reading")
        finally:
            self._weights_free.set()
        assert version == self.weights, "the weights changed while they were read"
        await self._script.happen("Publish")
        self._manager.lacking -= lacking
        if not resync:
            self._manager.serve(version)
        return PublicationReply(seconds=1.0, pause_seconds=0.5, bytes=1, attempts=1)

    def _infer(self, name: str, calls: Mapping[int, Any]) -> dict[int, CallDone]:
        self._prepare(name, calls)
        rewards = {}
        for worker, call in calls.items():
            if worker in layout_of(self._config.trainer, self._mfcs[name].role).heads:
                for key in self._mfcs[name].outputs:
                    self._has[worker] |= {(seq, key) for seq in call.seqs}
                if self.compute is not None:
                    self.compute(call)
                if self._mfcs[name].outputs == {"rewards"}:
                    rewards |= {worker: {seq: self._script.scores(seq) for seq in call.seqs}}
        return {worker: CallDone(1.0, rewards.get(worker, {})) for worker in calls}

    async def _train(self, name: str, calls: Mapping[int, TrainStep]) -> dict[int, TrainReply]:
        self._prepare(name, calls)
        actor = self._mfcs[name].role == "actor"
        answers = {}
        told = 0
        for worker, call in calls.items():
            ages: dict[int, int] = defaultdict(int)
            if worker in layout_of(self._config.trainer, self._mfcs[name].role).heads:
                for seq in _seqs(call):
                    versions = self._group(seq).packed_policy_versions
                    young = versions[(versions >= call.oldest_version) & (versions != NO_VERSION)]
                    for age in (call.policy_version - young).tolist():
                        ages[age] += 1
            told += sum(ages.values())
            sums = {"tokens": float(sum(ages.values()))}
            sums |= self._script.figures(call.policy_version, sums["tokens"])
            if self.compute is not None:
                found = self.compute(call)
                assert (found.token_ages, found.sums["tokens"]) == (dict(ages), sums["tokens"])
            compared = self._compared(worker, call) if actor else []
            answers[worker] = TrainReply(
                compute_seconds=1.0,
                blocked_seconds=0.0,
                sums=sums if actor else {},
                maxima={},
                token_ages=dict(ages) if actor else {},
                compared=compared,
                update_seconds=0.25,
            )
        step = next(iter(calls.values()))
        assert told == sum(share.loss_tokens for share in step.minibatches), "what is young was counted differently"
        if actor:
            assert step.policy_version == self.weights
            await self._weights_free.wait()
            self.weights += 1
        return answers

    def _compared(self, worker: int, call: TrainStep) -> list[float]:
        """Of the response that the gservers score, if it is this worker's to compute."""
        wanted = call.compared
        if wanted is None or wanted.seq not in call.minibatches[0].seqs:
            return []
        group = self._group(wanted.seq).alone(wanted.index)
        young = group.packed_policy_versions[group.packed_loss_mask] >= call.oldest_version
        assert young.all(), "tokens are compared that are not computed"
        return [OPINION] * len(young)

    def _prepare(self, name: str, calls: Mapping[int, Any]) -> None:
        """Carry out the transfers, and see that each worker has then what its part of the call needs."""
        plan = {}
        for call in calls.values():
            for hook in call.pre_hooks:
                if isinstance(hook, DataTransfer):
                    plan |= {repr(transfer): transfer for transfer in hook.plan}
        for transfer in plan.values():
            for piece in transfer.pieces:
                assert self._holds(transfer.source, piece.seq, piece.key)
                for destination in transfer.destinations:
                    assert not self._holds(destination, piece.seq, piece.key)
                    self._has[destination].add((piece.seq, piece.key))
        for worker, call in calls.items():
            for seq in _seqs(call):
                for key in self._mfcs[name].inputs:
                    assert self._holds(worker, seq, key), (name, worker, seq, key)

    def _holds(self, worker: int, seq: int, key: str) -> bool:
        own = worker in self.datasets and self.datasets[worker].find(seq) is not None
        return (seq, key) in self._has[worker] or (own and key in self._stream_keys)

    def _group(self, seq: int) -> TrajectoryGroup:
        return next(group for dataset in self.datasets.values() if (group := dataset.find(seq)) is not None)

    def _clear(self, worker: int, call: ClearDataCache) -> CallDone:
        if self.compute is not None:
            self.compute(call)
        self._has[worker] = {name for name in self._has[worker] if name[0] not in call.seqs}
        if worker in self.datasets and self.compute is None:
            held = [seq for seq in call.seqs if self.datasets[worker].find(seq) is not None]
            self.datasets[worker].discard(held, forget=call.come_again)
        return CallDone(0.0)

    def _save(self, save: Save) -> SaveReply:
        assert save.progress.policy_version == self.weights
        folder = Path(save.folder)
        folder.mkdir(parents=True, exist_ok=True)
        progress.write(folder, save.progress)
        return SaveReply()

    async def _roll_out_as_called(
        self, worker: int, call: GenerateGroups | ScoreGroups
    ) -> GenerateGroupsReply | ScoreGroupsReply:
        """What a rollout worker of a synchronous graph does."""
        waiting = self._waiting[worker]
        await self._script.happen(type(call).__name__)
        if isinstance(call, GenerateGroups):
            lacking = max(0, call.groups - len(waiting))
            if lacking:
                await self._manager.until(lambda: self._manager.ledger.room)
            admitted = [group.seq for group in self._manager.ledger.admit(name_on_channel(worker), lacking, now=0.0)]
            waiting += [make_group(seq, [self._manager.version] * 4) for seq in admitted]
            return GenerateGroupsReply([group.seq for group in waiting])
        scored = [group for group in waiting if group.seq in call.seqs]
        self._waiting[worker] = [group for group in waiting if group.seq not in call.seqs]
        for group in scored:
            if self._script.rejects(group.seq):
                self._manager.reject(group.seq)
            else:
                self.offer(group)
        return ScoreGroupsReply([group.seq for group in scored if not self._script.rejects(group.seq)])


def _seqs(call: Any) -> list[int]:
    """What a worker is to compute on."""
    return [seq for share in call.minibatches for seq in share.seqs] if isinstance(call, TrainStep) else call.seqs


def make_group(seq: int, versions: Sequence[int]) -> TrajectoryGroup:
    """Two siblings; of each, the next sampled token was sampled under the next of `versions`."""
    one = np.array([NO_VERSION] * PROMPT + list(versions), np.int32)
    both = np.concatenate([one, one])
    return TrajectoryGroup(
        seq=seq,
        worker="rollout/0",
        prompt_length=PROMPT,
        seqlens=np.array([len(one)] * 2, np.int32),
        rewards=np.array([0.0, 1.0], np.float32),
        packed_input_ids=np.arange(len(both), dtype=np.int32),
        packed_loss_mask=both != NO_VERSION,
        packed_behavior_logprobs=np.where(both != NO_VERSION, -0.5, 0).astype(np.float32),
        packed_policy_versions=both,
        finish_reasons=["stop"] * 2,
    )


@dataclass
class Script:
    """What happens in a run, and how long it takes; seconds are virtual."""

    tokens: Callable[[int], int] = lambda seq: 4
    """Of a sibling; each takes a second."""
    copies: Callable[[int], Sequence[float]] = lambda seq: (0.0,)
    """When the finished group is pushed, in seconds from its end: more than once where acknowledgements get lost."""
    rejects: Callable[[int], bool] = lambda seq: False
    scores: Callable[[int], list[float]] = lambda seq: [0.25, 0.75]
    """Of a reward model."""
    seconds: Callable[[str, int], float] = lambda name, count: 0.0
    """How long a call takes: its MFC's or type's name, and how often it has happened before."""
    fails: Callable[[str, int], Exception | None] = lambda name, count: None
    figures: Callable[[int, float], dict[str, float]] = lambda version, tokens: {}
    """Sums of what the step from a version found on so many tokens, besides their number."""
    group: Callable[[int, Sequence[int]], TrajectoryGroup] = make_group
    """The group of a sequence number whose sampled tokens have these versions."""
    slots: int = 64
    """Groups that are written at the same time."""
    rows: int = 1000
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    async def happen(self, name: str) -> None:
        count = self.counts[name]
        self.counts[name] += 1
        await asyncio.sleep(self.seconds(name, count))
        if error := self.fails(name, count):
            raise error


class Signal:
    """Wakes all who wait for something when anything has changed."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            await self._changed.wait()


class Manager(Signal):
    """The master's `RolloutPool`."""

    reads_snapshots = False
    save_requested = False

    def __init__(self, config: Config, script: Script) -> None:
        super().__init__()
        trainer, run = config.trainer, config.run
        self.ledger = Ledger(
            groups_per_batch=trainer.batch_groups,
            max_staleness=config.staleness.max_staleness,
            lease_seconds=1e9,
            in_order=config.staleness.over_age == "wait",
        )
        self.version = 0
        """What gservers serve."""
        self.reports: list[Any] = []
        self.evaluated: list[tuple[int, bool, int]] = []
        """Each evaluation that was requested: version, whether training was over, and the version that was served."""
        self.evaluation: EvaluationStatus | None = None
        """As in the status."""
        self.report_evaluation: Callable[[Any], None] = lambda report: None
        self.evaluating: set[asyncio.Task[None]] = set()
        self.ledger.observers.append(self.wake)
        self.lacking: set[str] = set()
        """gservers that came too late for the weights that are served."""
        self.answers: dict[int, list[Scores]] = {}
        """What the gservers say, by version."""
        self.opinions: Callable[[int], list[float]] = lambda version: [OPINION]
        """Of each gserver about any token, under a version."""
        self._script = script
        if run.total_train_epochs is not None:
            self.ledger.ends_after = run.total_train_epochs * script.rows
        begun = progress.of_run(config)
        if begun:
            self.version = begun.policy_version
            lineage = Lineage(policy_version=self.version)
            self.ledger.restore(lineage, trained=begun.trained_seqs(), rejected=begun.rejected_seqs())

    def serve(self, version: int) -> None:
        self.version = version
        self.ledger.advance(version)

    def reject(self, seq: int) -> None:
        self.ledger.reject(seq)

    async def data(self) -> DataFacts:
        return DataFacts(self._script.rows, "of the pretended data")

    async def resync_needed(self) -> list[str]:
        await self.until(lambda: self.lacking)
        return sorted(self.lacking)

    def compare(self, version: int, tokens: Sequence[int], *, start: int) -> None:
        """A response is scored; the gservers that serve another version by now do not answer."""
        self.answers[version] = [
            Scores(f"gserver/{index}", [opinion] * (len(tokens) - start))
            for index, opinion in enumerate(self.opinions(version))
            if version >= self.version
        ]

    def scores(self, version: int) -> list[Scores]:
        assert self.version == version + 1, "answers are asked for that may still come"
        return self.answers.get(version, [])

    def take_model(self, model: Architecture) -> None:
        self.model = model

    def report(self, report: Any) -> None:
        self.reports.append(report)

    def evaluate(self, version: int, *, training_over: bool) -> None:
        if all(version != known for known, _, _ in self.evaluated):
            self.evaluated.append((version, training_over, self.version))
            self.evaluating.add(asyncio.create_task(self._evaluate(version)))

    async def _evaluate(self, version: int) -> None:
        await self._script.happen("evaluation")
        self.report_evaluation(make_report(version))

    def on_evaluation(self, take: Callable[[Any], None]) -> None:
        self.report_evaluation = take

    def status(self) -> Any:
        return status(0, evaluation=self.evaluation)


class Run:
    """A master with all that it talks to."""

    def __init__(self, config: Config, script: Script) -> None:
        stored: asyncio.Queue[StorageNotice] = asyncio.Queue()
        self.config, self.script = config, script
        self.manager = Manager(config, script)
        self.workers = Workers(config, manager=self.manager, stored=stored, script=script)
        self.master = Master(config, pool=self.manager, channel=self.workers, stored=stored)
        self._writing = 0
        """Groups that are being written."""

    @property
    def steps(self) -> list[list[int]]:
        """What each training step was made of."""
        return [report.seqs for report in self.manager.reports]

    async def roll_out(self) -> None:
        """Be the rollout workers of an asynchronous graph, for ever."""
        ledger = self.manager.ledger
        async with asyncio.TaskGroup() as groups:
            while True:
                await self.manager.until(lambda: ledger.room and self._writing < self.script.slots)
                for seq in [
                    group.seq for group in ledger.admit("rollout/0", self.script.slots - self._writing, now=0.0)
                ]:
                    self._writing += 1
                    groups.create_task(self._write(seq))

    async def _write(self, seq: int) -> None:
        versions = []
        for _ in range(self.script.tokens(seq)):
            await asyncio.sleep(1.0)
            versions.append(self.manager.version)
        self._writing -= 1
        self.manager.wake()
        if self.script.rejects(seq):
            self.manager.reject(seq)
            return
        for seconds in self.script.copies(seq):
            await asyncio.sleep(seconds)
            self.workers.offer(self.script.group(seq, versions))


@asynccontextmanager
async def pretended(config: Config, script: Script | None = None) -> Any:
    """A run; at its end nothing of it may be left."""
    threads, tasks = set(threading.enumerate()), asyncio.all_tasks()
    run = Run(config, script or Script())
    rolling = [] if graph_of(config).of_rollout else [asyncio.create_task(run.roll_out(), name="rollout")]
    try:
        yield run
    finally:
        for task in (*rolling, *run.manager.evaluating):
            task.cancel()
        ends = await asyncio.gather(*rolling, *run.manager.evaluating, return_exceptions=True)
        await run.master.close()
    assert not [end for end in ends if end is not None and not isinstance(end, asyncio.CancelledError)]
    assert threads.issuperset(threading.enumerate())  # of others, such as a loader of models, some may have ended
    assert tasks.issuperset(asyncio.all_tasks())


def whole_run(config: Config, script: Script | None = None) -> tuple[str, Run]:
    """Train to the end; return why it ended."""

    async def work() -> tuple[str, Run]:
        async with pretended(config, script) as run:
            reason = await run.master.run()
            reason += await run.master.finish()
            run.master.write_final()
            return reason, run

    return virtually(work())
