"""The terminal dashboard of a run: the activity of each pool, and the waits of processes.

Drawn from the run so far (`records/view.py`) and the controller's last statuses, as a rich renderable that fits 100
columns and 30 lines. Pure: statuses, steps and times are passed in.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from streamrl.config import Config
from streamrl.records.evaluation import in_words
from streamrl.records.health import Finding
from streamrl.records.metrics import TASK, StepFigures, mean_age, of_tasks, seconds_between
from streamrl.records.view import RunView
from streamrl.transport.control import EvaluationStatus, ProcessStatus, Status

WINDOW_SECONDS = 10.0
RATES_KEPT = 2000


class StatusHistory:
    """The last statuses of a run, and rates from the differences of their counters."""

    def __init__(self, *, started: float) -> None:
        """`started`: on the same clock as every `now`."""
        self.started = started
        self.last: Status | None = None
        self.generated_rates: deque[float] = deque(maxlen=RATES_KEPT)
        """Tokens per second of the generation pool, one value for each status."""
        self._seen: deque[tuple[float, dict[str, ProcessStatus]]] = deque()

    def add(self, status: Status, *, now: float) -> None:
        self.last = status
        gservers = {f"{p.index}/{p.pid}": p for p in status.processes if p.role == "gserver"}
        self._seen.append((now, gservers))
        while len(self._seen) > 2 and now - self._seen[0][0] > WINDOW_SECONDS:
            self._seen.popleft()
        if self._servers_in_both():
            self.generated_rates.append(self._growth("tokens_generated_total"))

    def pool_shares(self) -> dict[str, float]:
        """Return shares of the generation pool's time in the window; empty before the second status of a gserver."""
        servers = self._servers_in_both()
        if not servers:
            return {}
        busy = min(1.0, self._growth("busy_seconds_total") / len(servers))
        paused = min(1.0 - busy, self._growth("pause_seconds_total") / len(servers))
        return {"busy": busy, "paused": paused, "idle": 1.0 - busy - paused}

    def _servers_in_both(self) -> list[str]:
        if len(self._seen) < 2:
            return []
        return [key for key in self._seen[-1][1] if key in self._seen[0][1]]

    def _growth(self, counter: str) -> float:
        """Return the growth of `counter` per second, summed over gservers, in the window."""
        servers = self._servers_in_both()
        (begin, old), (end, new) = (self._seen[0], self._seen[-1]) if self._seen else ((0.0, {}), (0.0, {}))
        if not servers or end <= begin:
            return 0.0
        grown = sum(new[key].stats.get(counter, 0.0) - old[key].stats.get(counter, 0.0) for key in servers)
        return max(0.0, grown) / (end - begin)


def trainer_shares(step: StepFigures) -> dict[str, float]:
    """Return shares of a step's time by span name; time that no span covers is `other`.

    `publish` is left out, because it runs during the next step.
    """
    spans = [span for span in step.spans if span[0] != "publish"]
    if not spans:
        return {}
    total = max(step.time, *(end for _, _, end in spans)) - min(begin for _, begin, _ in spans)
    if total <= 0:
        return {}
    shares: dict[str, float] = {}
    for name, begin, end in spans:
        shares[name] = shares.get(name, 0.0) + (end - begin) / total
    other = 1.0 - sum(shares.values())
    return {**shares, "other": other} if other > 0.005 else shares


def seconds_per_step(steps: Sequence[StepFigures]) -> float | None:
    """Return the median of the last twenty steps; None before the second step."""
    last = steps[-21:]
    return median(seconds_between(a, b) for a, b in pairwise(last)) if len(last) > 1 else None


# --- the picture ---

OTHER_LINES = 24
"""Lines of the whole picture with one warning, without the rows of the table of processes."""
STATE_STYLE = {
    "joining": "yellow",
    "running": "green",
    "finished": "bold green",
    "failed": "bold red",
    "stopped": "bold yellow",
    "live": "green",
    "silent": "yellow",
    "evicted": "red",
    "draining": "yellow",
    "healthy": "green",
    "warning": "bold yellow",
    "collapsing": "bold red",
}
SPAN_STYLE = {
    "wait": "grey42",
    "ref_inf": "magenta",
    "actor_inf": "cyan",
    "critic_inf": "blue",
    "actor_train": "green",
    "critic_train": "dark_green",
    "publish": "yellow",
    "save": "white",
    "other": "grey23",
    "busy": "green",
    "paused": "yellow",
    "idle": "grey42",
}


