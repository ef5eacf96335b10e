"""The report of a run, made from its folder: `summary.json`, `plots/`, and tables for the terminal.

Works on a crashed run, too, up to its crash.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.markup import escape
from rich.table import Table

from streamrl.records.collapse import HEALTHY, HealthState
from streamrl.records.evaluation import EvaluationReport, pass_figures
from streamrl.records.health import Finding, findings
from streamrl.records.metrics import TASK, Final, StepFigures, mean_age, of_tasks, total_ages
from streamrl.records.timeline import CHILDREN_SECONDS, PROCESSOR_SECONDS
from streamrl.records.view import RunView, read_run

MAX_CHANGES = 6
"""Most changes of the run's health that the table shows."""


SHOWN_IN_ROWS = ("end", "policy")
"""Topics of findings that other rows of the table show."""


class HealthChange(msgspec.Struct, frozen=True):
    """A step after which the state of the run's health differed from the one before."""

    step: int
    state: HealthState
    signs: list[str]
    turn: list[str]
    """Settings to change, as `key=value`."""


class TaskSummary(msgspec.Struct, frozen=True):
    """Figures of one of several tasks."""

    groups_trained: int
    reward_first: float | None
    """Mean over the first tenth of the steps with groups of the task."""
    reward_final: float | None
    """Mean over the last tenth of these steps."""
    token_age_mean: float | None
    """Mean over the steps of the mean age of sampled tokens, in versions."""


class Summary(msgspec.Struct, frozen=True):
    """Figures of a run. None: the run left no record of it.

    Conservation of groups: every sequence number that the ledger has given out is either given up on purpose, on its
    way (under lease, or waiting to be given out again), trained on, or held by the trainer at the end. Groups missing
    in that sum are lost:

        groups_lost = next_seq - rejected - running - returned - groups_trained - groups_held

    It is 0 in a healthy run, above 0 if a finished group vanished, below 0 if one was trained on twice. It is None for
    a run that did not finish, because the ledger did not know all groups that the trainer held.
    """

    run: str
    state: str
    """`finished`, `failed`, `stopped` before its end, or `unknown` if the run recorded no end."""
    message: str
    """Reason of its end."""
    steps: int
    reward_first: float | None
    """Mean over the first tenth of the steps (at least one)."""
    reward_final: float | None
    """Mean over the last tenth of the steps (at least one)."""
    evaluations: list[EvaluationReport]
    """On held-out prompts, by policy version."""
    train_seconds: float
    """From the beginning of the first step to the end of the last."""
    seconds_per_step: float | None
    groups_trained: int
    groups_lost: int | None
    groups_duplicated: int | None
    """Groups that arrived more than once; the copies were refused."""
    groups_rejected: int | None
    groups_given_up: int | None
    """Groups among the rejected ones that were rejected because their workers died again and again."""
    groups_dropped: int | None
    """Finished groups discarded as too old."""
    groups_shrunk: int
    """Groups finished without all of their siblings, because some failed."""
    siblings_retried: int
    """Number of times that a failed sibling was made again."""
    max_staleness: int | None
    over_age: str | None
    oldest_token_age: int | None
    """In versions, over all tokens that entered a loss."""
    mean_token_age: float | None
    masked_share: float | None
    """Sampled tokens in training batches that were too old for the loss, as a share."""
    tokens_generated: int
    """All generated tokens, including evaluations and tokens that were lost when the run was killed."""
    tokens_trained: int
    tokens_generated_per_second: float | None
    """From the first step to the last, without times in which the run was down."""
    tokens_trained_per_second: float | None
    generation_busy_share: float | None
    """Share of the gservers' time in which they generated."""
    trainer_wait_share: float | None
    """Share of the steps' time in which the trainer waited for data."""
    weight_update_seconds_mean: float | None
    pause_seconds_mean: float | None
    """Pause of generation in one weight update."""
    overhead_share: float | None
    """Share of the steps' time that was neither computation, waiting, nor weight update."""
    logprob_diff_mean: float | None
    """Mean difference of the gservers' and the trainer's log-probabilities, over all versions."""
    logprob_diff_max: float | None
    processor_seconds: float = 0.0
    """Processor time of all processes of the run and their children, up to their last heartbeats."""
    episodes: int = 0
    """Agents' episodes that ended with something to train on; 0 if a workflow made the responses."""
    calls_per_episode: float | None = None
    """Mean number of calls to the policy in an episode."""
    turns_per_episode: float | None = None
    """Mean number of answers in an episode's longest conversation."""
    trajectories_per_episode: float | None = None
    """Mean number of conversations in an episode that no other continues: 1 if histories only grow."""
    agent_rewritten: int = 0
    """Calls that begin a new conversation because their history has answers that the policy never gave: edited by the
    agent, or written otherwise by its client."""
    agent_rerendered: int = 0
    """Calls that begin a new conversation because the model's template now writes earlier turns in another way."""
    agent_drifted: int = 0
    """Answers that would have other tokens if their text were tokenized again; they are trained on as sampled."""
    agent_metrics: dict[str, float] = {}
    """The agents' own figures: means over the episodes that gave them."""
    agent_generation_share: float | None = None
    """Share of the episodes' time in which they waited for the policy; the rest is the agents' own, tools included."""
    agent_trained_share: float | None = None
    """Share of the tokens sampled for episodes that are under the loss; the rest never reached an agent."""
    agent_retries: int = 0
    """Requests of agents that received the reply of an earlier request."""
    tasks: dict[str, TaskSummary] = {}
    """Figures of each of [[tasks]], by name."""
    health: list[HealthChange] = []
    """Changes of the run's health; empty if it was healthy all the time."""
    findings: list[Finding] = []
    """Problems found in the last figures, the most severe first."""


