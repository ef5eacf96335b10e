"""Health findings of a run, as sentences: the figure, its meaning, and the key to change. Pure.

`findings` uses the latest figures only, so it works during a run, after a crash, and on a run that lacks some files: a
finding without its figure is left out. The terminal display, `streamrl report` and the page show the same findings.
Each limit below names its source; limits without a source are our own, with a reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from streamrl.config import Config
from streamrl.config.trainer import ASYNCHRONOUS
from streamrl.records.collapse import HEALTHY, LARGEST_GRADIENT, SMALLEST_SAMPLE, Health, advice
from streamrl.records.evaluation import EvaluationReport
from streamrl.records.lineage import Lineage
from streamrl.records.timeline import FrequentFailure, most_frequent

Severity = Literal["bad", "warning", "note"]
"""bad: the run fails, or learns something wrong. warning: it is likely to, or wastes a good part of its work. note:
good to know."""

WINDOW = 20
"""Number of steps over which figures are judged."""
ENOUGH = 5
"""Least number of steps that are judged, and the number of first steps with which later ones are compared."""

WRONG_SAMPLE = 0.5
"""Effective sample size below which half of the batch has no effect (Kish's definition,
https://en.wikipedia.org/wiki/Effective_sample_size); below `collapse.SMALLEST_SAMPLE` there is a note."""
CLIPPED_GRADIENTS = 0.5
"""Share of steps in which `trainer.optimizer.grad_clip` cuts the gradient: above it, clipping instead of the learning
rate sets the size of most steps."""
KL_ABOVE_TARGET = 1.5
"""KL over its target at which PPO's rule makes the penalty larger (https://arxiv.org/abs/1707.06347, section 4)."""
LARGEST_KL = 1.0
"""Mean KL from the reference of a token, in nats: tokens are e times as likely as under the reference."""
LEAST_CONTRAST = 0.25
"""Share of groups with different scores of siblings; the others have no gradient (DAPO,
https://arxiv.org/abs/2503.14476, section 3.2). Below a quarter a batch is worth less than a fourth of its cost."""
LEAST_ENTROPY = 0.05
"""Share of the entropy of the first steps. A policy without entropy has stopped to explore, and its reward stops to
rise (https://arxiv.org/abs/2505.22617)."""
LEARNED = 0.95
"""Share of the largest reward so far above which a low entropy is no problem."""
CUT_RESPONSES = 0.1
"""Share of responses that reach the limit of tokens: their rewards judge an unfinished answer (DAPO, section 3.4)."""
MASKED = 0.05
MOSTLY_MASKED = 0.3
"""Share of sampled tokens left out as too old: more than "a few per cent" of docs/staleness.md, and far more."""
SPECIAL = 0.01
"""Share of sampled tokens that are special tokens in the middle of a response: a reward function does not see them."""
WAITING = 0.5
"""Share of a step's time in which one pool waits for the other: above it, the slower pool decides the pace."""
PAUSED = 0.1
"""Share of a step's time in which weight updates pause generation, or hold up the optimizer."""
REJECTED = 0.1
"""Share of groups that were given up, of held-out prompts that failed, or of responses that could not be scored."""
FAILED_SIBLINGS = 0.1
"""Retries as a share of the siblings, or shrunk groups as a share of the groups: each retry costs a whole response."""
FAILING = 0.01
"""Limit in place of `REJECTED` if the error is known: a row on which the reward function fails always fails."""
MOSTLY_UNSCORED = 0.5
"""Share of unscored responses above which rewards are useless."""
OFTEN_RESTARTED = 3
"""Restarts of one process, that deserve a warning."""
LEAST_DISK = 2**30
LEAST_DISK_SHARE = 0.03
"""Free bytes, and share of the disk, below which the next checkpoint may not fit."""


class Finding(msgspec.Struct, frozen=True):
    """One sentence about a run."""

    severity: Severity
    topic: str
    """The subject, in a word or two: `reward`, `staleness`, `disk`, ..."""
    text: str
    """A sentence that names the problem and its figure."""
    turn: list[str] = []
    """Changes, the first to try first: `key=value`, with the present value, or words."""

    def __str__(self) -> str:
        return self.text + (f"; try {' or '.join(self.turn)}" if self.turn else "")


class RunFigures(msgspec.Struct, kw_only=True):
    """Figures that the health of a run is judged by; unknown figures are left out."""

    steps: Sequence[Mapping[str, float]] = ()
    """`StepReport.metrics` of the last `WINDOW` steps or more, the latest last."""
    first: Sequence[Mapping[str, float]] = ()
    """The same of the first few steps of the run."""
    best_reward: float | None = None
    """Largest `reward_mean` of a step."""
    health: Health = HEALTHY
    """State of the collapse watch at the last step."""
    response_lengths: Sequence[Sequence[int]] = ()
    """Sampled tokens of each sibling of the last step's first groups."""
    evaluations: Sequence[EvaluationReport] = ()
    stats: Mapping[str, Mapping[str, float]] = {}
    """Process → the figures of its last heartbeat."""
    failures: Mapping[str, FrequentFailure] = {}
    """Process → the error that has cost it most groups, if there was one."""
    generation_busy: float | None = None
    """Share of the last steps' time in which gservers computed, from 0 to 1."""
    restarts: Mapping[str, int] = {}
    """Process → number of its restarts, without those in which the whole run was resumed."""
    lineages: Sequence[Lineage] = ()
    """Beginnings of the run after its first."""
    failed_updates: int = 0
    """Weight updates that were rolled back."""
    config: Config | None = None
    state: str = ""
    """The controller's state of the run: `running`, `finished`, `failed`, ..."""
    message: str = ""
    """Reason of the run's end."""
    disk_free: int | None = None
    """Free bytes on the run's disk; only during a run."""
    disk_bytes: int | None = None
    """Size of that disk."""


def findings(run: RunFigures) -> list[Finding]:
    """Return the health findings on `run`, the worst first; empty if nothing unhealthy is known."""
    order: dict[Severity, int] = {"bad": 0, "warning": 1, "note": 2}
    found = [*_end(run), *_policy(run), *_engines(run), *_data(run), *_staleness(run), *_pace(run), *_machines(run)]
    return sorted(found, key=lambda finding: order[finding.severity])


def _end(run: RunFigures) -> Iterator[Finding]:
    if run.state == "failed":
        yield Finding("bad", "end", f"the run failed: {run.message}", ["the logs of its processes"])


def _policy(run: RunFigures) -> Iterator[Finding]:
    config = run.config or Config()
    lr = f"trainer.lr={config.trainer.lr / 2:g} (now {config.trainer.lr:g})"
    if run.health.state != "healthy":
        what = "is collapsing" if run.health.state == "collapsing" else "may be about to fall apart"
        yield Finding(
            "bad" if run.health.state == "collapsing" else "warning",
            "policy",
            f"the policy {what} since step {run.health.since}: {', '.join(run.health.signs)}",
            run.health.turn,
        )
    sample = _mean(run, "effective_sample_size")
    if sample is not None and sample < SMALLEST_SAMPLE and run.health.state == "healthy":
        yield Finding(
            "warning" if sample < WRONG_SAMPLE else "note",
            "effective sample size",
            f"the effective sample size is {sample:.2f}: of each batch, data count for {sample:.0%} of their number, "
            "because they were written by a policy that is far from the present one",
            advice(config),
        )
    gradient = max(_values(run, "grad_norm_ratio")[-ENOUGH:], default=0.0)
    if gradient > LARGEST_GRADIENT and run.health.state == "healthy":
        yield Finding(
            "note", "gradient", f"a gradient norm was {gradient:.1f} times the usual in the last {ENOUGH} steps", [lr]
        )
    norms = _values(run, "grad_norm")
    clip = config.trainer.optimizer.grad_clip
    cut = _share(norms, lambda norm: norm > clip)
    if run.config is not None and cut is not None and cut > CLIPPED_GRADIENTS:
        yield Finding(
            "note",
            "gradient",
            f"the gradient norm was above {clip:g} in {cut:.0%} of the last {len(norms)} steps (mean "
            f"{_average(norms):.2g}): clipping, and not the learning rate, sets the size of the steps",
            [lr, f"trainer.optimizer.grad_clip={2 * clip:g} (now {clip:g})"],
        )
    yield from _kl(run, config)
    entropy, before = _mean(run, "entropy"), _mean_of(run.first, "entropy")
    reward = _mean(run, "reward_mean")
    sure = reward is not None and run.best_reward is not None and reward >= LEARNED * run.best_reward > 0
    if entropy is not None and before is not None and before > 0 and entropy < LEAST_ENTROPY * before and not sure:
        coefficient = config.algorithm.entropy_coef
        yield Finding(
            "warning",
            "entropy",
            f"the entropy of a token is {entropy:.2g} nats, {entropy / before:.0%} of its first value: the policy "
            "no longer explores",
            [
                f"algorithm.entropy_coef={2 * coefficient or 0.003:g} (now {coefficient:g})",
                f"algorithm.clip_high={config.algorithm.clip_high + 0.1:.2g} (now {config.algorithm.clip_high:g})",
            ],
        )


def _kl(run: RunFigures, config: Config) -> Iterator[Finding]:
    kl, target, coefficient = _mean(run, "kl"), config.algorithm.kl_target, config.algorithm.kl_coef
    if kl is None:
        return
    turn = [f"algorithm.kl_coef={2 * coefficient:g} (now {coefficient:g})"]
    if target is not None and kl > KL_ABOVE_TARGET * target:
        yield Finding(
            "warning",
            "KL",
            f"the KL from the reference is {kl:.3g} nats a token, {kl / target:.1f} times algorithm.kl_target",
            turn,
        )
    elif target is None and kl > LARGEST_KL:
        yield Finding(
            "warning", "KL", f"the policy is {kl:.2f} nats a token away from the reference, which is a long way", turn
        )


def _engines(run: RunFigures) -> Iterator[Finding]:
    limit = (run.config or Config()).logprob_diff_warning
    latest = run.steps[-1] if run.steps else {}
    far = {
        name.partition("/")[2].replace("_", "/"): value
        for name, value in latest.items()
        if name.startswith("logprob_diff_mean/") and value > limit
    }
    if far:
        worst = max(far, key=lambda name: far[name])
        others = f" (and {len(far) - 1} more)" if len(far) > 1 else ""
        yield Finding(
            "bad",
            "engine against trainer",
            f"{worst}{others} computes log-probabilities that are {far[worst]:.3g} nats a token away from the "
            f"trainer's, more than {limit:g}: it may serve other weights than it reports, or compute differently",
            ["the same gserver.dtype and trainer.dtype", "a restart of the gserver"],
        )
    sampled = latest.get("sampling_diff_mean")
    if sampled is not None and sampled > limit and not far:
        yield Finding(
            "bad",
            "engine against trainer",
            f"fresh responses were sampled with log-probabilities {sampled:.3g} nats a token away from the trainer's, "
            f"more than {limit:g}",
            ["rollout.sampling.* and model.chat_template as the trainer computes with them"],
        )
    missing = latest.get("gservers_not_compared", 0.0)
    if missing and not latest.get("gservers_compared"):
        yield Finding(
            "note", "engine against trainer", f"none of {missing:.0f} gservers was compared with the trainer lately"
        )
    if run.failed_updates:
        yield Finding(
            "warning",
            "weight updates",
            f"{run.failed_updates} weight updates failed and were rolled back",
            ["limits.update_seconds, or weights.mode"],
        )


def _data(run: RunFigures) -> Iterator[Finding]:
    config = run.config or Config()
    groups, contrast = _mean(run, "groups"), _mean(run, "groups_with_contrast")
    if groups and contrast is not None and contrast / groups < LEAST_CONTRAST:
        reward = _mean(run, "reward_mean")
        at = f" at a mean reward of {reward:.2f}" if reward is not None else ""
        size = config.rollout.group_size
        yield Finding(
            "warning",
            "contrast",
            f"in {1 - contrast / groups:.0%} of the groups all siblings scored the same{at}: they teach nothing",
            [
                "data that are neither solved nor hopeless",
                f"rollout.group_size={2 * size} (now {size})",
                *([] if config.rollout.filter else ["rollout.filter=contrast"]),
            ],
        )
    most = config.longest_response
    lengths = [length for group in run.response_lengths for length in group]
    cut = _share(lengths, lambda length: length >= most)
    if run.config is not None and cut is not None and cut > CUT_RESPONSES:
        yield Finding(
            "warning",
            "length",
            f"{cut:.0%} of the responses are as long as they may be, {most} tokens: they were cut before their end",
            [
                f"rollout.sampling.max_new_tokens={2 * most} (now {most})",
                *(["rollout.reward.overlong_tokens"] if config.reward_function_scores else []),
            ],
        )
    special, sampled = _total(run, "tokens_special"), _total(run, "tokens_sampled")
    if sampled and special / sampled > SPECIAL:
        yield Finding(
            "warning",
            "special tokens",
            f"{special / sampled:.0%} of the sampled tokens are special tokens, which response.text lacks: responses "
            "are longer than the text that is scored",
            ["a reward that falls with response.output_tokens", "rollout.sampling.stop_token_ids"],
        )
    if run.evaluations:
        last = run.evaluations[-1]
        if last.cut_share is not None and last.cut_share > CUT_RESPONSES:
            yield Finding(
                "note",
                "evaluation",
                f"{last.cut_share:.0%} of the held-out responses at version {last.policy_version} were cut",
                ["evaluation.sampling.max_new_tokens"],
            )
    yield from _failures(run)


def _failures(run: RunFigures) -> Iterator[Finding]:
    """Yield findings on groups, responses and held-out prompts that failed, with the most frequent error."""
    rollout = (run.config or Config()).rollout
    cause = most_frequent(failure for name, failure in run.failures.items() if name.startswith("rollout/"))
    limit = REJECTED if cause is None else FAILING
    why = "the logs of the rollout workers have the errors" if cause is None else f"most often {cause}"
    done, rejected = (_sum(run, "rollout/", f"groups_{what}_total") for what in ("done", "rejected"))
    if rejected and rejected / (done + rejected) > limit:
        yield Finding(
            "warning",
            "rejected groups",
            f"{rejected / (done + rejected):.0%} of the groups were given up ({rejected:.0f}): {why}",
            _against(cause),
        )
    retried = _sum(run, "rollout/", "siblings_retried_total") / max(1.0, (done + rejected) * rollout.group_size)
    shrunk = _sum(run, "rollout/", "groups_shrunk_total") / max(1.0, done + rejected)
    if max(retried, shrunk) > FAILED_SIBLINGS:
        yield Finding(
            "warning",
            "failed siblings",
            f"{retried:.0%} of the siblings were made again, and {shrunk:.0%} of the groups lost siblings, because "
            f"rewards, agents or workflows failed: {why}",
            _against(cause),
        )
    unscored = _sum(run, "rollout/", "reward_errors_total") / max(1.0, done * rollout.group_size)
    if unscored > limit and rollout.on_failed_sibling == "zero":
        yield Finding(
            "bad" if unscored > MOSTLY_UNSCORED else "warning",
            "rewards",
            f"{min(1.0, unscored):.0%} of the responses score 0 because scoring them failed: {why}",
            _against(cause),
        )
    last = run.evaluations[-1] if run.evaluations else None
    failed = last.rejected / max(1, last.rejected + last.prompts) if last is not None else 0.0
    cause = last.failure if last is not None else None
    if last is not None and failed > (REJECTED if cause is None else FAILING):
        because = "" if cause is None else f": most often {cause}"
        text = f"{failed:.0%} of the held-out prompts failed at version {last.policy_version}{because}"
        yield Finding("warning", "evaluation", text, [] if cause is None else _against(cause))


def _against(cause: FrequentFailure | None) -> list[str]:
    """Return the settings that the error names, or else the function, as `Finding.turn`."""
    settings = ["rollout.reward.timeout_seconds", "rollout.agent.timeout_seconds", "data.max_prompt_tokens"]
    if cause is None:
        return ["rollout.reward.function", *settings]
    named = [setting for setting in settings if setting in cause.error]
    return named or ["the reward function, workflow or agent (streamrl check CONFIG scores several rows)"]


def _staleness(run: RunFigures) -> Iterator[Finding]:
    config = run.config or Config()
    eta = config.staleness.max_staleness
    raised = _staler(run)
    masked, sampled = _total(run, "tokens_masked"), _total(run, "tokens_sampled")
    if sampled and masked / sampled > MASKED:
        yield Finding(
            "warning" if masked / sampled > MOSTLY_MASKED else "note",
            "staleness",
            f"{masked / sampled:.0%} of the sampled tokens were more than {eta} versions old and left out of the loss",
            [raised, "shorter responses"],
        )
    dropped = _total(run, "tokens_dropped")
    if dropped and dropped / (dropped + sampled) > MASKED:
        yield Finding(
            "warning",
            "staleness",
            f"{dropped / (dropped + sampled):.0%} of the generated tokens were dropped as too old: the policy trains "
            "on shorter responses than it writes",
            ['staleness.over_age="mask"', raised],
        )


def _staler(run: RunFigures) -> str:
    """Return the change that makes the pools wait less for each other."""
    config = run.config or Config()
    eta, drift = config.staleness.max_staleness, config.staleness.most_drift
    admitted = _mean(run, "admitted_staleness")
    if drift and admitted is not None and round(admitted) < eta:  # a larger one would change nothing
        return f"staleness.most_drift={2 * drift:g} (now {drift:g})"
    staleness = f"staleness.max_staleness={max(1, 2 * eta)} (now {eta})"
    if config.trainer.synchronous:  # this graph allows no staleness but 0
        return f'trainer.graph="{ASYNCHRONOUS}" with {staleness}'
    return staleness


def _pace(run: RunFigures) -> Iterator[Finding]:
    config = run.config or Config()
    seconds = _total(run, "step_seconds")
    if not seconds or len(run.steps) < ENOUGH:
        return
    waiting = _total(run, "wait_seconds") / seconds
    if waiting > WAITING:
        count = config.gserver.count
        yield Finding(
            "note",
            "pace",
            f"the trainer waits for data in {waiting:.0%} of its time: generation is the slower pool",
            [f"gserver.count={2 * count} (now {count})", "gserver.max_running", _staler(run)],
        )
    elif run.generation_busy is not None and run.generation_busy < 1 - WAITING:
        yield Finding(
            "note",
            "pace",
            f"the gservers compute in {run.generation_busy:.0%} of their time: the trainer is the slower pool, or too "
            "few groups may run",
            [_staler(run), "rollout.max_concurrent_groups", "trainer.data_parallel"],
        )
    for figure, what in (
        ("pause_seconds", "generation is paused by weight updates"),
        ("blocked_seconds", "the optimizer waits for the publication of the weights before"),
    ):
        share = _total(run, figure) / seconds
        if share > PAUSED:
            yield Finding(
                "note", "weight updates", f"{what} in {share:.0%} of the time", ["weights.mode", "weights.pause_mode"]
            )


def _went_back(run: RunFigures) -> Iterator[Finding]:
    deaths = [lineage for lineage in run.lineages if lineage.cause]
    if deaths:
        lost = sum(lineage.steps_lost for lineage in deaths)
        kept = sum(lineage.groups_kept for lineage in deaths)
        without = f" with {kept} groups that were not generated again" if kept else ""
        yield Finding(
            "warning" if len(deaths) >= OFTEN_RESTARTED else "note",
            "went back",
            f"the run went back to a checkpoint {_times(len(deaths))}, and made {lost} steps again{without}; the last "
            f"time to step {deaths[-1].policy_version}, because {deaths[-1].cause}",
            ["trainer.save_every"] if lost > OFTEN_RESTARTED * len(deaths) else [],
        )


def _machines(run: RunFigures) -> Iterator[Finding]:
    yield from _went_back(run)
    for name, count in sorted(run.restarts.items(), key=lambda item: -item[1]):
        yield Finding(
            "warning" if count >= OFTEN_RESTARTED else "note",
            "restarts",
            f"{name} was started again {_times(count)}; logs/{name.replace('/', '-')}.log has the reason",
        )
    if run.disk_free is not None:
        share = run.disk_free / run.disk_bytes if run.disk_bytes else 1.0
        if run.disk_free < LEAST_DISK or share < LEAST_DISK_SHARE:
            yield Finding(
                "bad" if run.disk_free < LEAST_DISK / 8 else "warning",
                "disk",
                f"{run.disk_free / 2**30:.1f} GiB are free where the run writes: the next checkpoint may not fit",
                ["more free disk", "trainer.keep_checkpoints", "metrics.rollouts_mb"],
            )
    lost = _sum(run, "model_worker/", "rollouts_lost_total")
    if lost:
        yield Finding(
            "note",
            "rollouts",
            f"{lost:.0f} groups that were to be kept for people to look at were lost: the disk is full, or too slow",
            ["metrics.rollouts_per_step"],
        )
    refused = _sum(run, "model_worker/", "groups_refused_total")
    if refused:
        yield Finding(
            "warning",
            "stream",
            f"{refused:.0f} groups were refused by the trainer; the logs of the model workers have the reason",
        )


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def _values(run: RunFigures, metric: str) -> list[float]:
    """Return `metric` of the last steps that have a finite value for it."""
    return [step[metric] for step in run.steps[-WINDOW:] if math.isfinite(step.get(metric, math.nan))]


def _average(values: Sequence[float]) -> float:
    """Return the mean, also of numbers whose sum is too large for a float."""
    return math.fsum(value / len(values) for value in values)


def _mean(run: RunFigures, metric: str) -> float | None:
    values = _values(run, metric)
    return _average(values) if len(values) >= ENOUGH else None


def _mean_of(steps: Sequence[Mapping[str, float]], metric: str) -> float | None:
    values = [step[metric] for step in steps if math.isfinite(step.get(metric, math.nan))]
    return _average(values) if values else None


def _total(run: RunFigures, metric: str) -> float:
    return sum(_values(run, metric))


def _share(values: Sequence[float], counts: Callable[[float], bool]) -> float | None:
    """Return the share of `values` for which `counts` is true; None if there are fewer than `ENOUGH`."""
    return sum(map(counts, values)) / len(values) if len(values) >= ENOUGH else None


def _sum(run: RunFigures, role: str, stat: str) -> float:
    """Return the sum of `stat` over all processes whose names begin with `role`."""
    return sum(stats.get(stat, 0.0) for name, stats in run.stats.items() if name.startswith(role))
