"""Evaluations on held-out prompts, which rollout workers make in addition to training, at low priority.

`Evaluations` owns the running evaluation, its prompts and their results, and the waiting evaluation. Pure: times are
passed in.

Invariants: at most one evaluation runs, and at most one waits, the latest requested one; each is reported at most once;
at most `evaluation.max_concurrent` prompts are in progress over all rollout workers; a prompt counts once, however
often its result arrives. A held-out prompt is no group of the ledger, but counts as load of its gserver until it ends.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import msgspec
import numpy as np

from streamrl.config import EvaluationConfig
from streamrl.errors import PeerError, WireError
from streamrl.gserver.manager.gserver import Gserver, Route, Work
from streamrl.gserver.manager.routing import Fleet
from streamrl.records.evaluation import EvaluationReport, in_words, mean_pass_at
from streamrl.records.timeline import FrequentFailure, most_frequent
from streamrl.transport.control import Admission, EvaluationStatus, EvaluationTask, HeldOutResult
from streamrl.types import LARGEST_REWARD

log = logging.getLogger(__name__)

GROUPS_BETWEEN = 3
"""Training groups after which a held-out prompt may begin although training could take every place."""
MAX_LOSSES = 3
"""A prompt fails after it was lost with this many rollout workers: it may well be the cause of their end."""
MOST = 2**31
"""Upper bound of the tokens of a response, and of the policy versions of a run."""


@dataclass
class _EvaluationState:
    """The evaluation in progress."""

    task: EvaluationTask
    began: float
    given: int = 0
    """Prompts below this number were given out."""
    returned: set[int] = field(default_factory=set)
    """Prompts to be given out again."""
    under_way: dict[int, tuple[str, Route]] = field(default_factory=dict)
    """Prompt → the rollout worker that makes it, and its route."""
    results: dict[int, HeldOutResult] = field(default_factory=dict)
    losses: Counter[int] = field(default_factory=Counter)
    """Prompt → number of rollout workers that were lost with it."""


class Evaluations:
    """Gives out the held-out prompts of one evaluation after another, and collects their results.

    A prompt begins at a gserver with a place that no training group waits for; or, once `GROUPS_BETWEEN` training
    groups have begun since the last prompt did, at the gserver with the least load, even if that gserver is full. Hence
    training comes first, and an evaluation ends even if training could always take every place.
    """

    def __init__(self, config: EvaluationConfig, *, fleet: Fleet, clock: Callable[[], float] = time.time) -> None:
        """`clock` returns seconds since the epoch."""
        self._config = config
        self._fleet = fleet
        self._clock = clock
        self._prompts = 0
        """Held-out prompts of each evaluation; 0: not known yet."""
        self.on_report: Callable[[EvaluationReport], None] = lambda report: None
        """Called with each report, once."""
        self._running: _EvaluationState | None = None
        self.forget()

    def forget(self) -> None:
        """Forget all evaluations: running, waiting and finished ones. Later results of their prompts are rejected."""
        for _, route in self._running.under_way.values() if self._running is not None else ():
            self._fleet.release(route)
        self._running = None
        self._waiting: EvaluationTask | None = None
        self._versions: set[int] = set()
        """The policy versions that were requested."""
        self._left_out = self._done = 0
        self._last: EvaluationReport | None = None
        self._last_id = ""
        """Identifier of the evaluation that was reported last."""
        self._groups_before = -math.inf
        """Training groups that had begun when the last prompt began."""

    def set_prompts(self, prompts: int) -> None:
        """Note how many held-out prompts each evaluation has."""
        self._prompts = prompts

    def request(self, version: int) -> None:
        """Queue an evaluation of `version`, unless it was requested before; it replaces one that still waits."""
        if version in self._versions:
            return
        self._versions.add(version)
        if self._running is not None:
            running = self._running.task.policy_version
            log.info("the evaluation of version %d waits for the end of the one of version %d", version, running)
        if self._waiting is not None:
            self._left_out += 1
            log.warning(
                "the evaluation of version %d is replaced by the one of version %d before it has begun; evaluate less "
                "often, or fewer prompts, or raise evaluation.max_concurrent",
                *(self._waiting.policy_version, version),
            )
        self._waiting = EvaluationTask(version, step=version)

    def take(self, worker: str, *, groups_begun: int, groups_wait: bool, now: float) -> Admission | None:
        """Return a prompt for `worker`, with its gserver; None if none may begin now.

        `groups_begun`: training groups that have begun in the run; `groups_wait`: whether some lack only a gserver with
        capacity to begin.
        """
        turn = groups_begun - self._groups_before >= GROUPS_BETWEEN
        if not self._has_prompt or (groups_wait and not turn):
            return None
        route = self._fleet.assign(Work(self._config.samples, 0), now=now, full=turn)
        if route is None:
            return None
        self._groups_before = groups_begun
        running = self._running = self._running or self._begin()
        seq = min(running.returned, default=running.given)
        running.returned.discard(seq)
        running.given = max(running.given, seq + 1)
        running.under_way[seq] = worker, route
        gserver = route.gserver
        return Admission(seq=seq, gserver=gserver.address, name=gserver.name, evaluation=running.task.id)

    def reroute(self, worker: str, evaluation: str, seq: int, *, avoid: str, now: float) -> Gserver | None:
        """Return another gserver for a prompt; its load moves with it only while `worker` makes the prompt."""
        running = self._running
        here = running is not None and running.task.id == evaluation
        holder, route = running.under_way.get(seq, ("", None)) if running is not None and here else ("", None)
        return self._fleet.reassign(route if holder == worker else None, now=now, avoid=avoid)

    def give_back(self, worker: str, *, lost: bool) -> None:
        """Take back the prompts of `worker`, for others to make. `lost`: it is silent, or was replaced; a prompt fails
        once it was lost `MAX_LOSSES` times."""
        running = self._running
        if running is None:
            return
        for seq in [seq for seq, (holder, _) in running.under_way.items() if holder == worker]:
            self._fleet.release(running.under_way.pop(seq)[1])
            running.losses[seq] += lost
            if running.losses[seq] < MAX_LOSSES:
                running.returned.add(seq)
                continue
            error = f"{MAX_LOSSES} rollout workers were lost with it"
            log.error("held-out prompt %d is given up: %s", seq, error)
            running.results[seq] = HeldOutResult(0, running.task.id, seq, error=error, row=f"prompt {seq}")
        self._report_if_done(running)

    def count(self, result: HeldOutResult) -> None:
        """Count the result of a prompt, unless it was counted before; also if its worker was considered lost.

        Raises `PeerError` if there is no such prompt, `WireError` for impossible figures.
        """
        if result.evaluation == self._last_id:
            return  # a repeated message, or a prompt that was made twice
        running, seq = self._running, result.seq
        if running is None or running.task.id != result.evaluation:
            raise PeerError(f"no evaluation {result.evaluation!r} runs: its prompts count no more", status=404)
        if not 0 <= seq < running.given:
            raise PeerError(f"held-out prompt {seq} was not given out; those below {running.given} were", status=400)
        check_result(result, samples=self._config.samples)
        if seq not in running.results:
            running.returned.discard(seq)
            if seq in running.under_way:
                self._fleet.release(running.under_way.pop(seq)[1])
            running.results[seq] = result
            self._report_if_done(running)

    def status(self) -> EvaluationStatus:
        """Return the running and the waiting evaluation, and the last report."""
        running = self._running
        return EvaluationStatus(
            running=None if running is None else running.task,
            waiting=self._waiting,
            done=self._done,
            left_out=self._left_out,
            last=self._last,
            prompts=self._prompts,
            prompts_done=0 if running is None else len(running.results),
        )

    @property
    def _has_prompt(self) -> bool:
        """Whether a prompt is left to give out."""
        running = self._running
        if running is None:
            return self._waiting is not None and self._prompts > 0
        left = bool(running.returned) or running.given < self._prompts
        return left and len(running.under_way) < self._config.max_concurrent

    def _begin(self) -> _EvaluationState:
        """Return the waiting evaluation, which begins now."""
        task, self._waiting = self._waiting, None
        assert task is not None, "one waits, as the caller has checked"
        log.info("evaluation of version %d: %d prompts", task.policy_version, self._prompts)
        return _EvaluationState(task, began=self._clock())

    def _report_if_done(self, running: _EvaluationState) -> None:
        if len(running.results) < self._prompts:
            return
        self._running = None
        self._done += 1
        self._last_id = running.task.id
        results = [running.results[seq] for seq in sorted(running.results)]
        self._last = report_of(running.task, results, self._config, began=running.began, ended=self._clock())
        log.info("%s", in_words(self._last))
        self.on_report(self._last)


def check_result(result: HeldOutResult, *, samples: int) -> None:
    """Raise `WireError` for a result that no prompt with `samples` responses can have."""
    rewards, lengths = result.rewards, result.lengths
    problem = ""
    if result.error:
        problem = "a failed prompt has no figures" if rewards or lengths else ""
    elif len(rewards) != samples:
        problem = f"{len(rewards)} rewards, not evaluation.samples = {samples}"
    elif not all(abs(reward) <= LARGEST_REWARD for reward in rewards):  # NaN fails, too
        problem = f"rewards {rewards}: each is at most {LARGEST_REWARD:g} in magnitude"
    elif len(lengths) < samples or not all(1 <= length <= MOST for length in lengths):
        problem = f"lengths {lengths}: there are {samples} or more, each from 1 to {MOST}"
    elif not 0 <= result.cut <= len(lengths):
        problem = f"{result.cut} of {len(lengths)} trajectories were cut"
    elif not 0 <= result.oldest_version <= result.newest_version <= MOST:
        problem = f"policy versions from {result.oldest_version} to {result.newest_version}"
    if problem:
        raise WireError(f"result of held-out prompt {result.seq}: {problem}")


def report_of(
    task: EvaluationTask, results: Sequence[HeldOutResult], config: EvaluationConfig, *, began: float, ended: float
) -> EvaluationReport:
    """Return the report of `task`, which took from `began` to `ended`, in seconds since the epoch.

    Prompts that failed are counted, and enter no other figure.
    """
    made = [result for result in results if not result.error]
    failures = [FrequentFailure(result.error, 1, result.row) for result in results if result.error]
    rewards = [reward for result in made for reward in result.rewards]
    lengths = [length for result in made for length in result.lengths]
    least = np.float32(config.pass_reward)  # rewards have that precision, too
    passed = [int((np.array(result.rewards, np.float32) >= least).sum()) for result in made]
    return EvaluationReport(
        policy_version=task.policy_version,
        step=task.step,
        time=ended,
        seconds=ended - began,
        oldest_version=min((result.oldest_version for result in made), default=None),
        newest_version=max((result.newest_version for result in made), default=None),
        prompts=len(made),
        samples=config.samples,
        rejected=len(failures),
        reward_mean=fmean(rewards) if rewards else None,
        pass_at=mean_pass_at(passed, samples=config.samples),
        tasks={
            name: report_of(
                task,
                [msgspec.structs.replace(r, task="") for r in results if r.task == name],
                config,
                began=began,
                ended=ended,
            )
            for name in dict.fromkeys(result.task for result in results if result.task)
        },
        response_length_mean=fmean(lengths) if lengths else None,
        cut_share=sum(result.cut for result in made) / len(lengths) if lengths else None,
        failure=most_frequent(failures),
    )