def write_report(run_dir: Path) -> Summary:
    """Write `summary.json` and, if the run took a step, `plots/*.png` into `run_dir`; return the summary.

    Raises `OSError` if they cannot be written.
    """
    run = read_run(run_dir)
    summary = summarize(run)
    text = msgspec.json.format(msgspec.json.encode(summary), indent=2)
    (run_dir / "summary.json").write_bytes(text + b"\n")
    if run.steps and (run.config is None or run.config.metrics.plots):
        from streamrl.report.plots import write_plots  # matplotlib takes a second to load

        write_plots(run, run_dir / "plots")
    return summary


def _made(run: RunView, figure: str) -> int:
    """Return `figure` of all groups. The rollout workers' counters include groups that no step has used, and end with
    their last heartbeats; the steps' figures cover what was trained on."""
    return int(max(run.counted("rollout", f"{figure}_total"), sum(run.values(figure))))


def summarize(run: RunView) -> Summary:
    """Return the figures of `run`."""
    steps, final, config = run.steps, run.final, run.config
    seconds = _train_seconds(run)
    rewards = run.values("reward_mean")
    tenth = max(1, len(rewards) // 10)
    ages = total_ages(steps)
    trained, masked, step_seconds = (
        sum(run.values(name)) for name in ("tokens_trained", "tokens_masked", "step_seconds")
    )
    state, message = final.ending if final else ("", "")
    trained_groups = final.groups_trained if final else None
    ledger = final.ledger if final else {}
    return Summary(
        run=run.name,
        state="stopped" if state in ("joining", "running") else state or "unknown",
        message=message,
        steps=len(steps),
        reward_first=mean(rewards[:tenth]),
        reward_final=mean(rewards[-tenth:]),
        evaluations=run.evaluations,
        train_seconds=seconds,
        seconds_per_step=seconds / len(steps) if steps else None,
        groups_trained=int(sum(run.values("groups"))) if trained_groups is None else trained_groups,
        groups_lost=groups_lost(final) if final and ledger and state == "finished" else None,
        groups_duplicated=final.groups_duplicated if final else None,
        groups_rejected=ledger.get("rejected"),
        groups_given_up=ledger.get("given_up"),
        groups_dropped=ledger.get("dropped"),
        groups_shrunk=_made(run, "groups_shrunk"),
        siblings_retried=_made(run, "siblings_retried"),
        max_staleness=config.staleness.max_staleness if config else None,
        over_age=config.staleness.over_age if config else None,
        oldest_token_age=max(ages) if ages else None,
        mean_token_age=mean_age(ages),
        masked_share=ratio(masked, trained + masked),
        tokens_generated=int(run.counted("gserver", "tokens_generated_total")),
        tokens_trained=int(trained),
        tokens_generated_per_second=run.generated_per_second(),
        tokens_trained_per_second=ratio(trained, seconds),
        generation_busy_share=run.generation_busy(),
        trainer_wait_share=ratio(sum(run.values("wait_seconds")), step_seconds),
        weight_update_seconds_mean=mean(run.values("publish_seconds")),
        pause_seconds_mean=mean(run.values("pause_seconds")),
        overhead_share=ratio(sum(run.values("overhead_seconds")), step_seconds),
        logprob_diff_mean=mean(run.values("logprob_diff_mean")),
        logprob_diff_max=max(run.values("logprob_diff_max"), default=None),
        processor_seconds=sum(
            process.total(name) for process in run.processes.values() for name in (PROCESSOR_SECONDS, CHILDREN_SECONDS)
        ),
        tasks=_of_tasks(run),
        health=health_changes(steps),
        findings=findings(run.figures()),
        **_of_agents(run),
    )


def _of_tasks(run: RunView) -> dict[str, TaskSummary]:
    found = {}
    for name in dict.fromkeys(name for step in run.steps for name in of_tasks(step.metrics)):
        rewards, groups, ages = (
            run.values(f"{TASK}/{name}/{figure}") for figure in ("reward_mean", "groups", "token_age_mean")
        )
        tenth = max(1, len(rewards) // 10)
        found[name] = TaskSummary(int(sum(groups)), mean(rewards[:tenth]), mean(rewards[-tenth:]), mean(ages))
    return found


def _of_agents(run: RunView) -> dict[str, Any]:
    """Return the fields of `Summary` that are about agents."""

    def count(name: str) -> float:
        return run.counted("rollout", f"agent_{name}_total")

    episodes = count("episodes")
    return {
        "episodes": int(episodes),
        "calls_per_episode": ratio(count("calls"), episodes),
        "turns_per_episode": ratio(count("turns"), episodes),
        "trajectories_per_episode": ratio(count("trajectories"), episodes),
        "agent_rewritten": int(count("rewritten")),
        "agent_rerendered": int(count("rerendered")),
        "agent_drifted": int(count("drifted")),
        "agent_retries": int(count("retries")),
        "agent_metrics": _agent_metrics(run),
        "agent_generation_share": ratio(count("generation_seconds"), count("seconds")),
        "agent_trained_share": ratio(count("tokens_trained"), count("tokens")),
    }


def health_changes(steps: Sequence[StepFigures]) -> list[HealthChange]:
    """Return the steps with another state than the step before; a run begins healthy."""
    before = [HEALTHY, *(step.health for step in steps)]
    return [
        HealthChange(step.step, step.health.state, step.health.signs, step.health.turn)
        for step, last in zip(steps, before, strict=False)
        if step.health.state != last.state
    ]


def groups_lost(final: Final) -> int:
    """Return how many groups are missing in the sum that `Summary` explains."""
    ledger = final.ledger
    on_their_way = ledger["running"] + ledger["returned"]
    return ledger["next_seq"] - ledger["rejected"] - on_their_way - (final.groups_trained or 0) - final.groups_held


def _ends_of(message: str) -> str:
    """Return the first and the last line of a message that ends in a traceback; other messages unchanged."""
    first, *rest = message.splitlines() or [""]
    return message if len(rest) < 2 else f"{first}\n…\n{rest[-1]}"


def summary_table(summary: Summary) -> Table:
    """Return the summary as a table for the terminal."""
    s = summary
    table = Table(
        title=escape(f"run {s.run}: {s.state}"), caption=escape(_ends_of(s.message)) or None, title_justify="left"
    )
    for heading in ("", "figure", "meaning"):
        table.add_column(heading, justify="right" if heading == "figure" else "left", no_wrap=heading != "meaning")

    def row(name: str, figure: str, meaning: str = "", *, last: bool = False) -> None:
        table.add_row(name, figure, f"[dim]{meaning}[/]", end_section=last)

    row(
        "reward",
        f"{_text(s.reward_first, '.3f')} → {_text(s.reward_final, '.3f')}",
        "first → last tenth of the steps",
    )
    for name, own in s.tasks.items():
        figure = f"{_text(own.reward_first, '.3f')} → {_text(own.reward_final, '.3f')}"
        age = _text(own.token_age_mean, ".2f")
        row(f"task {name}", figure, f"{own.groups_trained} groups trained; mean age of their tokens {age} versions")
    if s.evaluations:
        first, last = s.evaluations[0], s.evaluations[-1]
        row(
            "held-out reward",
            f"{_text(first.reward_mean, '.3f')} → {_text(last.reward_mean, '.3f')}",
            ", ".join([f"version {first.policy_version} → {last.policy_version}", *pass_figures(last)]),
        )
    for change in s.health[:MAX_CHANGES]:
        row(f"policy {change.state}", f"step {change.step}", escape(", ".join(change.signs)))
    if len(s.health) > MAX_CHANGES:
        row("", "", f"and {len(s.health) - MAX_CHANGES} changes more (health in summary.json)")
    if s.health and s.health[-1].turn:
        row("try", "", escape("; ".join(s.health[-1].turn)))
    for finding in s.findings:
        if finding.topic not in SHOWN_IN_ROWS:
            remedy = f"; try {finding.turn[0]}" if finding.turn else ""
            row(finding.topic, finding.severity, escape(finding.text + remedy))
    took = f"{_text(s.seconds_per_step, '.2f')} s each, {s.train_seconds:.0f} s in all"
    row("steps", f"{s.steps}", f"{took}; {s.processor_seconds:.0f} s of processor time", last=True)
    given_up = f" ({s.groups_given_up} after deaths of workers)" if s.groups_given_up else ""
    row(
        "groups trained",
        f"{s.groups_trained}",
        f"lost {_text(s.groups_lost)}, duplicated {_text(s.groups_duplicated)}, "
        f"rejected {_text(s.groups_rejected)}{given_up}, dropped {_text(s.groups_dropped)}",
    )
    if s.siblings_retried or s.groups_shrunk:
        row("siblings retried", f"{s.siblings_retried}", f"after failures; {s.groups_shrunk} groups shrunk")
    row("oldest token trained on", f"{_text(s.oldest_token_age)}", f"versions; limit {_text(s.max_staleness)}")
    row("mean age of tokens", f"{_text(s.mean_token_age, '.2f')}", "versions")
    row("masked tokens", f"{_text(s.masked_share, '.1%')}", "too old for the loss, kept as context", last=True)
    row("generated", f"{s.tokens_generated:,}", f"tokens; {_text(s.tokens_generated_per_second, ',.0f')} per second")
    row("trained on", f"{s.tokens_trained:,}", f"tokens; {_text(s.tokens_trained_per_second, ',.0f')} per second")
    row("generation busy", f"{_text(s.generation_busy_share, '.0%')}", "of the gservers' time")
    row("trainer waits", f"{_text(s.trainer_wait_share, '.0%')}", "for data, of the steps' time", last=True)
    if s.episodes:
        row(
            "agents' episodes",
            f"{s.episodes:,}",
            f"{_text(s.calls_per_episode, '.1f')} calls, {_text(s.turns_per_episode, '.1f')} turns and "
            f"{_text(s.trajectories_per_episode, '.2f')} conversations each; "
            f"{_text(s.agent_generation_share, '.0%')} of their time waited for the policy, "
            f"the rest was theirs, tools included; {_text(s.agent_trained_share, '.0%')} of the tokens trained; "
            f"{s.agent_rewritten} calls with a rewritten history, {s.agent_rerendered} rendered again by the template, "
            f"{s.agent_drifted} answers with other tokens when tokenized again, {s.agent_retries} retries answered",
            last=not s.agent_metrics,
        )
    for place, (name, value) in enumerate(s.agent_metrics.items(), 1):
        row(escape(name), f"{value:.3f}", "the agents' own figure", last=place == len(s.agent_metrics))
    row(
        "weight update",
        f"{_text(s.weight_update_seconds_mean, '.3f')} s",
        f"generation pauses {_text(s.pause_seconds_mean, '.3f')} s in it",
    )
    row("overhead", f"{_text(s.overhead_share, '.1%')}", "of the steps' time")
    row(
        "engine - trainer",
        f"{_text(s.logprob_diff_mean, '.1e')}",
        f"log-probabilities, mean difference at all versions; at most {_text(s.logprob_diff_max, '.1e')}",
    )
    return table


def evaluation_table(evaluations: Sequence[EvaluationReport], *, rows: int = 20) -> Table:
    """Return evaluations as a table. If there are more than `rows`, it shows `rows` of them, spread evenly, with the
    first and the last, and its caption gives the number of all.

    Column `by`: the policy versions that responded; `cut`: share of responses that reached the limit of tokens.
    """
    left_out = len(evaluations) > rows
    caption = f"{rows} of {len(evaluations)} evaluations; all are in evaluations.jsonl" if left_out else None
    table = Table(title="held-out prompts", title_justify="left", caption=caption)
    several = any(e.samples > 1 for e in evaluations)
    names = ["version", "by", "prompts", "reward", "pass@1", *(["pass@k"] if several else []), "length", "cut", "time"]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    last = len(evaluations) - 1
    for e in [evaluations[round(row * last / (rows - 1))] for row in range(rows)] if left_out else evaluations:
        answered = f"{e.oldest_version}" + (f"–{e.newest_version}" if e.newest_version != e.oldest_version else "")
        best = [f"{_text(e.pass_at.get(e.samples), '.3f')} (k={e.samples})"] if several else []
        table.add_row(
            f"{e.policy_version}",
            answered if e.prompts else "–",
            f"{e.prompts}" + (f" (-{e.rejected})" if e.rejected else ""),
            _text(e.reward_mean, ".3f"),
            _text(e.pass_at.get(1), ".3f"),
            *best,
            _text(e.response_length_mean, ".1f"),
            _text(e.cut_share, ".0%"),
            f"{e.seconds:.1f} s",
        )
    return table


def mean(numbers: Sequence[float]) -> float | None:
    """Return the mean; None without numbers."""
    return sum(numbers) / len(numbers) if numbers else None


def ratio(part: float, whole: float) -> float | None:
    """Return `part` / `whole`; None unless `whole` is above 0."""
    return part / whole if whole > 0 else None


_METRIC_TOTAL, _METRIC_COUNT = "agent_metric_total/", "agent_metric_count/"


def _agent_metrics(run: RunView) -> dict[str, float]:
    """Return the mean of each of the agents' own figures over the episodes of all rollout workers."""
    totals: dict[str, float] = {}
    counts: dict[str, float] = {}
    for process in run.of_role("rollout"):
        for name in process.stats.names:
            if name.startswith(_METRIC_COUNT):
                metric = name.removeprefix(_METRIC_COUNT)
                count, total = (np.nan_to_num(process.stats.column(p + metric)) for p in (_METRIC_COUNT, _METRIC_TOTAL))
                lives = np.append(np.diff(count) < 0, True)  # the last heartbeat of each start of the process
                counts[metric] = counts.get(metric, 0.0) + float(count[lives].sum())
                totals[metric] = totals.get(metric, 0.0) + float(total[lives].sum())
    return {name: totals[name] / counts[name] for name in sorted(counts) if counts[name]}


def _train_seconds(run: RunView) -> float:
    """Return the time from the first step's beginning to the last one's end, without times when the run was down."""
    begin, end = run.trained_between
    return run.steps[-1].metrics.get("run_seconds", end - begin) if run.steps else 0.0


def _text(value: float | None, form: str = "") -> str:
    return "–" if value is None else f"{value:{form}}"