def dashboard(
    run: RunView,
    history: StatusHistory,
    *,
    now: float,
    config: Config | None = None,
    warnings: Sequence[str] = (),
    findings: Sequence[Finding] = (),
    height: int = 30,
) -> RenderableType:
    """Return the whole picture. `config` adds figures that the status lacks (steps to go, limits). `findings`: health
    findings, worst first."""
    status = history.last
    if status is None:
        return Panel(
            Text("waiting for the controller's first answer", style="dim"), title="streamrl", border_style="blue"
        )
    tasks = _tasks(run)
    more = (status.evaluation is not None) + (_agents(status) is not None)
    if tasks:
        more += 2 + len(of_tasks(run.steps[-1].metrics))
    rows = max(3, height - OTHER_LINES - more - max(0, min(len(warnings), 2) - 1))
    return Group(
        _header(run, history, status, config, now),
        _side_by_side(_reward(run), _throughput(run, history)),
        *tasks,
        _side_by_side(_times(run, history), _staleness(run, status)),
        _groups(run, status),
        _processes(status, rows),
        _warnings(warnings, findings),
    )


def sparkline(values: Sequence[float], width: int) -> str:
    """Return `values` as a line of bars, averaged down to at most `width` characters."""
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    bounds = [round(i * len(values) / count) for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]
    low, high = min(means), max(means)
    scale = (high - low) or 1.0
    return "".join("▁▂▃▄▅▆▇█"[min(7, int((mean - low) / scale * 8))] for mean in means)


