"""Discrete-event simulation of a run: throughput and staleness of a configuration at given costs, in virtual time.

Admission, routing and batch forming are not modelled: they are done by the code that does them in a run (`Ledger`,
`Admissions`, `Fleet`, `AsyncIOSequenceBuffer`, `BatchFormer`). Only the work that takes time is simulated: decode
steps, rollout workers, rewards, training and publications. Pure and seeded: the same arguments give the same result.

Time advances from event to event. Where pools share the cores of one machine, work is counted in processor seconds and
every computing thread gets the same share of the cores (`_Processor`). A gserver computes whole decode steps of all its
requests together; consecutive steps without another event are one event (`_Gserver`).
"""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from streamrl.config import Config
from streamrl.errors import ConfigError
from streamrl.gserver.embedded.scheduler import PREFILL_TOKENS, prefill_budget
from streamrl.gserver.manager.admission import Admissions
from streamrl.gserver.manager.gserver import Gserver, Work
from streamrl.gserver.manager.registry import MemberEvent
from streamrl.gserver.manager.routing import Fleet
from streamrl.ledger import Ledger
from streamrl.records.metrics import mean_age
from streamrl.rollout.generation import REPORT_SECONDS
from streamrl.trainer.graph import Graph
from streamrl.trainer.master.batches import BatchFormer
from streamrl.trainer.master.buffer import AsyncIOSequenceBuffer
from streamrl.trainer.master.figures import sampled_ages
from streamrl.transport.generation import ServerInfo
from streamrl.types import SampleMeta

TIE = 1e-9
"""Largest rounding difference, in seconds, between simultaneous events."""

