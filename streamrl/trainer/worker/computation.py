"""A model worker's computation: calls on roles with their hooks, and checkpoints. All run in the compute thread."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from streamrl.config import Config
from streamrl.config.trainer import role_config
from streamrl.device import rounding
from streamrl.errors import ConfigError, DeadlineExceeded, TrainingError
from streamrl.hooks import load_object
from streamrl.models import special_token_ids
from streamrl.records import progress, rollouts
from streamrl.trainer.backends.base import ParallelModel
from streamrl.trainer.calls import (
    CallDone,
    DataTransfer,
    FinishSave,
    Function,
    Hook,
    Inference,
    Offload,
    ParamRealloc,
    Save,
    SaveReply,
    TrainReply,
    TrainStep,
)
from streamrl.trainer.graph import MFC, Graph
from streamrl.trainer.layout import ROLES
from streamrl.trainer.replay.recording import FORMAT, RankRecording, Recorder, RecordWriter, code
from streamrl.trainer.roles.actor import Actor
from streamrl.trainer.roles.advantages import Credit
from streamrl.trainer.roles.critic import Critic
from streamrl.trainer.roles.items import Minibatch, Outputs, StepStatistics, TrainItem
from streamrl.trainer.worker.assembly import Assembly, fingerprints, give_weights
from streamrl.trainer.worker.checkpoint import CheckpointWriter, Together, roles_to_save, take_snapshot
from streamrl.trainer.worker.data import WorkerData
from streamrl.trainer.worker.keeper import RolloutKeeper, Sample, TokenizerTexts
from streamrl.types import TrajectoryGroup

ACTOR = "actor"
"""The role whose weights are published."""
Computed = Inference | Function | TrainStep | Save | FinishSave


class Computation:
    """Carries out calls on the models of one worker."""

    def __init__(
        self,
        config: Config,
        *,
        rank: int,
        graph: Graph,
        assembly: Assembly,
        data: WorkerData,
        weights_free: threading.Event,
    ) -> None:
        """`weights_free` is set while no publication reads the actor's weights. Collective."""
        self._config = config
        self._rank = rank
        self._mfcs = {mfc.name: mfc for mfc in graph.mfcs}
        self._assembly = assembly
        self._data = data
        self._weights_free = weights_free
        together = Together(rank, config.trainer.workers, seconds=config.limits.call_seconds)
        self._writer = CheckpointWriter(
            together,
            keep=config.trainer.keep_checkpoints,
            spare=config.run.resume_from,
            run_dir=config.run_dir,
            records_to_disk=self._records_to_disk,
        )
        self._away: set[str] = set()
        self._moving = threading.Lock()
        """Held while a model is moved to the CPU or back; both the compute thread and the publication's thread do
        this."""
        self._blocked = 0.0
        self._recorder = self._begin_record(graph) if config.run.record else None
        self._keeper = self._begin_keeping() if config.metrics.rollouts_per_step and self._is_head(ACTOR) else None

    def close(self) -> None:
        """Wait until the record and the samples in progress are written, up to their time limits."""
        if self._recorder is not None:
            self._recorder.writer.close()
        if self._keeper is not None:
            self._keeper.close()

    def stats(self) -> dict[str, float]:
        """Return counters, for people."""
        return self._keeper.stats() if self._keeper is not None else {}

    def describe(self) -> dict[str, str]:
        """Return the backend, layout and size of the model of each role, in words."""
        found: dict[str, str] = {}
        for name in (role for role in ROLES if role in self._assembly.roles):
            numbers = sum(math.prod(shape) for _, shape in self.model(name).weight_specs())
            backend = role_config(self._config.trainer, name).backend
            found[name] = f"{backend}, {self._assembly.layout(name)}, {numbers / 1e6:.1f} million parameters"
        return found

    def model(self, role: str) -> ParallelModel:
        """Return the model of `role`; raises `TrainingError` if there is none."""
        found = self._assembly.roles.get(role)
        if found is None:
            raise TrainingError(f"this run has no role {role!r}; it has {', '.join(self._assembly.roles)}")
        return found.model

    def carry_out(self, call: Computed) -> msgspec.Struct:
        """Carry out the hooks before a call, the call, and the hooks after it; return the call's result."""
        if isinstance(call, Save):
            return self._save(call)
        if isinstance(call, FinishSave):
            return SaveReply(self._writer.finish(limit=self._config.limits.call_seconds))
        for hook in call.pre_hooks:
            self._run_hook(hook)
        match call:
            case Inference():
                result: msgspec.Struct = self._infer(call)
            case Function():
                result = self._call_function(call)
            case TrainStep():
                result = self._train(call)
        for hook in call.post_hooks:
            self._run_hook(hook)
        if self._recorder is not None:
            self._recorder.note(call, result)
        return result

    def _begin_record(self, graph: Graph) -> Recorder | None:
        """Return the recorder of this worker's batches; None unless it holds data. Collective."""
        config, begun = self._config, progress.of_run(self._config)
        weights = fingerprints(self._assembly)
        if not self._is_head(ACTOR):
            return None
        part = RankRecording(
            format=FORMAT,
            begins_at=begun.policy_version if begun is not None else 0,
            rank=self._rank,
            config=msgspec.to_builtins(config),
            weights=weights,
            environment=rounding(self._assembly.device) | code(),
        )
        writer = RecordWriter(
            config.run_dir,
            part,
            warn_seconds=config.limits.warning_seconds,
            limit_seconds=config.limits.call_seconds,
        )
        return Recorder(graph, self._data, writer, rank=self._rank)

    def _records_to_disk(self) -> None:
        """Bring records to the disk, in the thread that writes checkpoints. Worker 0 also does so for the master's
        files, since it normally runs on the same machine; the master then waits for no disk."""
        if self._rank == 0:
            progress.figures_to_disk(self._config.run_dir)
        if self._recorder is not None:
            self._recorder.writer.to_disk()
        if self._keeper is not None:
            self._keeper.write()

    def _begin_keeping(self) -> RolloutKeeper:
        config, begun = self._config, progress.of_run(self._config)
        heads = len(self._assembly.layout(ACTOR).heads)
        return RolloutKeeper(
            config.run_dir / rollouts.FOLDER / f"rank-{self._rank}",
            most_bytes=int(config.metrics.rollouts_mb * 2**20 / heads),
            policy_version=begun.policy_version if begun is not None else 0,
            algorithm=config.algorithm,
            texts=TokenizerTexts(self._assembly.model_dir),
            special=special_token_ids(self._assembly.model_dir, stop_token_ids=config.stop_token_ids),
        )

    def _keep(
        self,
        call: TrainStep,
        items: Mapping[int, TrainItem],
        credits: Mapping[int, Credit],
        outputs: Mapping[int, Outputs],
    ) -> None:
        """Queue samples of a step for writing; `items`, `credits` and `outputs` by sequence number."""
        if self._keeper is not None:
            now = time.time()
            self._keeper.keep(
                [
                    Sample(call.policy_version + 1, now, items[seq], credits[seq].advantages.numpy(), outputs.get(seq))
                    for seq in call.kept
                ]
            )

    def _infer(self, call: Inference) -> CallDone:
        began = time.monotonic()
        mfc = self._mfcs[call.mfc]
        groups = [self._data.group(seq) for seq in call.seqs]
        self.bring_back(mfc.role)
        arrays = self._assembly.roles[mfc.role].inference(groups)
        (key,) = mfc.outputs
        return self._computed(call, began, {key: arrays} if arrays is not None and self._is_head(mfc.role) else {})

    def _call_function(self, call: Function) -> CallDone:
        began = time.monotonic()
        mfc = self._mfcs[call.mfc]
        if not self._is_head(mfc.role):
            return CallDone(compute_seconds=0.0)
        groups = [self._data.group(seq) for seq in call.seqs]
        inputs = {key: [self._data.get(seq, key) for seq in call.seqs] for key in sorted(mfc.inputs)}
        return self._computed(call, began, call_users_function(mfc, groups, inputs))

    def _computed(
        self, call: Inference | Function, began: float, found: Mapping[str, Sequence[NDArray[np.float32]]]
    ) -> CallDone:
        """Store the arrays that `call` computed, by key; return its result, with the rewards among them."""
        for key, arrays in found.items():
            for seq, array in zip(call.seqs, arrays, strict=True):
                self._data.put(seq, key, array)
        rewards = {seq: array.tolist() for seq, array in zip(call.seqs, found.get("rewards", []), strict=False)}
        return CallDone(compute_seconds=time.monotonic() - began, rewards=rewards)

    def _train(self, call: TrainStep) -> TrainReply:
        began = time.monotonic()
        mfc = self._mfcs[call.mfc]
        role = self._assembly.roles[mfc.role]
        assert isinstance(role, Actor | Critic), "as the graph has checked"
        self.bring_back(mfc.role)
        self._seed(mfc.role, call.policy_version)
        self._blocked = 0.0
        found = StepStatistics()
        batch = [seq for minibatch in call.minibatches for seq in minibatch.seqs]
        items = {seq: self._item(seq, call, mfc.inputs, updated=False) for seq in batch}
        credit = role.begin_step(
            list(items.values()), policy_version=call.policy_version, given="advantages" in mfc.inputs
        )
        credits = dict(zip(batch, credit, strict=True))
        for number, minibatch in enumerate(call.minibatches * self._config.algorithm.epochs):
            first_epoch = number < len(call.minibatches)
            role.train_step(
                [self._item(seq, call, mfc.inputs, updated=True) if number else items[seq] for seq in minibatch.seqs],
                [credits[seq] for seq in minibatch.seqs],
                Minibatch(
                    loss_tokens=minibatch.loss_tokens,
                    episodes=minibatch.episodes,
                    compared=call.compared if number == 0 else None,  # later the weights have changed
                    lr_scale=call.lr_scale,
                    kept=frozenset(call.kept).intersection(minibatch.seqs) if first_epoch else frozenset(),
                ),
                found,
                before_update=self._wait_for_publication if mfc.role == ACTOR else lambda: None,
            )
        if isinstance(role, Actor):
            role.end_step(found.sums)
            self._keep(call, items, credits, found.outputs)
        told = self._is_head(mfc.role)
        return TrainReply(
            compute_seconds=time.monotonic() - began - self._blocked,
            blocked_seconds=self._blocked,
            sums=found.sums if told else {},
            maxima=found.maxima,
            token_ages=_token_ages(items.values()) if told and isinstance(role, Actor) else {},
            update_seconds=found.update_seconds,
            compared=found.compared,
            updates=len(call.minibatches) * self._config.algorithm.epochs,
        )

    def _seed(self, role: str, policy_version: int) -> None:
        """Seed the random numbers of a step (dropout) from the run's seed and the version, so no generator state has to
        be saved."""
        data = self._assembly.layout(role).coordinates(self._rank).data
        torch.manual_seed(((self._config.run.seed << 40) + (policy_version << 16) + data) % 2**63)

    def _wait_for_publication(self) -> None:
        """Wait until no publication reads the actor's weights: before they change, or are gathered for another
        purpose."""
        started = time.monotonic()
        limit = self._config.limits.call_seconds
        if not self._weights_free.wait(limit):
            raise DeadlineExceeded(f"the publication of the last version took more than {limit:.0f} s")
        self._blocked += time.monotonic() - started

    def _item(self, seq: int, call: TrainStep, inputs: frozenset[str], *, updated: bool) -> TrainItem:
        """Return the item of a group, with only those of `inputs` that the graph gives the call: other arrays are here
        by chance, and not on every rank. `updated`: the policy has changed since the start of the step."""

        def given(key: str) -> NDArray[Any] | None:
            return self._data.optional(seq, key) if key in inputs else None

        group = self._data.group(seq)
        versions = group.packed_policy_versions
        proximal = given("proximal_logprobs")
        return TrainItem(
            group=group,
            age=call.policy_version - versions,
            trainable=group.packed_loss_mask & (versions >= call.oldest_version),
            comparable=_comparable(group, call.policy_version) & (proximal is not None or not updated),
            proximal_logprobs=proximal,
            ref_logprobs=given("ref_logprobs"),
            values=given("values"),
            advantages=given("advantages"),
        )

    def _run_hook(self, hook: Hook) -> None:
        match hook:
            case DataTransfer(plan):
                self._data.transfer(plan)
            case Offload(role):
                self._offload(role)
            case ParamRealloc(source, target, _, share):
                self._wait_for_publication()
                world = self._config.trainer.workers
                with self._here(source, target):
                    give_weights(self.model(source), self.model(target), share=share, world=world)

    def bring_back(self, role: str) -> None:
        """Move the model of `role` to its device if it is on the CPU. From any thread."""
        with self._moving:
            if role in self._away:
                self.model(role).onload()
                self._away.discard(role)

    def _offload(self, role: str) -> None:
        model = self.model(role)
        while True:
            if role == ACTOR:
                self._wait_for_publication()
            with self._moving:
                # a publication that began in the meantime has brought the weights back, or will
                if role != ACTOR or self._weights_free.is_set():
                    model.offload()
                    self._away.add(role)
                    return

    @contextmanager
    def _here(self, *roles: str) -> Iterator[None]:
        """Keep the models of `roles` on their devices within the context; those that were on the CPU return there
        afterwards."""
        away = [role for role in roles if role in self._away]
        for role in away:
            self.bring_back(role)
        yield
        for role in away:
            self._offload(role)

    def _is_head(self, role: str) -> bool:
        return self._rank in self._assembly.layout(role).heads

    def _save(self, call: Save) -> SaveReply:
        limit = self._config.limits.call_seconds
        self._wait_for_publication()
        unwritten = self._writer.finish(limit=limit)
        with self._here(*roles_to_save(self._assembly)):
            snapshot = take_snapshot(self._assembly, self._config, call.progress, final=call.final)
        self._writer.begin(Path(call.folder), snapshot)
        if call.final and (failure := self._writer.finish(limit=limit)):
            raise TrainingError(f"{failure}, then continue with `streamrl run CONFIG --resume`")
        return SaveReply(unwritten)


