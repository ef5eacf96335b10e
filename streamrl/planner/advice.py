"""Recommend settings: simulate the present ones and alternatives, rank the results and give the reasons.

The best settings learn the most in a second: tokens that enter a loss, less what their age costs (`AGE_COST`). Among
all settings within `MARGIN` of the best, those with the freshest tokens are recommended, since that cost differs from
task to task. Another batch size and `drop` (which trains on shorter responses than the policy writes) are shown but
never recommended, unless they are set already.

A change is worth it if a run learns more in a second by `MARGIN`, or if it makes tokens fresher by `WORTH_VERSIONS`,
both for the policy of the calibration and for one that has learned (`LEARNED_SHARE`). Pure.
"""

from __future__ import annotations

import math
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from streamrl import config as configuration
from streamrl.config import Config
from streamrl.errors import ConfigError
from streamrl.launch.run_folders import runs_of
from streamrl.planner.calibration import (
    FIRST_STEPS,
    LEAST_STEPS,
    Calibration,
    check_plannable,
    count_lines,
    make_short_run,
    read_calibration,
    value_of,
)
from streamrl.planner.simulation import (
    GENERATING,
    NO_BATCH,
    NO_PLACE,
    NO_ROOM,
    ON_THE_WAY,
    TRAINING,
    Prediction,
    simulate,
)
from streamrl.records.metrics import METRICS_FILE

AGE_COST = 0.016
"""Share of the area under the reward of all policy versions that is lost with each version of the mean token age: least
squares over runs with a constant η of the study in docs/staleness.md (`age_cost` in `benchmarks/staleness.py`); single
tasks lose 0.013 to 0.020."""
MARGIN = 0.05
"""Share of the learning in a second that may be given up for fresher tokens."""
AGE_STEP = 0.5
"""Policy versions; mean ages that round to the same multiple of this count as equally fresh."""
WORTH_VERSIONS = 1.0
"""Least decrease of the mean token age, in versions, for a change by which a run does not learn more in a second by
`MARGIN`."""
LEARNED_SHARE = 1 / 3
"""Assumed share of the calibrated cost of a step's tokens once the policy has learned: siblings' common tokens are
computed once, and groups with equal scores of all responses are not trained on."""
MOST_MASKED = 0.1
"""Largest share of masked tokens in a recommendation."""
STEPS, FEWEST_STEPS = 40, 8
"""Training steps of a simulation, and their least number if a step has very many events."""
EVENTS = 400_000
"""Most events of a simulation; if the simulation of the present settings has more, later ones get fewer steps."""
ROUNDS = 4
"""Most rounds of improvement; each round tries one more change."""

ETA, OVER_AGE = "staleness.max_staleness", "staleness.over_age"
SLOTS, BATCH, PLACES = "gserver.max_running", "trainer.batch_groups", "rollout.max_concurrent_groups"
GSERVERS, RANKS = "gserver.count", "trainer.data_parallel"
GSERVER_THREADS, TRAINER_THREADS = "gserver.threads", "trainer.threads"
STALENESS_VALUES = (0, 1, 2, 4, 8, 16)

Settings = Mapping[str, int | str]
"""Key of the configuration → value."""


class Option(msgspec.Struct, frozen=True):
    """Settings and the result of their simulation."""

    settings: Settings
    """The settings that differ from the present ones; empty for the present ones."""
    prediction: Prediction

    @property
    def tokens(self) -> float:
        """Tokens trained on per second."""
        return self.prediction.tokens_trained_per_second

    @property
    def learning(self) -> float:
        """Area under the reward curve per second, in tokens of age 0 per second: what options are compared by."""
        return self.tokens * max(0.0, 1 - AGE_COST * self.prediction.mean_token_age)


class Plan(msgspec.Struct, frozen=True):
    """A recommendation with its reasons, and the alternatives that were simulated."""

    recommended: Option
    present: Option
    others: list[Option]
    """By `learning`, highest first."""
    reasons: list[str]
    """Reasons for the recommendation, as sentences."""
    change: list[str]
    """`key=value` words that make the present settings the recommended ones."""
    calibration: Calibration
    learned: Prediction
    """Result of the recommended settings for a policy that has learned."""


