"""The plan of a replay: its calls, the settings that may be changed, and its outcome. Pure.

A replay takes the division of work among ranks and the order of groups from the record, because sums are rounded in the
order of their terms. If changed settings need another order (other minibatches, other data-parallel ranks), the batches
are divided again by the run's own rules.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from numpy.typing import NDArray

from streamrl.config import Config
from streamrl.errors import ConfigError, DataError
from streamrl.trainer.calls import Hook, Inference, MinibatchShare, ParamRealloc, TrainReply, TrainStep
from streamrl.trainer.graph import MFC, Graph
from streamrl.trainer.layout import layout_of
from streamrl.trainer.master.batches import BatchFormer
from streamrl.trainer.master.buffer import Shares
from streamrl.trainer.master.executor import hooks_of
from streamrl.trainer.redistributor import deal
from streamrl.trainer.replay.recording import BatchCall, PartOnDisk, RecordedStep, Recording
from streamrl.types import SampleMeta, TrajectoryGroup

CHANGEABLE = (
    "algorithm.",
    "critic.lr",
    "critic.value_clip",
    "critic.optimizer.",
    "staleness.max_staleness",
    "trainer.lr",
    "trainer.optimizer.",
    "trainer.dtype",
    "trainer.threads",
    "trainer.data_parallel",
    "trainer.context_parallel",
    "trainer.shard",
    "trainer.offload",
    "trainer.max_tokens_per_microbatch",
    "trainer.share_prefix",
    "trainer.replay_routing",
    "trainer.gradient_checkpointing",
    "run.device",
)
"""Prefixes of settings that a replay may change: recorded batches can be trained on with other values, too."""
OF_THE_REPLAY = (
    "run.dir",
    "run.name",
    "run.resume_from",
    "run.record",
    "metrics.",
    "algorithm.on_collapse",
    "trainer.save_at_end",
    "limits.",
    "restarts.",
)
"""Prefixes of settings that may differ without an effect on any number: the first weights are compared with the
recorded ones."""
DECIDING = (
    "run.seed",
    "run.device",
    "model.",
    "trainer.",
    "critic.",
    "algorithm.",
    "staleness.max_staleness",
    "rollout.sampling.temperature",
    "rollout.sampling.max_new_tokens",
)
"""Prefixes of settings that affect the numbers of a step with given groups, except for those in `NOT_DECIDING`."""
NOT_DECIDING = (*OF_THE_REPLAY, "trainer.save_", "trainer.keep_", "trainer.wait_warning", "trainer.logprob_diff")


class Difference(msgspec.Struct, frozen=True):
    """The first figure that differs from its recorded value."""

    step: int
    rank: int
    figure: str
    recorded: str
    """The recorded value with all its digits."""
    replayed: str


OUTCOME = "replay.json"


class ReplayOutcome(msgspec.Struct, frozen=True):
    """The outcome of a replay, written to `OUTCOME` in its folder."""

    run: str
    """Folder of the recorded run."""
    first_step: int
    last_step: int
    changed: dict[str, tuple[Any, Any]]
    """Setting → recorded value, replayed value. Figures are compared only if this is empty."""
    difference: Difference | None
    """None if every figure of every step equals the recorded one bit for bit, or if settings were changed."""
    environment: dict[str, tuple[str | None, str | None]]
    """Facts that affect rounding and differ from the record: name → recorded value, value now."""


class Stretch(NamedTuple):
    """Consecutive steps of a record that can be replayed together."""

    first: int
    last: int
    ends_because: str
    """Why later steps cannot be replayed; empty if the record ends there."""


def stretch(recording: Recording) -> Stretch:
    """Return the steps from the first recorded one on; raises `DataError` if there is none."""
    part = recording.parts[0]
    begins_at, because = part.begins_at, part.stopped
    for following in recording.parts[1:]:
        if following.begins_at != part.last:
            lost = f"steps {part.last + 1} to {following.begins_at} were not recorded"
            because = f"{lost} ({because})" if because else lost
            break
        if changed := sorted(_deciding(part).keys() & differing(_deciding(part), _deciding(following)).keys()):
            because = f"from there on the run had another {', '.join(changed)}"
            break
        part, because = following, following.stopped
    if part.last == begins_at:
        raise DataError(f"{recording.run_dir}: the record has no whole step" + (f" ({because})" if because else ""))
    return Stretch(begins_at + 1, part.last, because)


def changes(recorded: Config, wanted: Config) -> dict[str, tuple[Any, Any]]:
    """Return setting → recorded value, wanted value; raises `ConfigError` for a setting that a replay cannot change."""
    found = differing(dotted(msgspec.to_builtins(recorded)), dotted(msgspec.to_builtins(wanted)))
    found = {key: values for key, values in found.items() if not key.startswith(OF_THE_REPLAY)}
    for key, (before, now) in found.items():
        if not key.startswith(CHANGEABLE):
            what = (
                "it determines the recorded data, or the ranks that compute" if key.startswith(DECIDING) else _NO_PART
            )
            raise ConfigError(
                f"{key} = {now!r}: recorded with {before!r}, and a replay cannot change it ({what}); it can change: "
                + ", ".join(name.rstrip(".") for name in CHANGEABLE)
            )
    return found


_NO_PART = "the record has the finished groups, so their origin has no effect"


def dotted(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of `tree` by their dotted names."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= dotted(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def _deciding(part: PartOnDisk) -> dict[str, Any]:
    config = part.facts[0].settings()
    found = {
        key: value
        for key, value in dotted(msgspec.to_builtins(config)).items()
        if key.startswith(DECIDING) and not key.startswith(NOT_DECIDING)
    }
    schedules = {config.trainer.optimizer.schedule, config.critic_optimizer.schedule}
    return found if schedules == {"constant"} else found | {"run.total_train_steps": config.planned_steps()}


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return key → value before, value now, for values that differ; a missing value is None."""
    keys = dict.fromkeys([*before, *now])
    return {key: (before.get(key), now.get(key)) for key in keys if before.get(key) != now.get(key)}