def call_users_function(
    mfc: MFC, groups: Sequence[TrajectoryGroup], inputs: dict[str, list[NDArray[Any]]]
) -> dict[str, list[NDArray[np.float32]]]:
    """Return the checked result of the user's function; raises `TrainingError` if it differs from the MFC's promise."""
    try:
        function = load_object(mfc.function, key=f"the function of {mfc.name}")
    except ConfigError as error:
        raise TrainingError(str(error)) from error
    found = function(groups, inputs)
    if not isinstance(found, dict) or found.keys() != mfc.outputs:
        raise TrainingError(f"{mfc.name}: {mfc.function} has to answer a dict with {', '.join(sorted(mfc.outputs))}")
    checked: dict[str, list[NDArray[np.float32]]] = {}
    for key, arrays in found.items():
        sizes = [group.size if key == "rewards" else group.tokens for group in groups]
        checked[key] = [np.asarray(array, dtype=np.float32) for array in arrays]
        if [array.shape for array in checked[key]] != [(size,) for size in sizes]:
            each = "trajectory" if key == "rewards" else "token"
            raise TrainingError(f"{mfc.name}: {mfc.function} has to give one float for each {each} of a group in {key}")
    return checked


def _comparable(group: TrajectoryGroup, version: int) -> NDArray[np.bool_]:
    """Return `[tokens]`: sampled tokens of responses that `version` alone sampled.

    If weights changed in the middle, later tokens may attend to keys and values of the old weights
    (`weights.pause_mode`), so the two sides differ without a fault.
    """
    sampled = group.packed_loss_mask
    starts = np.cumsum(group.seqlens) - group.seqlens
    others = sampled & (group.packed_policy_versions != version)
    mixed: NDArray[np.bool_] = np.logical_or.reduceat(others, starts)
    return sampled & ~np.repeat(mixed, group.seqlens)


def _token_ages(items: Iterable[TrainItem]) -> dict[int, int]:
    """Return the number of tokens of `items` that enter the loss, by their age in versions."""
    ages = [item.age[item.trainable] for item in items]
    found, counts = np.unique(np.concatenate([np.zeros(0, np.int32), *ages]), return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))