GENERATING, PAUSED, NO_ROOM, NO_PLACE, ON_THE_WAY = (
    "generates",
    "is paused for new weights",
    "waits for room in the ledger",
    "waits for a place in a rollout worker",
    "waits for requests on their way",
)
"""States of a gserver."""
TRAINING, NO_BATCH, PUBLISHING, BETWEEN = (
    "trains",
    "waits for groups",
    "waits for the publication of the last weights",
    "is between steps",
)
"""States of the trainer."""


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of the parts of a run.

    Computing costs are processor seconds of one thread if the work runs on the cores that all processes share, else
    seconds of a device; each gserver and the trainer have devices of their own.
    """

    response_lengths: list[list[int]]
    """Sampled tokens of each trajectory of some groups; simulated responses are drawn from them."""
    group_size: int | None = None
    """Episodes in each of these groups, which is fewer than its trajectories if agents' conversations branched. None:
    one trajectory per episode."""
    prompt_tokens: float
    """Mean tokens of a prompt."""
    step_seconds: float
    """Fixed part of a decode step's time, regardless of the number of requests."""
    request_seconds: float
    """Cost of each request in a decode step."""
    prompt_token_seconds: float = 0.0
    """Cost of each prompt token; siblings share it."""
    pace_sigma: float = 0.0
    """Spread of the requests' paces: standard deviation of their logarithm. 0: a token in each step."""
    group_seconds: float = 0.0
    """Processor time of a rollout worker to begin a group."""
    reward_seconds: float = 0.0
    """Processor time of one reward and of the rollout worker's work on the response; rewards queue for a free place in
    a reward process."""
    reward_wait_seconds: float = 0.0
    """Time for which a reward waits for something else while it keeps its place in a reward process."""
    rewards_at_once: bool = False
    """Whether a reward process has a place for each of `rollout.reward.concurrent_calls` calls, which wait at the same
    time and compute one after another; else it has one place."""
    overhead_seconds: float = 0.0
    """Processor time of the controller for one group."""
    train_seconds: float
    """Fixed cost of a training step on each rank, regardless of its tokens."""
    train_token_seconds: float
    """Cost of each computed token of a training step, divided among the ranks. A group's prompt is computed once."""
    between_seconds: float = 0.0
    """Least time from the end of a training step to the next batch."""
    publish_seconds: float = 0.0
    """Duration of a publication without its pause."""
    pause_seconds: float = 0.0
    """Duration of the pause of generation in a publication."""
    rejected_share: float = 0.0
    """Rejected share of all finished groups."""
    thread_gain: float = 1.8
    """Speed of two threads relative to one."""
    gserver_threads: int = 1
    trainer_threads: int = 1
    """Threads of each with which the times above were measured."""
    cores: float | None = None
    """Cores that the processes share, minus those in other work on the machine; None: enough for all processes."""
    gservers_on_cores: bool = False
    """Whether generation computes on the shared cores, not on devices of its own."""
    trainer_on_cores: bool = False


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a run in its steady state."""

    steps_per_hour: float
    tokens_trained_per_second: float
    """Tokens that entered a loss, per second."""
    tokens_generated_per_second: float
    groups_per_second: float
    """Groups trained on, per second."""
    trainer: dict[str, float]
    """State of the trainer → share of the time."""
    gservers: dict[str, float]
    """State of a gserver → share of the time, averaged over gservers."""
    slots_used: float
    """Mean share of occupied request slots in gservers."""
    cores_busy: float | None
    """Busy share of the shared cores; None if no cores are shared."""
    token_ages: dict[int, float]
    """Age in policy versions → share of the tokens that entered a loss."""
    mean_token_age: float
    masked_share: float
    """Share of the sampled tokens of training batches that are too old for the loss."""
    dropped_share: float
    """Share of all finished groups that are dropped because they are too old."""
    mean_group_seconds: float
    """Time from admission to arrival at the trainer."""
    seconds: float
    """Virtual time that the figures cover."""
    events: int
    """Number of simulated events."""


def simulate(config: Config, costs: Costs, *, steps: int = 40, warm_up: int | None = None, seed: int = 0) -> Prediction:
    """Simulate a run of `config` at `costs`; return the figures of `steps` training steps.

    The first `warm_up` steps are left out; by default as many as staleness takes to build up. The graph is assumed to
    be the asynchronous one. Raises `ConfigError` if nothing would ever be trained on.
    """
    if not any(costs.response_lengths):
        raise ConfigError("no length of a response is known: there is nothing to simulate")
    warm = 2 * config.staleness.max_staleness + 4 if warm_up is None else warm_up
    return _SimulatedRun(config, costs, seed=seed).play(steps, warm)


class _Processor:
    """Cores that threads share evenly; `now` is a time of the run's clock.

    The processor seconds of each thread since the start, `got`, grow equally for all threads, so the next job to end is
    the smallest entry of a heap.
    """

    def __init__(self, cores: float) -> None:
        self.cores = cores
        self.threads = 0
        """Threads that compute at the moment."""
        self.got = 0.0
        self.used = 0.0
        """Processor seconds of all threads together."""
        self._now = 0.0
        self._due: list[tuple[float, int, _Job]] = []
        self._count = 0

    def advance(self, now: float) -> None:
        got = (now - self._now) * self._rate
        self.got += got
        self.used += got * self.threads
        self._now = now

    def begin(self, seconds: float, done: Callable[[], None], *, threads: int = 1) -> _Job:
        """Start a job in which each of `threads` computes for `seconds`."""
        job = _Job(done, threads)
        self.threads += threads
        self.set_end(job, self.got + seconds)
        return job

    def set_end(self, job: _Job, got: float) -> None:
        """Set the end of `job`: the value of `self.got` at which it is done."""
        job.end = got
        self._count += 1
        heapq.heappush(self._due, (got, self._count, job))

    def next_end(self) -> float:
        """Return the time at which the next job ends; infinity if there is no job."""
        while self._due and (self._due[0][2].ended or self._due[0][2].end != self._due[0][0]):
            heapq.heappop(self._due)
        return self._now + max(0.0, self._due[0][0] - self.got) / self._rate if self._due else math.inf

    def end_next(self) -> Callable[[], None]:
        """End the job that is due now; return its callback."""
        _, _, job = heapq.heappop(self._due)
        self.got = max(self.got, job.end)
        job.ended = True
        self.threads -= job.threads
        return job.done

    @property
    def _rate(self) -> float:
        return min(1.0, self.cores / self.threads) if self.threads else 1.0


@dataclass(slots=True, eq=False)
class _Job:
    done: Callable[[], None]
    threads: int
    end: float = 0.0
    ended: bool = False


@dataclass(slots=True, eq=False)
class _SimulatedRequest:
    """A response being generated."""

    group: _SimulatedGroup
    length: int
    steps: int
    """Decode steps that it takes: one less than its tokens, because the prompt's pass gives the first token."""
    begin: int = 0
    """Number of steps that its gserver had made when the request got its slot."""