class ReplayBatch:
    """One recorded training batch of all ranks."""

    def __init__(self, steps: Sequence[RecordedStep]) -> None:
        """`steps`: the recorded step of each data-parallel head, by rank."""
        self.steps = steps
        self.step = steps[0].step
        self._groups: dict[int, TrajectoryGroup] = {}
        self._given: dict[int, dict[str, NDArray[Any]]] = {}
        metas = {}
        for data, step in enumerate(steps):
            for place, group in enumerate(step.groups):
                self._groups[group.seq] = group
                self._given[group.seq] = {key: arrays[place] for key, arrays in step.given.items()}
                metas[group.seq] = SampleMeta.of(group, head=data)
        self.metas = [metas[seq] for seq in sorted(metas)]
        """Metadata of the groups in the batch's order, the order of admission; `head` is the data-parallel rank that
        trained on the group."""

    @property
    def policy_version(self) -> int:
        """Version of the weights before the step."""
        return self.step - 1

    @property
    def keys(self) -> frozenset[str]:
        """Keys that were recorded for every group, in addition to those that rollout workers send."""
        return frozenset.intersection(*(frozenset(given) for given in self._given.values()))

    def group(self, seq: int) -> TrajectoryGroup:
        return self._groups[seq]

    def given(self, seq: int) -> Mapping[str, NDArray[Any]]:
        """Return key → array computed for the group before the step."""
        return self._given[seq]


def computed(graph: Graph, given: Iterable[str]) -> list[MFC]:
    """Return the calls that a replay makes for each batch, in order: those whose outputs are not in `given`.

    A user's function is never called again. The record may lack its outputs only if no remaining call reads them: each
    rank records the arrays that its groups were trained on, but not the arrays from which a function computed these.
    Raises `ConfigError` if a remaining call reads such missing outputs.
    """
    known = frozenset(given) | {"rewards"}  # rewards are part of the groups
    found = [*graph.reading("arrivals"), *graph.reading("batch")]  # batches need both
    wanted: list[MFC] = []
    for mfc in reversed(found):
        lacking = mfc.outputs - known
        if mfc.outputs and not lacking:
            continue
        if mfc.interface == "function":
            if any(lacking & reader.inputs for reader in wanted):
                raise ConfigError(f"{mfc.name} calls {mfc.function}, and the record lacks its result")
            continue
        wanted.append(mfc)
    return wanted[::-1]