def plan_run(config: Config, *, run_dir: Path | None, console: Console) -> Plan:
    """Return a forecast for a run of `config` and a recommendation; `console` shows the progress.

    Costs are read from the run in `run_dir`. If it is None, they are read from a short run in a temporary folder.
    """
    check_plannable(config, calibrated=run_dir is not None)
    with console.status("") as status:

        def tell(what: str) -> None:
            status.update(what)

        if run_dir is not None:
            calibration = read_calibration(run_dir, planned=config)
        else:
            with tempfile.TemporaryDirectory(prefix="streamrl-plan-") as folder:
                calibration = read_calibration(make_short_run(config, folder=Path(folder), tell=tell))
            calibration = msgspec.structs.replace(calibration, notes=[*calibration.notes, *_earlier_runs(config)])
        return make_plan(config, calibration, tell=lambda what: tell(f"simulating {what}"))


def _earlier_runs(config: Config) -> list[str]:
    """Return a note on the configuration's newest run with enough steps to plan from."""
    for run in runs_of(config):
        if count_lines(run / METRICS_FILE) >= FIRST_STEPS + LEAST_STEPS:
            return [f"--from {run} plans from the costs of that run at once, without a short one"]
    return []


def make_plan(config: Config, calibration: Calibration, *, tell: Callable[[str], None] = lambda _: None) -> Plan:
    """Simulate `config` and its alternatives at the costs of `calibration`. `tell` gets the name of each."""
    player = _Player(config, calibration, tell=tell)
    present = player.play({})
    for changed in alternatives(config, calibration):
        player.play(changed)
    best = present
    for _ in range(ROUNDS):
        for changed in alternatives(player.config_of(best.settings), calibration):
            player.play({**best.settings, **changed})
        found = choose(present, player.options)
        if found.settings == best.settings:
            break
        best = found
    best = best if _is_worth_it(best, present, player) else present
    learned = player.play_learned(best.settings)
    reasons = [_standing(present), *_reasons(present, best, player), _outlook(learned)]
    others = [option for option in player.options if option.settings not in ({}, best.settings)]
    return Plan(
        recommended=best,
        present=present,
        others=sorted(others, key=lambda option: -option.learning),
        reasons=reasons,
        change=[f"{key}={value}" for key, value in best.settings.items()],
        calibration=calibration,
        learned=learned,
    )


def choose(present: Option, options: Sequence[Option]) -> Option:
    """Return the option to recommend."""
    allowed = [option for option in options if _may_be_recommended(option)] or [present]
    most = max(option.learning for option in allowed)
    near = [option for option in allowed if option.learning >= (1 - MARGIN) * most]
    return min(near, key=lambda o: (round(o.prediction.mean_token_age / AGE_STEP), len(o.settings), -o.learning))


def _is_worth_it(option: Option, present: Option, player: _Player) -> bool:
    def fresher(before: Prediction, after: Prediction) -> bool:
        return before.mean_token_age - after.mean_token_age >= WORTH_VERSIONS

    if option.learning > (1 + MARGIN) * present.learning:
        return True
    return fresher(present.prediction, option.prediction) and fresher(
        player.play_learned(present.settings), player.play_learned(option.settings)
    )


def _may_be_recommended(option: Option) -> bool:
    if not option.settings:
        return True
    changed = BATCH in option.settings or option.settings.get(OVER_AGE) == "drop"
    return not changed and option.prediction.masked_share <= MOST_MASKED