@dataclass(slots=True, eq=False)
class _SimulatedGroup:
    seq: int
    worker: int
    lengths: list[int]
    admitted: float
    left: int
    unscored: int
    versions: dict[int, int] = field(default_factory=dict)


class _Gserver:
    """Decodes the requests in its slots, step by step."""

    def __init__(self, run: _SimulatedRun, index: int) -> None:
        self.index = index
        self.steps = 0
        """Decode steps since the start."""
        self.waiting: deque[_SimulatedRequest] = deque()
        self.running: list[tuple[int, int, _SimulatedRequest]] = []
        """A heap of (step count at which the request ends, order, request)."""
        self.versions: list[int] = [0]
        self.version_begins: list[int] = [0]
        """Number of steps that had been made when each of `versions` was loaded."""
        self.tokens = 0
        self.state = ON_THE_WAY
        self._run = run
        self._costs = run.costs
        self._slots = run.config.gserver.max_running
        self._threads = run.config.gserver.threads
        self._speed = run.speed(self._threads, measured_with=run.costs.gserver_threads)
        self._device = run.cores if run.costs.gservers_on_cores else run.devices
        self._job: _Job | None = None
        self._first_end = 0.0
        """Value of the device's `got` at which the first step of the job is done."""
        self._each = 0.0
        """Seconds of each further step."""
        self._planned = 0
        """Number of steps of the job."""
        self._count = 0
        self._to_recompute = 0.0
        """Context tokens that have to be computed again after a pause."""
        self._paused = False
        self._pause: Callable[[], None] | None = None

    def submit(self, requests: Sequence[_SimulatedRequest]) -> None:
        self.waiting.extend(requests)
        if self._job is None:
            self._next()
        elif len(self.running) < self._slots:
            self._cut()

    def pause(self, paused: Callable[[], None]) -> None:
        """Stop after the current step, then call `paused`."""
        self._pause = paused
        if self._job is None:
            self._next()
        else:
            self._cut()

    def resume(self, version: int) -> None:
        if self._run.config.weights.pause_mode != "in_place":  # the contexts of running requests are computed again
            for _, _, request in self.running:
                made = request.length * (self.steps - request.begin) // request.steps
                self._to_recompute += self._costs.prompt_tokens + made
        self.versions.append(version)
        self.version_begins.append(self.steps)
        self._paused = False
        self._next()

    def show(self, state: str) -> None:
        """Book the time up to now under the present state, then switch to `state`."""
        self._run.account(self)
        self.state = state

    def _cut(self) -> None:
        """Let the job end with the current step."""
        assert self._job is not None
        got = self._device.got
        made = 0 if got < self._first_end else 1 + math.floor((got - self._first_end) / self._each + TIE)
        if made + 1 < self._planned:
            self._planned = made + 1
            self._device.set_end(self._job, self._first_end + made * self._each)

    def _stepped(self) -> None:
        self._job = None
        self.steps += self._planned
        while self.running and self.running[0][0] <= self.steps:
            _, _, request = heapq.heappop(self.running)
            self._finish(request)
        self._next()

    def _next(self) -> None:
        """Begin the next job if there is something to compute."""
        if self._pause is not None:
            self._paused, paused, self._pause = True, self._pause, None
            self.show(PAUSED)
            paused()
            return
        if self._paused or self._job is not None:
            return
        prompts = self._admit() + self._to_recompute
        self._to_recompute = 0.0
        if not self.running:
            self.show(self._run.idle_because)
            return
        if self.state != GENERATING or prompts:
            self.show(GENERATING)
        costs = self._costs
        self._each = (costs.step_seconds + costs.request_seconds * len(self.running)) / self._speed
        prefill = prompts * costs.prompt_token_seconds / self._speed
        self._planned = self.running[0][0] - self.steps
        if self.waiting and len(self.running) < self._slots:
            self._planned = 1
        self._first_end = self._device.got + prefill + self._each
        self._job = self._device.begin(prefill + self._planned * self._each, self._stepped, threads=self._threads)

    def _admit(self) -> float:
        """Put waiting requests into free slots; return the number of prompt tokens to compute for them."""
        free = self._slots - len(self.running)
        if not (free and self.waiting):
            return 0.0
        self._run.account(self)  # the number of used slots changes now
        left = float(prefill_budget(free=free, slots=self._slots, most=PREFILL_TOKENS))
        prompts, group = 0.0, None
        while self.waiting and len(self.running) < self._slots and left > 0:
            request = self.waiting.popleft()
            if request.group is not group:
                group = request.group
                prompts += self._costs.prompt_tokens
                left -= self._costs.prompt_tokens
            request.begin = self.steps
            self._count += 1
            heapq.heappush(self.running, (self.steps + request.steps, self._count, request))
        return prompts

    def _finish(self, request: _SimulatedRequest) -> None:
        """Count the request's tokens by policy version, and pass the response to the run."""
        self._run.account(self, finished=1)
        self.tokens += request.length
        first = bisect_right(self.version_begins, request.begin) - 1
        found, told = request.group.versions, 0
        for place in range(first, len(self.versions)):
            last = place + 1 == len(self.versions) or self.version_begins[place + 1] >= request.begin + request.steps
            made = request.steps if last else self.version_begins[place + 1] - request.begin
            tokens = request.length if last else 1 + (request.length - 1) * made // request.steps
            if made and tokens > told:
                found[self.versions[place]] = found.get(self.versions[place], 0) + tokens - told
                told = tokens
            if last:
                break
        self._run.responded(request)