def duration(seconds: float) -> str:
    """Return `seconds` as text: `3:07`, `1:02:03`."""
    minutes, second = divmod(int(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def step_line(step: StepFigures, *, steps: int | None = None) -> str:
    """Return one step as one line, for logs."""
    m = step.metrics
    parts = [f"step {step.step}" + (f"/{steps}" if steps else "")]
    for label, metric, form in (
        ("reward", "reward_mean", ".3f"),
        ("length", "response_length_mean", ".1f"),
        ("loss", "loss", ".4f"),
        ("grad", "grad_norm", ".3f"),
        ("step", "step_seconds", ".2f"),
        ("wait", "wait_seconds", ".2f"),
        ("pause", "pause_seconds", ".3f"),
    ):
        if metric in m:
            unit = " s" if metric.endswith("_seconds") else ""
            parts.append(f"{label} {m[metric]:{form}}{unit}")
    for name, own in of_tasks(m).items():
        parts.append(f"{name} {own['reward_mean']:.3f}" if "reward_mean" in own else f"{name} –")
    if (age := mean_age(step.token_ages)) is not None:
        parts.append(f"age {age:.1f} (max {max(age for age, count in step.token_ages.items() if count)})")
    if "tokens_per_second" in m:
        parts.append(f"{m['tokens_per_second']:.0f} tok/s")
    return "  ".join(parts)


def _header(run: RunView, history: StatusHistory, status: Status, config: Config | None, now: float) -> Panel:
    step = status.ledger.policy_version
    line = Table.grid(expand=True, padding=(0, 1))
    if config is None:
        line.add_row(f"step {step}", Text(status.message, style="dim", justify="right"))
        if status.model is not None:
            line.add_row(Text(str(status.model), style="dim"))
    else:
        pace = seconds_per_step(run.steps)
        epochs = (run.values("epoch") or [0.0])[-1]
        left = _steps_left(config, step=step, epochs=epochs)
        eta = duration(pace * left) if pace is not None and left is not None else "–"
        most_steps, most_epochs = config.run.most_steps, config.run.total_train_epochs
        counts = f"step [bold]{step}[/]" + (f"/{most_steps}" if most_steps is not None else "")
        if most_epochs is not None:
            counts += f"  epoch [bold]{epochs:.1f}[/]/{most_epochs}"
        line.add_column(no_wrap=True)
        line.add_column(ratio=1)
        line.add_column(no_wrap=True)
        line.add_row(
            counts,
            ProgressBar(total=1.0, completed=step / (step + left) if left is not None and step + left else 0.0),
            f"elapsed [bold]{duration(now - history.started)}[/]  eta [bold]{eta}[/]",
        )
    model = f" · {config.model.path}" if config else ""
    title = Text.assemble(("streamrl", "bold"), f" · {status.run}{model}")
    style = STATE_STYLE[status.state]
    note = f": {status.message}" if status.message and config else ""
    return Panel(
        line,
        title=title,
        subtitle=Text(f"{status.state}{note}"[:90], style=style),
        border_style=style,
    )


def _steps_left(config: Config, *, step: int, epochs: float) -> float | None:
    """Return the steps to the run's nearer limit, epochs at the present pace; None: not known yet."""
    left = []
    if config.run.most_steps is not None:
        left.append(float(config.run.most_steps - step))
    if config.run.total_train_epochs is not None and epochs > 0:
        left.append(step / epochs * (config.run.total_train_epochs - epochs))
    return max(0.0, min(left)) if left else None


def _side_by_side(left: RenderableType, right: RenderableType) -> Table:
    grid = Table.grid(expand=True)
    grid.add_column(ratio=11)
    grid.add_column(ratio=9)
    grid.add_row(left, right)
    return grid


def _reward(run: RunView) -> Panel:
    rewards = run.values("reward_mean")
    if not rewards:
        return Panel(Text("no step yet\n", style="dim"), title="reward")
    m = run.steps[-1].metrics
    first = Text.assemble((f"{rewards[-1]:7.3f} ", "bold green"), (sparkline(rewards, 40), "green"))
    figures = _figures(
        m,
        ("response_length_mean", "length", ".1f"),
        ("entropy", "entropy", ".2f"),
        ("grad_norm", "grad", ".2f"),
        ("reward_std", "std", ".2f"),
    )
    return Panel(Group(first, figures), title="reward")


def _tasks(run: RunView) -> list[RenderableType]:
    """Return a panel with a line for each task; none for a run of one task, or before the first step."""
    tasks = of_tasks(run.steps[-1].metrics) if run.steps else {}
    if not tasks:
        return []
    grid = Table.grid(padding=(0, 1))
    for name, own in tasks.items():
        rewards = run.values(f"{TASK}/{name}/reward_mean")
        reward = Text.assemble((f"{rewards[-1]:7.3f} " if rewards else "      – ", "bold green"))
        shown = (
            ("response_length_mean", "length", ".1f"),
            ("groups", "groups", ".0f"),
            ("token_age_mean", "age", ".1f"),
        )
        figures = _figures(own, *shown)
        grid.add_row(name, reward, Text(sparkline(rewards, 30), style="green"), figures)
    return [Panel(grid, title="tasks")]


def _throughput(run: RunView, history: StatusHistory) -> Panel:
    grid = Table.grid(padding=(0, 1))
    for name, values, style in (
        ("generated", list(history.generated_rates)[-60:], "cyan"),
        ("trained on", run.values("tokens_per_second")[-60:], "magenta"),
    ):
        rate = f"{values[-1]:7,.0f} tok/s" if values else "      – tok/s"
        grid.add_row(name, Text(rate, style=f"bold {style}"), Text(sparkline(values, 16), style=style))
    return Panel(grid, title="tokens per second")


def _times(run: RunView, history: StatusHistory) -> Panel:
    of_trainer = trainer_shares(run.steps[-1]) if run.steps else {}
    lines: list[Text] = []
    for name, shares in (("generation", history.pool_shares()), ("trainer", of_trainer)):
        lines.append(Text.assemble(f"{name:<11}", _share_bar(shares, 39)))
        lines.append(_share_legend(shares))
    return Panel(Group(*lines), title="where the time goes", height=7)


def _share_bar(shares: Mapping[str, float], width: int) -> Text:
    text = Text()
    filled, total = 0, 0.0
    for name, share in shares.items():
        total += share
        upto = min(width, round(total * width))
        text.append("█" * (upto - filled), style=SPAN_STYLE.get(name, "white"))
        filled = max(filled, upto)
    return text or Text("–", style="dim")


def _share_legend(shares: Mapping[str, float]) -> Text:
    text = Text(overflow="ellipsis", no_wrap=True)
    for name, share in sorted(shares.items(), key=lambda item: -item[1]):
        if share >= 0.005:
            text.append(f"{name} ", style=SPAN_STYLE.get(name, "white"))
            text.append(f"{share:.0%} ")
    return text


def _staleness(run: RunView, status: Status) -> Panel:
    limit = status.ledger.max_staleness
    ages = run.steps[-1].token_ages if run.steps else {}
    total = sum(ages.values())
    oldest = max([limit, *ages])
    wide = -(-(oldest + 1) // 5)
    grid = Table.grid(padding=(0, 1))
    grid.add_column(justify="right")
    for low in range(0, oldest + 1, wide):
        high = low + wide - 1
        share = sum(count for age, count in ages.items() if low <= age <= high) / total if total else 0.0
        label = f"{low}" if wide == 1 else f"{low}–{high}"
        grid.add_row(
            label, Text("█" * round(share * 26) or "▏", style="cyan" if high <= limit else "blue"), f"{share:.0%}"
        )
    admitted = int(run.steps[-1].metrics.get("admitted_staleness", limit)) if run.steps else limit
    title = f"age of tokens in versions, limit {limit}" + (f", now {admitted}" if admitted < limit else "")
    return Panel(grid, title=title, height=7)


def _groups(run: RunView, status: Status) -> Panel:
    ledger = status.ledger
    queued = sum(int(p.stats.get("queued", 0)) for p in status.processes if p.role == "gserver")
    figures = [
        f"running [bold]{ledger.running}[/]",
        f"requests queued [bold]{queued}[/]",
        f"accepted, not trained [bold]{max(0, ledger.accepted - ledger.trained)}[/]",
        f"room [bold]{ledger.room}[/]",
    ]
    figures += [
        f"{name} [yellow]{count}[/]"
        for name, count in (
            ("rejected", ledger.rejected),
            ("of them after deaths", ledger.given_up),
            ("dropped", ledger.dropped),
            ("expired", ledger.expired),
            ("shrunk", _of_rollout_workers(status, "groups_shrunk_total")),
            ("siblings retried", _of_rollout_workers(status, "siblings_retried_total")),
        )
        if count
    ]
    m = run.steps[-1].metrics if run.steps else {}
    weights = _figures(
        m,
        ("publish_seconds", "weight update", ".2f"),
        ("pause_seconds", "pause", ".3f"),
        ("logprob_diff_mean", "logprob diff mean", ".1e"),
        ("logprob_diff_max", "max", ".1e"),
    )
    if m.get("gservers_not_compared") or m.get("gservers_compared") == 0:
        weights.append(f"compared {m['gservers_compared']:.0f}, not {m['gservers_not_compared']:.0f}", style="yellow")
    lines = [Text.from_markup("  ".join(figures)), weights, _health(run)]
    if status.evaluation is not None:
        lines.append(_evaluation(status.evaluation))
    if (agents := _agents(status)) is not None:
        lines.append(agents)
    return Panel(Group(*lines), title="groups and weights")


def _of_rollout_workers(status: Status, stat: str) -> int:
    """Return the sum of `stat` over the last heartbeats of all rollout workers."""
    return int(sum(process.stats.get(stat, 0.0) for process in status.processes if process.role == "rollout"))


def _health(run: RunView) -> Text:
    """Return the health of the policy, and the figures that show it."""
    text = Text(overflow="ellipsis", no_wrap=True)
    if not run.steps:
        return text.append("policy: no step yet", style="dim")
    last = run.steps[-1]
    text.append("policy ", style="dim").append(f"{last.health.state}  ", style=STATE_STYLE[last.health.state])
    if last.health.state == "healthy":
        return text + _figures(
            last.metrics,
            ("effective_sample_size", "sample size", ".2f"),
            ("importance_ratio_deviation", "ratio - 1", ".3f"),
            ("grad_norm_ratio", "gradient / usual", ".1f"),
        )
    text.append(f"since step {last.health.since}: {', '.join(last.health.signs)}", style="yellow")
    return text


def _agents(status: Status) -> Text | None:
    """Return figures of the agents of all rollout workers; None if there are no agents."""
    found: Counter[str] = Counter()
    for process in status.processes:
        if process.role == "rollout":
            found.update({name: value for name, value in process.stats.items() if name.startswith("agent_")})
    if not found:
        return None
    episodes, seconds = found["agent_episodes_total"], found["agent_seconds_total"]
    text = Text(overflow="ellipsis", no_wrap=True)
    text.append("agents ", style="dim").append(f"{found['agent_episodes_running']:.0f}  episodes {episodes:,.0f}")
    if episodes and seconds:
        text.append(f"  calls {found['agent_calls_total'] / episodes:.1f}")
        text.append(f"  turns {found['agent_turns_total'] / episodes:.1f}")
        text.append(f"  conversations {found['agent_trajectories_total'] / episodes:.2f}")
        text.append(f"  policy {found['agent_generation_seconds_total'] / seconds:.0%}")
    for name in ("rewritten", "drifted", "retries"):
        if count := found[f"agent_{name}_total"]:
            text.append(f"  {name} {count:.0f}", style="yellow")
    if (trained := found["agent_tokens_trained_total"]) < (tokens := found["agent_tokens_total"]):
        text.append(f"  trained {trained / tokens:.0%}", style="yellow")
    return text


def _evaluation(status: EvaluationStatus) -> Text:
    """Return the last evaluation, and the one under way."""
    text = Text(overflow="ellipsis", no_wrap=True)
    text.append("held-out ", style="dim")
    if status.last is None:
        text.append("not evaluated yet")
    else:
        text.append(in_words(status.last).removeprefix("evaluation of "))
    if status.running is not None:
        text.append(f"  v{status.running.policy_version} is under way", style="yellow")
    return text


def _figures(metrics: Mapping[str, float], *wanted: tuple[str, str, str]) -> Text:
    text = Text(overflow="ellipsis", no_wrap=True)
    for metric, label, form in wanted:
        if metric in metrics:
            unit = " s" if metric.endswith("_seconds") else ""
            text.append(f"{label} ", style="dim")
            text.append(f"{metrics[metric]:{form}}{unit}  ")
    return text


def _processes(status: Status, rows: int) -> Panel:
    grid = Table.grid(expand=True, padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True, ratio=1, overflow="ellipsis")
    # Processes with a problem or a wait come first if there is not room for all.
    ranked = sorted(status.processes, key=lambda p: (p.state == "live", not p.waiting_for))
    shown = ranked if len(ranked) <= rows else ranked[: rows - 1]
    for process in sorted(shown, key=lambda p: (p.role, p.index)):
        grid.add_row(
            f"{process.role}/{process.index}",
            Text(process.state, style=STATE_STYLE[process.state]),
            _occupation(process, status.last_step),
        )
    if len(shown) < len(ranked):
        grid.add_row(f"and {len(ranked) - len(shown)} more", "", Text("live, waiting for nothing", style="dim"))
    if not ranked:
        grid.add_row(Text("none has registered yet", style="dim"))
    return Panel(grid, title="processes")


def _occupation(process: ProcessStatus, last: StepFigures | None) -> Text:
    if process.state in ("silent", "evicted"):
        return Text(f"silent for {process.silent_seconds:.0f} s", style="yellow")
    if process.waiting_for:
        return Text(f"waits for {process.waiting_for}", style="yellow")
    if process.role == "gserver":
        stats = process.stats
        text = Text(f"{stats.get('running', 0):.0f} running, {stats.get('queued', 0):.0f} queued", style="dim")
        difference = last.metrics.get(f"logprob_diff_mean/gserver_{process.index}") if last is not None else None
        return text if difference is None else text.append(f", logprob diff {difference:.1e}")
    return Text("at work", style="dim")


def _warnings(warnings: Sequence[str], findings: Sequence[Finding]) -> Panel:
    """Return the worst finding and the last warnings. Findings on the policy are left out: it has a line of its own."""
    worst = [str(finding) for finding in findings if finding.severity != "note" and finding.topic != "policy"][:1]
    said = [*worst, *list(warnings)[-2 + len(worst) :]]
    lines = [Text(line, style="yellow", no_wrap=True, overflow="ellipsis") for line in said]
    return Panel(Group(*lines) if lines else Text("none", style="dim"), title="last warnings")