class ReplayPlan:
    """The calls of one rank of a replay, batch after batch."""

    def __init__(
        self, config: Config, mfcs: Sequence[MFC], *, rank: int, policy_version: int, changed: Iterable[str]
    ) -> None:
        """`policy_version`: version of the first weights. `changed`: names of settings that differ from the record."""
        self._mfcs = mfcs
        self._former = BatchFormer(config)
        self._layouts = {mfc.role: layout_of(config.trainer, mfc.role) for mfc in mfcs}
        self._rank = rank
        self._roles = {mfc.role for mfc in mfcs} | {"actor"}
        self._hooks = {mfc.name: hooks_of(mfc, policy_version=policy_version) for mfc in mfcs}
        self._anew = not {"trainer.data_parallel", "algorithm.minibatches"}.isdisjoint(changed)

    def calls(self, batch: ReplayBatch) -> list[BatchCall]:
        """Return this rank's calls for `batch`, in order."""
        found: list[BatchCall] = []
        for mfc in self._mfcs:
            if mfc.interface == "train_step":
                found.append(self._train(mfc, batch))
            else:
                found += self._inferences(mfc, batch)
        return found

    def _inferences(self, mfc: MFC, batch: ReplayBatch) -> list[BatchCall]:
        recorded = [
            [c.seqs for c in step.calls if c.mfc == mfc.name and isinstance(c, Inference)] for step in batch.steps
        ]
        shares: list[Shares] = [list(each) for each in zip(*recorded, strict=True)]
        if self._anew or not shares:
            size = mfc.groups or len(batch.metas)
            starts = range(0, len(batch.metas), size)
            shares = [self._deal(batch.metas[start : start + size], mfc.role) for start in starts]
        version, data = batch.policy_version, self._data_rank(mfc.role)
        # hooks of each call: a hook that is due once for a version runs with the first call only
        return [Inference(mfc.name, share[data], *self._due(mfc, before=version, after=version)) for share in shares]

    def _train(self, mfc: MFC, batch: ReplayBatch) -> TrainStep:
        recorded = [
            call for step in batch.steps for call in step.calls if call.mfc == mfc.name and isinstance(call, TrainStep)
        ]
        as_recorded = bool(recorded) and not self._anew
        if as_recorded:
            minibatches = zip(*(call.minibatches for call in recorded), strict=True)
            shares: list[Shares] = [[part.seqs for part in minibatch] for minibatch in minibatches]
        else:
            shares = [self._deal(part, mfc.role) for part in self._former.minibatches(batch.metas)]
        version = batch.policy_version
        metas = {meta.seq: meta for meta in batch.metas}
        data = self._data_rank(mfc.role)
        minibatches_of_rank = []
        for share in shares:
            part = [metas[seq] for seqs in share for seq in seqs]
            tokens = sum(self._former.tokens_in_loss(meta, policy_version=version) for meta in part)
            minibatches_of_rank.append(MinibatchShare(share[data], tokens, sum(meta.episode_count for meta in part)))
        pre, post = self._due(mfc, before=version, after=version + 1)
        template = recorded[0] if recorded else TrainStep(mfc.name, version, 0, [])
        return msgspec.structs.replace(
            template,
            oldest_version=version - self._former.max_staleness,
            minibatches=minibatches_of_rank,
            # the rank computes its group, even if the group has no gradient
            compared=template.compared if as_recorded else None,
            pre_hooks=pre,
            post_hooks=post,
        )

    def _deal(self, metas: Sequence[SampleMeta], role: str) -> Shares:
        ranks = self._layouts[role].data
        if ranks == 1:
            return [[meta.seq for meta in metas]]
        home = {meta.seq: meta.head for meta in metas}
        return deal({meta.seq: meta.tokens for meta in metas}, ranks=ranks, home=home)

    def _data_rank(self, role: str) -> int:
        return self._layouts[role].coordinates(self._rank).data

    def _due(self, mfc: MFC, *, before: int, after: int) -> tuple[list[Hook], list[Hook]]:
        """Return the hooks that are due, without those for models that the replay does not use."""
        pre, post = self._hooks[mfc.name]
        return self._here(pre.due(before)), self._here(post.due(after))

    def _here(self, hooks: Iterable[Hook]) -> list[Hook]:
        def roles(hook: Hook) -> set[str]:
            if isinstance(hook, ParamRealloc):
                return {hook.source, hook.target}
            return {hook.role} if hasattr(hook, "role") else set()

        return [hook for hook in hooks if roles(hook) <= self._roles]


def difference_of(recorded: TrainReply, replayed: TrainReply) -> tuple[str, float, float] | None:
    """Return the first recorded figure that differs in any bit, checking loss and gradient norm first: its name and
    both values."""
    before, now = _figures(recorded), _figures(replayed)
    for name in sorted(before, key=lambda name: (not name.endswith("loss"), not name.endswith("grad_norm"), name)):
        if name not in now or before[name].hex() != now[name].hex():
            return name, before[name], now.get(name, math.nan)
    return None


def _figures(answer: TrainReply) -> dict[str, float]:
    largest = {name if name not in answer.sums else f"largest {name}": value for name, value in answer.maxima.items()}
    return {name: float(value) for name, value in (answer.sums | largest).items()}


def seqs_of(call: BatchCall) -> list[int]:
    """Return the sequence numbers of the groups of `call`."""
    if isinstance(call, TrainStep):
        return [seq for minibatch in call.minibatches for seq in minibatch.seqs]
    return call.seqs