class _RolloutWorker:
    """Begins groups, one after another."""

    def __init__(self, run: _SimulatedRun) -> None:
        self.held = 0
        self.untold: dict[int, _SimulatedGroup] = {}
        """Groups with finished requests that have not been reported to the manager yet."""
        self._run = run
        self._queue: deque[Callable[[], None]] = deque()
        self._busy = False

    def do(self, then: Callable[[], None]) -> None:
        """Spend the processor time to begin a group, then call `then`."""
        self._queue.append(then)
        self._next()

    def _next(self) -> None:
        if not self._busy and self._queue:
            self._busy = True
            self._run.cores.begin(self._run.costs.group_seconds, self._done)

    def _done(self) -> None:
        self._busy = False
        self._queue.popleft()()
        self._next()


class _SimulatedRun:
    """The simulated run: all parts and the event loop."""

    def __init__(self, config: Config, costs: Costs, *, seed: int) -> None:
        self.config = config
        self.costs = costs
        self.now = 0.0
        self.cores = _Processor(costs.cores if costs.cores is not None else math.inf)
        self.devices = _Processor(math.inf)
        self._trainer_device = self.cores if costs.trainer_on_cores else self.devices
        self.idle_because = ON_THE_WAY
        self._draw = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._event_count = 0
        self._ledger = Ledger(
            groups_per_batch=config.trainer.batch_groups,
            max_staleness=config.staleness.max_staleness,
            lease_seconds=math.inf,
            in_order=config.staleness.over_age == "wait",
        )
        self._fleet = Fleet()
        self._admissions = Admissions(ledger=self._ledger, fleet=self._fleet, group_size=config.rollout.group_size)
        self._former = BatchFormer(config)
        # the time of MFCs on arrival is part of a step's time
        self._held = AsyncIOSequenceBuffer(Graph(()), self._ledger)
        self._workers = [_RolloutWorker(self) for _ in range(config.rollout.workers)]
        self._turn = 0
        self._gservers: dict[str, _Gserver] = {}
        for index in range(config.gserver.count):
            gserver = Gserver(index, str(index))
            gserver.info = ServerInfo(max_running_requests=config.gserver.max_running)
            gserver.handle(MemberEvent.FOUND_CURRENT)
            self._fleet.join(gserver)
            self._gservers[gserver.address] = _Gserver(self, index)
        self._groups: dict[int, _SimulatedGroup] = {}
        self._lengths = [group for group in costs.response_lengths if group]
        self._rewards_waiting: deque[_SimulatedGroup] = deque()
        reward = config.rollout.reward
        self._reward_processes = reward.processes * config.rollout.workers
        """Reward processes that compute nothing."""
        self._reward_places = self._reward_processes * (reward.concurrent_calls if costs.rewards_at_once else 1)
        """Free places in reward processes."""
        self._version = 0
        self._training = False
        self._publishing = False
        self._pausing = 0
        self._trained_batch: list[SampleMeta] | None = None
        self._trainer_state = NO_BATCH
        self._since = [0.0] * config.gserver.count
        self._requests = [0] * config.gserver.count
        self._clear_figures()

    # --- figures ---

    def _clear_figures(self) -> None:
        self._begin = self.now
        self._trainer_since = self.now
        self._trainer_times: defaultdict[str, float] = defaultdict(float)
        self._gserver_times: defaultdict[str, float] = defaultdict(float)
        self._slot_seconds = 0.0
        self._used_before = self.cores.used
        self._generated = 0
        self._sampled = self._finished = self._dropped = self._arrived = 0
        self._ages: defaultdict[int, int] = defaultdict(int)
        self._group_seconds = 0.0
        self._steps = 0
        self._since = [self.now] * len(self._since)

    def account(self, gserver: _Gserver, *, finished: int = 0) -> None:
        """Book the time since the last call under the state of `gserver`."""
        seconds = self.now - self._since[gserver.index]
        if seconds > 0:
            self._since[gserver.index] = self.now
            self._gserver_times[gserver.state] += seconds
            self._slot_seconds += seconds * (len(gserver.running) + finished)

    def _trainer_is(self, state: str) -> None:
        self._trainer_times[self._trainer_state] += self.now - self._trainer_since
        self._trainer_state, self._trainer_since = state, self.now

    def speed(self, threads: int, *, measured_with: int) -> float:
        """Return the speed on `threads` threads relative to `measured_with` threads."""
        return float((threads / measured_with) ** math.log2(self.costs.thread_gain))

    # --- the clock ---

    def at(self, time: float, then: Callable[[], None]) -> None:
        self._event_count += 1
        heapq.heappush(self._events, (time, self._event_count, then))

    def play(self, steps: int, warm_up: int) -> Prediction:
        """See `simulate`."""
        self._admit()
        warm = warm_up == 0
        events = 0
        while not warm or self._steps < steps:
            core, device = self.cores.next_end(), self.devices.next_end()
            event = self._events[0][0] if self._events else math.inf
            first = min(core, device, event)
            if first == math.inf:
                batch, ledger = self.config.trainer.batch_groups, self._ledger
                raise ConfigError(
                    f"nothing would ever be trained on: a batch of {batch} groups lacks {batch - len(self._held)}, "
                    f"{ledger.running} are on their way, and the ledger has room for {ledger.room}"
                )
            self.now = max(self.now, first)
            self.cores.advance(self.now)
            self.devices.advance(self.now)
            events += 1
            if first == core:
                self.cores.end_next()()
            elif first == device:
                self.devices.end_next()()
            else:
                heapq.heappop(self._events)[2]()
            if not warm and self._version >= warm_up:
                warm = True
                self._clear_figures()
        return self._prediction(events)

    # --- generation ---

    def _admit(self) -> None:
        """Give workers with free places as many groups as may start."""
        workers, limit = self._workers, self.config.rollout.max_concurrent_groups
        full = 0
        while full < len(workers) and self._admissions.possible:
            index = self._turn = (self._turn + 1) % len(workers)
            free = limit - workers[index].held
            if free <= 0:
                full += 1
                continue
            full = 0
            for admission in self._admissions.take(
                f"rollout/{index}", free, workers=len(workers), ticket="", now=self.now
            ):
                lengths = self._draw_lengths()
                group = _SimulatedGroup(admission.seq, index, lengths, self.now, len(lengths), len(lengths))
                self._groups[group.seq] = group
                workers[index].held += 1
                workers[index].do(partial(self._start, group, self._gservers[admission.gserver]))
        self._explain_idleness(places=full < len(workers))

    def _explain_idleness(self, *, places: bool) -> None:
        reason = NO_ROOM if self._ledger.room == 0 else ON_THE_WAY if places else NO_PLACE
        if reason != self.idle_because:
            self.idle_because = reason
            for gserver in self._gservers.values():
                if gserver.state in (NO_ROOM, NO_PLACE, ON_THE_WAY):
                    gserver.show(reason)

    def _draw_lengths(self) -> list[int]:
        """Draw the lengths of one group's trajectories from one calibrated group, where they are alike."""
        seen = self._draw.choice(self._lengths)
        of_an_episode = len(seen) / (self.costs.group_size or len(seen))
        size = max(1, round(self.config.rollout.group_size * of_an_episode))
        rollout = self.config.rollout
        one_turn = rollout.workflow.name == "single_turn" and not rollout.agent.used
        limit = rollout.sampling.max_new_tokens * one_turn  # in multi-turn episodes it limits each turn, not the sum
        drawn = list(seen) if len(seen) == size else self._draw.choices(seen, k=size)
        return [min(length, limit) if limit else length for length in drawn]

    def _start(self, group: _SimulatedGroup, gserver: _Gserver) -> None:
        gserver.submit(
            [_SimulatedRequest(group, max(1, length), self._steps_of(max(1, length))) for length in group.lengths]
        )

    def _steps_of(self, length: int) -> int:
        sigma = self.costs.pace_sigma
        pace = math.exp(self._draw.gauss(-sigma * sigma / 2, sigma)) if sigma else 1.0
        return max(1, round((length - 1) * pace))

    def responded(self, request: _SimulatedRequest) -> None:
        """Count a finished response, schedule its report to the manager, and score it."""
        group = request.group
        self._generated += request.length
        group.left -= 1
        worker = self._workers[group.worker]
        if not worker.untold:
            self.at(self.now + REPORT_SECONDS, partial(self._tell, worker))
        worker.untold[group.seq] = group
        if self.costs.reward_seconds or self.costs.reward_wait_seconds:
            self._rewards_waiting.append(group)
            self._score()
        else:
            self._scored(group)

    def _tell(self, worker: _RolloutWorker) -> None:
        """Report finished requests to the manager."""
        untold, worker.untold = worker.untold, {}
        for seq, group in untold.items():
            if group.left or group.unscored:
                self._admissions.in_flight(f"rollout/{group.worker}", seq, Work(group.left, 0), now=self.now)
        self._admit()

    def _score(self) -> None:
        while self._reward_processes and self._reward_places and self._rewards_waiting:
            self._reward_processes -= 1
            self._reward_places -= 1
            self.cores.begin(self.costs.reward_seconds, partial(self._computed, self._rewards_waiting.popleft()))

    def _computed(self, group: _SimulatedGroup) -> None:
        self._reward_processes += 1
        if self.costs.reward_wait_seconds:
            self.at(self.now + self.costs.reward_wait_seconds, partial(self._end_score, group))
            self._score()
        else:
            self._end_score(group)

    def _end_score(self, group: _SimulatedGroup) -> None:
        self._reward_places += 1
        self._scored(group)
        self._score()

    def _scored(self, group: _SimulatedGroup) -> None:
        group.unscored -= 1
        if not group.unscored:
            self._arrive(group)

    def _arrive(self, group: _SimulatedGroup) -> None:
        """Hand a finished group to the trainer, or reject it."""
        seq = group.seq
        self._workers[group.worker].held -= 1
        if self._draw.random() < self.costs.rejected_share:
            self._admissions.reject(f"rollout/{group.worker}", seq, "as in the calibration")
            del self._groups[seq]
        else:
            self._arrived += 1
            self._group_seconds += self.now - group.admitted
            meta = SampleMeta(
                seq=seq,
                head=0,
                worker="",
                size=len(group.lengths),
                tokens=sum(group.lengths),
                rewards=[],
                response_lengths=group.lengths,
                version_counts=group.versions,
                generation_seconds=self.now - group.admitted,
            )
            self._held.put_batch([meta])
        if self.costs.overhead_seconds:
            self.cores.begin(self.costs.overhead_seconds, lambda: None)
        self._admit()
        self._form_batch()

    # --- training ---

    def _form_batch(self) -> None:
        """Train on the next batch if one is ready and the trainer is free."""
        if self._training:
            return
        selection = self._former.select(
            self._held.ready, policy_version=self._version, next_in_order=self._ledger.next_in_order
        )
        if selection.drop:
            with self._held.dropping(selection.drop):
                self._dropped += len(selection.drop)
                for seq in selection.drop:
                    del self._groups[seq]
            self._admit()
            self._form_batch()
        elif selection.batch:
            self._train(self._held.metas(selection.batch))
        else:
            self._trainer_is(NO_BATCH)

    def _train(self, batch: list[SampleMeta]) -> None:
        self._training = True
        self._trainer_is(TRAINING)
        trainer, costs = self.config.trainer, self.costs
        tokens = sum(meta.sampled_tokens for meta in batch) + costs.prompt_tokens * len(batch)
        each = costs.train_seconds + tokens * costs.train_token_seconds / trainer.workers
        each /= self.speed(trainer.threads, measured_with=costs.trainer_threads)
        threads = trainer.threads * trainer.workers
        self._trainer_device.begin(each, partial(self._trained, batch), threads=threads)

    def _trained(self, batch: list[SampleMeta]) -> None:
        """End a training step; its weights are published once the previous publication is done."""
        if self._publishing:
            self._trained_batch = batch
            self._trainer_is(PUBLISHING)
            return
        self._trained_batch = None
        self._count(batch)
        for meta in batch:
            del self._groups[meta.seq]
        self._held.trained_on(meta.seq for meta in batch)
        self._version += 1
        self._steps += 1
        self._trainer_is(BETWEEN)
        self._publishing = True
        self._trainer_device.begin(self.costs.publish_seconds, partial(self._published, self._version))
        self.at(self.now + self.costs.between_seconds, self._next_batch)

    def _next_batch(self) -> None:
        self._training = False
        self._form_batch()

    def _count(self, batch: list[SampleMeta]) -> None:
        self._finished += len(batch)
        for age, tokens in sampled_ages(batch, policy_version=self._version).items():
            self._sampled += tokens
            if age <= self._former.max_staleness:
                self._ages[age] += tokens

    def _published(self, version: int) -> None:
        """Pause all gservers, now that each has staged the weights; then swap and resume."""
        self._pausing = len(self._gservers)
        for gserver in self._gservers.values():
            gserver.pause(partial(self._paused, version))

    def _paused(self, version: int) -> None:
        self._pausing -= 1
        if not self._pausing:
            self.at(self.now + self.costs.pause_seconds, partial(self._swapped, version))

    def _swapped(self, version: int) -> None:
        self._ledger.advance(version)
        for gserver in self._gservers.values():
            gserver.resume(version)
        self._publishing = False
        self._admit()
        if self._trained_batch is not None:
            self._trained(self._trained_batch)

    def _prediction(self, events: int) -> Prediction:
        for gserver in self._gservers.values():
            self.account(gserver)
        self._trainer_is(self._trainer_state)
        seconds = max(self.now - self._begin, TIE)
        gserver_seconds = seconds * len(self._gservers)
        tokens = sum(self._ages.values())
        cores = self.costs.cores
        return Prediction(
            steps_per_hour=3600 * self._steps / seconds,
            tokens_trained_per_second=tokens / seconds,
            tokens_generated_per_second=self._generated / seconds,
            groups_per_second=self._finished / seconds,
            trainer={state: time / seconds for state, time in sorted(self._trainer_times.items()) if time},
            gservers={state: time / gserver_seconds for state, time in sorted(self._gserver_times.items()) if time},
            slots_used=self._slot_seconds / (gserver_seconds * self.config.gserver.max_running),
            cores_busy=(self.cores.used - self._used_before) / (cores * seconds) if cores is not None else None,
            token_ages={age: count / tokens for age, count in sorted(self._ages.items())} if tokens else {},
            mean_token_age=mean_age(self._ages) or 0.0,
            masked_share=1 - tokens / self._sampled if self._sampled else 0.0,
            dropped_share=self._dropped / max(1, self._dropped + self._finished),
            mean_group_seconds=self._group_seconds / max(1, self._arrived),
            seconds=seconds,
            events=events,
        )