def alternatives(config: Config, calibration: Calibration) -> Iterator[Settings]:
    """Yield single changes of `config`, and changes of how the two pools divide the machine."""
    costs = calibration.costs
    yield from ({ETA: value} for value in STALENESS_VALUES if value != config.staleness.max_staleness)
    if config.staleness.max_staleness:
        yield from ({OVER_AGE: policy} for policy in ("mask", "wait", "drop") if policy != config.staleness.over_age)
    slots, batch = config.gserver.max_running, config.trainer.batch_groups
    yield from ({SLOTS: value} for value in (slots // 2, slots * 2, slots * 4) if value)
    yield from ({BATCH: value} for value in (batch // 2, batch * 2) if value)
    yield {PLACES: config.rollout.max_concurrent_groups * 2}
    threads = range(1, math.ceil(costs.cores or 1) + 1)
    if costs.trainer_on_cores:
        yield from ({TRAINER_THREADS: value} for value in threads if value != config.trainer.threads)
    if costs.gservers_on_cores:
        yield from ({GSERVER_THREADS: value} for value in threads if value != config.gserver.threads)
        if costs.cores is not None and config.gserver.count < costs.cores:
            yield {GSERVERS: config.gserver.count + 1}
    if not (costs.trainer_on_cores or costs.gservers_on_cores or not config.gserver.traits.computes):
        of_a_gserver = config.gserver.ranks
        of_a_rank = config.trainer.workers // config.trainer.data_parallel
        devices = config.gserver.count * of_a_gserver + config.trainer.workers
        for step in (-4, -2, -1, 1, 2, 4):
            gservers = config.gserver.count + step
            ranks, left = divmod(devices - gservers * of_a_gserver, of_a_rank)
            if gservers > 0 and ranks > 0 and not left:
                yield {GSERVERS: gservers, RANKS: ranks}


def with_settings(config: Config, settings: Mapping[str, object]) -> Config:
    """Return `config` with `settings` in place of its own; raises `ConfigError` if they are not allowed."""
    tree: dict[str, Any] = tomllib.loads(configuration.to_toml(config))
    for key, value in settings.items():
        *sections, name = key.split(".")
        table = tree
        for section in sections:
            table = table.setdefault(section, {})
        table[name] = value
    return configuration.from_dict(tree, where="an alternative")


class _Player:
    """Simulates each choice of settings once."""

    def __init__(self, config: Config, calibration: Calibration, *, tell: Callable[[str], None]) -> None:
        self._config = config
        self._calibration = calibration
        self._tell = tell
        self._steps = STEPS
        self._played: dict[tuple[tuple[str, int | str], ...], Option | None] = {}

    @property
    def options(self) -> list[Option]:
        return [option for option in self._played.values() if option is not None]

    def config_of(self, settings: Mapping[str, object]) -> Config:
        return with_settings(self._config, settings)

    def play(self, settings: Settings) -> Option:
        """Return the option for `settings`, or the present one if they are not allowed."""
        settings = {key: value for key, value in sorted(settings.items()) if value != value_of(self._config, key)}
        key = tuple(settings.items())
        if key not in self._played:
            self._tell(", ".join(f"{name}={value}" for name, value in key) or "the present settings")
            self._played[key] = self._simulate(settings)
        return self._played[key] or self._present

    def play_learned(self, settings: Settings) -> Prediction:
        """Simulate a run with `settings` whose policy has learned."""
        costs = self._calibration.costs
        costs = msgspec.structs.replace(costs, train_token_seconds=LEARNED_SHARE * costs.train_token_seconds)
        return simulate(self.config_of(settings), costs, steps=self._steps)

    @property
    def _present(self) -> Option:
        found = self._played[()]
        assert found is not None, "the present settings were checked when they were read"
        return found

    def _simulate(self, settings: Settings) -> Option | None:
        try:
            prediction = simulate(self.config_of(settings), self._calibration.costs, steps=self._steps)
        except ConfigError:
            if not settings:
                raise
            return None
        if not settings and prediction.events > EVENTS:
            self._steps = max(FEWEST_STEPS, round(STEPS * EVENTS / prediction.events))
        return Option(settings, prediction)


# --- output --------------------------------------------------------------------------------------


def _standing(present: Option) -> str:
    """Return a sentence on the bottleneck of the present settings."""
    found = present.prediction
    trains, waits = found.trainer.get(TRAINING, 0.0), found.trainer.get(NO_BATCH, 0.0)
    generates = found.gservers.get(GENERATING, 0.0)
    idle = {state: found.gservers.get(state, 0.0) for state in (NO_ROOM, NO_PLACE, ON_THE_WAY)}
    most = max(idle, key=lambda state: idle[state])
    told = f"At present the trainer trains {trains:.0%} of the time and waits for groups {waits:.0%}; a gserver "
    told += f"generates {generates:.0%} of the time"
    if idle[most] >= 0.01:
        told += f" and {most} {idle[most]:.0%}"
    busy = found.cores_busy
    if busy is not None and busy > 0.9:
        return f"{told}. The cores are busy {busy:.0%} of the time: they are what limits it."
    if waits < 0.05:
        return f"{told}. The trainer is what limits it."
    if idle[NO_ROOM] > idle[NO_PLACE] and idle[NO_ROOM] > 0.05:
        return f"{told}. The two wait for each other, as far as max_staleness makes them."
    return f"{told}. Generation is what limits it."


def _reasons(present: Option, best: Option, player: _Player) -> Iterator[str]:
    """Yield the reasons for the recommendation."""
    if not best.settings:
        yield (
            f"No change is worth it: with none of {len(player.options) - 1} that were tried would the run learn "
            f"{MARGIN:.0%} more in a second, or train on tokens that stay fresher by {WORTH_VERSIONS:g} version as the "
            "policy learns. The present settings are recommended."
        )
        return
    gain = best.tokens / max(present.tokens, 1e-9)
    age, before = best.prediction.mean_token_age, present.prediction.mean_token_age
    if best.learning > (1 + MARGIN) * present.learning:
        yield (
            f"The recommended settings train on {gain:.2f} times as many tokens in a second, of a mean age of "
            f"{age:.1f} versions (now {before:.1f})."
        )
    else:
        yield (
            f"The recommended settings train on fresher tokens, of a mean age of {age:.1f} versions (now "
            f"{before:.1f}), and on {gain:.2f} times as many in a second."
        )
    for key, value in best.settings.items():
        without = player.play({name: other for name, other in best.settings.items() if name != key})
        share = without.tokens / max(best.tokens, 1e-9)
        yield (
            f"{key}={value}: without it {share:.2f} times as many tokens in a second, at a mean age of "
            f"{without.prediction.mean_token_age:.1f}."
        )


def _outlook(learned: Prediction) -> str:
    """Return how the forecast changes as the policy learns, which no calibration shows."""
    trains, waits = learned.trainer.get(TRAINING, 0.0), learned.trainer.get(NO_BATCH, 0.0)
    return (
        "This is a forecast for the policy of the calibration. As a policy learns, training steps have fewer tokens to "
        "compute (siblings agree, or all score the same), soonest on small tasks. If a third is left, the trainer "
        f"trains {trains:.0%} of the time and waits for groups {waits:.0%}, and the mean age is "
        f"{learned.mean_token_age:.1f} versions."
    )


def as_json(plan: Plan) -> str:
    """Return the plan as JSON, without the lengths of single responses."""
    tree = msgspec.to_builtins(plan, str_keys=True)
    del tree["calibration"]["costs"]["response_lengths"]
    return msgspec.json.format(msgspec.json.encode(tree), indent=2).decode()


def shown(plan: Plan) -> RenderableType:
    """Return the plan for people: the recommended settings, the present ones, and the effect of single changes."""
    calibration = plan.calibration
    table = Table(box=SIMPLE_HEAD, padding=0, pad_edge=False, caption_justify="left")
    table.add_column("settings", overflow="fold", min_width=len(ETA) + 3)
    for heading in ("learns", "steps/h", "trained", "age", "old", "trains", "makes"):
        table.add_column(heading, justify="right", no_wrap=True)

    def row(option: Option, label: str, *, style: str = "", last: bool = False) -> None:
        found = option.prediction
        table.add_row(
            label,
            f"{option.learning / max(plan.present.learning, 1e-9):.2f}",
            f"{found.steps_per_hour:,.0f}",
            f"{found.tokens_trained_per_second:,.0f}",
            f"{found.mean_token_age:.1f}≤{max(found.token_ages, default=0)}",
            f"{found.masked_share + found.dropped_share:.0%}",
            f"{found.trainer.get(TRAINING, 0.0):.0%}",
            f"{found.gservers.get(GENERATING, 0.0):.0%}",
            style=style,
            end_section=last,
        )

    def words(option: Option) -> str:
        return "\n".join(f"{key}={value}" for key, value in option.settings.items())

    if plan.recommended.settings:
        row(plan.recommended, f"recommended:\n{words(plan.recommended)}", style="bold green")
        row(plan.present, "present", last=True)
    else:
        row(plan.present, "present, recommended", style="bold green", last=True)
    for option in plan.others:
        if len(option.settings) == 1 or option.settings.keys() == {GSERVERS, RANKS}:
            row(option, words(option))
    table.caption = (
        "learns: area under the reward curve in a second, relative to the present settings (each version of age costs "
        f"{AGE_COST:.1%}); trained: tokens in a second; age: of the tokens trained on, in policy versions, on average "
        "and at most; old: share of tokens masked or dropped; trains, makes: share of the time in which trainer and "
        "gservers do"
    )
    ages = plan.recommended.prediction.token_ages
    lines = [
        f"calibrated from {calibration.of}: {calibration.steps} steps in {calibration.seconds:.0f} s",
        *(f"note: {note}" for note in calibration.notes),
    ]
    parts: list[RenderableType] = [Text(line, style="dim") for line in lines]
    parts += [table, *(Text(reason) for reason in plan.reasons)]
    for title, states in (
        ("the trainer", plan.recommended.prediction.trainer),
        ("a gserver", plan.recommended.prediction.gservers),
        ("tokens trained on, by age", {f"{age}": share for age, share in ages.items()}),
    ):
        told = ", ".join(f"{state} {share:.0%}" for state, share in states.items() if share >= 0.005)
        parts.append(Text.assemble((f"{title}: ", "bold"), told))
    if plan.change:
        parts.append(Text.assemble(("to change: ", "bold"), " ".join(plan.change)))
    return Group(*parts)
