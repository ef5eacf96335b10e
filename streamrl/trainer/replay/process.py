"""Training again on the record of a run: the same batches in the same order, without generation.

Owns one rank of a replay, as `trainer/worker/process.py` owns one of a run. There is no master: its decisions (which
rank computes which groups of a batch, and in which order) are in the record, and every rank reads them there. The run's
own `Computation` carries out the run's own calls. Rank 0 compares and reports.

Invariant: if no setting is changed, every figure of every step is compared bit for bit with the recorded one.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]
from transformers.utils.logging import disable_progress_bar

from streamrl.config import Config
from streamrl.device import compute_repeatably, compute_with, resolve_device, rounding
from streamrl.errors import ModelError
from streamrl.models import ensure_checkpoint
from streamrl.records import progress
from streamrl.records.metrics import StepReport
from streamrl.records.sinks import MetricsWriter, start_sinks
from streamrl.stream_dataset import StreamDataset
from streamrl.trainer.calls import Save, TrainReply, TrainStep
from streamrl.trainer.graph import graph_of
from streamrl.trainer.master.batches import BatchFormer
from streamrl.trainer.master.figures import batch_metrics, token_ages, train_metrics
from streamrl.trainer.replay.plan import (
    OUTCOME,
    Difference,
    ReplayBatch,
    ReplayOutcome,
    ReplayPlan,
    changes,
    computed,
    difference_of,
    differing,
    seqs_of,
    stretch,
)
from streamrl.trainer.replay.recording import RankRecording, Recording, code, read_recording
from streamrl.trainer.worker.assembly import Assembly, fingerprints, resume
from streamrl.trainer.worker.computation import Computation
from streamrl.trainer.worker.data import WorkerData
from streamrl.transport.collective import join_world

log = logging.getLogger(__name__)

Answers = dict[str, TrainReply]
"""The replies by name of the training call."""


async def serve(config: Config, *, run_dir: Path, index: int, last_step: int, meeting_place: Path) -> None:
    """Run rank `index` of a replay of the record in `run_dir`, up to the step that made version `last_step`.

    `config`: configuration of the replay; its `run_dir` is the new folder. `meeting_place`: a file that does not exist
    yet, through which the ranks meet.
    """
    stopping = threading.Event()

    def replay() -> None:
        rank = Rank(config, read_recording(run_dir), index=index, meeting_place=meeting_place)
        rank.run(last_step, stopping=stopping)

    compute = ThreadPoolExecutor(
        1, thread_name_prefix="compute", initializer=compute_with, initargs=(config.trainer.threads,)
    )
    try:
        await asyncio.get_running_loop().run_in_executor(compute, replay)
    finally:
        stopping.set()
        compute.shutdown(wait=False)


class Rank:
    """One model worker of a replay. All methods are collective."""

    def __init__(self, config: Config, recording: Recording, *, index: int, meeting_place: Path) -> None:
        """Meet the other ranks, and load the models as they were before the first recorded step."""
        disable_progress_bar()  # for loading; the replay logs to the same terminal
        self._config = config
        self._recording = recording
        self._index = index
        self._first = stretch(recording).first
        recorded = recording.parts[0].facts
        self._changed = changes(recorded[0].settings(), config)
        self._device = resolve_device(config.run.device, index=index)
        compute_repeatably(self._device)
        torch.manual_seed(config.run.seed)
        self._world = config.trainer.workers
        if self._world > 1 or config.trainer.backend == "megatron":
            join_world(
                address=str(meeting_place),
                port=0,
                rank=index,
                world_size=self._world,
                backend="nccl" if self._device.type == "cuda" else "gloo",
                timeout=config.limits.call_seconds,
                store=FileStore(str(meeting_place), self._world),
            )
        graph = graph_of(config)
        mfcs = computed(graph, ReplayBatch(recording.load(self._first)).keys)
        assembly = Assembly(
            config,
            roles=frozenset(mfc.role for mfc in mfcs),
            model_dir=ensure_checkpoint(config),
            rank=index,
            device=self._device,
        )
        if config.run.resume_from:
            resume(assembly, Path(config.run.resume_from))
        self._check_weights(assembly, recorded)
        self._dataset = StreamDataset(rank=index, capacity_groups=config.capacity_groups)
        self._data = WorkerData(self._dataset, rank=index)
        free = threading.Event()
        free.set()
        self._computation = Computation(
            config, rank=index, graph=graph, assembly=assembly, data=self._data, weights_free=free
        )
        self._plan = ReplayPlan(config, mfcs, rank=index, policy_version=self._first - 1, changed=self._changed)
        self._former = BatchFormer(config)
        self._gives = {mfc.name: key for mfc in mfcs for key in mfc.outputs}
        self._own = {fact.rank: fact for fact in recorded}.get(index, recorded[0]).environment
        self._difference: Difference | None = None
        self._trained: set[int] = set()

    def run(self, last_step: int, *, stopping: threading.Event) -> None:
        """Replay all steps up to `last_step`, unless `stopping` is set earlier; rank 0 writes `replay.json`."""
        tells = self._index == 0
        writer = MetricsWriter(self._config.run_dir, sinks=start_sinks(self._config)) if tells else None
        began = time.time()
        try:
            for step in range(self._first, last_step + 1):
                if stopping.is_set():
                    return
                report = self._step(ReplayBatch(self._recording.load(step)), last_step, began=began)
                if writer is not None:
                    writer.write(report)
        finally:
            if writer is not None:
                writer.close()
        if self._config.trainer.save_at_end:
            self._save(last_step)
        if self._index == 0:
            self._tell(last_step)

    def _step(self, batch: ReplayBatch, last_step: int, *, began: float) -> StepReport:
        begin = time.time()
        calls = self._plan.calls(batch)
        for seq in sorted({seq for call in calls for seq in seqs_of(call)}):
            self._dataset.offer(batch.group(seq))
            for key, array in batch.given(seq).items():
                self._data.put(seq, key, array)
        answers: Answers = {}
        for call in calls:
            answer = self._computation.carry_out(call)
            if isinstance(answer, TrainReply):
                answers[call.mfc] = answer
            else:
                self._share(self._gives[call.mfc], seqs_of(call))
        self._data.discard([meta.seq for meta in batch.metas], come_again=False)
        self._trained.update(meta.seq for meta in batch.metas)
        everyone = [
            msgspec.msgpack.decode(content, type=Answers) for content in self._gather(msgspec.msgpack.encode(answers))
        ]
        self._compare(batch, everyone)
        trained = [answer for rank in everyone for answer in rank.values()]
        figures = batch_metrics(batch.metas, self._former, policy_version=batch.policy_version) | train_metrics(trained)
        del figures["generation_seconds_mean"]  # a figure of the run's generation, which is not repeated
        end = time.time()
        by_call = [[rank[mfc] for rank in everyone] for mfc in answers]  # the calls, which ran one after another
        times = {
            "run_seconds": end - began,
            "step_seconds": end - begin,
            "train_seconds": sum(max(answer.compute_seconds for answer in call) for call in by_call),
            "update_seconds": sum(max(answer.update_seconds for answer in call) for call in by_call),
        }
        rate = {"tokens_per_second": figures["tokens_trained"] / (end - begin)}
        if self._index == 0:
            log.info(
                "step %d of %d: loss %.6g, gradient norm %.6g%s",
                *(batch.step, last_step, figures["loss"], figures["grad_norm"]),
                "" if self._changed else ", as recorded" if self._difference is None else ", not as recorded",
            )
        return StepReport(
            step=batch.step,
            time=end,
            metrics=figures | times | rate,
            token_ages=token_ages(trained),
            spans=[("actor_train", begin, end)],
            seqs=[meta.seq for meta in batch.metas],
        )

    def _share(self, key: str, seqs: Iterable[int]) -> None:
        """Send this rank's new arrays `key` of `seqs` to all ranks, since others may train on them."""
        if self._world == 1:
            return
        mine = {seq: self._data.get(seq, key).tobytes() for seq in seqs if self._data.optional(seq, key) is not None}
        for content in self._gather(msgspec.msgpack.encode(mine)):
            for seq, array in msgspec.msgpack.decode(content, type=dict[int, bytes]).items():
                self._data.put(seq, key, np.frombuffer(bytearray(array), np.float32))

    def _gather(self, mine: bytes) -> list[bytes]:
        """Return the bytes of all ranks, in order of rank."""
        if self._world == 1:
            return [mine]
        sizes = torch.zeros(self._world, dtype=torch.int64, device=self._device)
        sizes[self._index] = len(mine)
        dist.all_reduce(sizes)
        found = []
        for rank, size in enumerate(sizes.tolist()):
            room = torch.empty(size, dtype=torch.uint8, device=self._device)
            if rank == self._index:
                room.copy_(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
            dist.broadcast(room, src=rank)
            found.append(room.cpu().numpy().tobytes())
        return found

    def _compare(self, batch: ReplayBatch, everyone: list[Answers]) -> None:
        """Note the first figure of any head that differs from the record."""
        if self._changed or self._difference is not None:
            return
        for step in batch.steps:
            recorded = dict(zip((c.mfc for c in step.calls if isinstance(c, TrainStep)), step.answers, strict=True))
            for name, before in recorded.items():
                if found := difference_of(before, everyone[step.rank][name]):
                    figure, was, now = found
                    self._difference = Difference(batch.step, step.rank, f"{name}: {figure}", repr(was), repr(now))
                    return

    def _check_weights(self, assembly: Assembly, recorded: list[RankRecording]) -> None:
        found = fingerprints(assembly)
        for role, before in recorded[0].weights.items():
            if found.get(role, before) != before:
                raise ModelError(
                    f"the first weights of the {role} are not those that the recorded run began with: what "
                    f"{self._config.run.resume_from or self._config.model.path} stands for has changed since"
                )

    def _save(self, last_step: int) -> None:
        config = self._config
        begun = progress.of_run(config)
        before = set(begun.trained_seqs()) if begun is not None else set()
        reached = progress.Progress(
            policy_version=last_step,
            trained=progress.ranges(before | self._trained),
            rejected=begun.rejected if begun is not None else [],
            prompts=progress.prompts_digest(config),
        )
        self._computation.carry_out(Save(str(config.run_dir / "checkpoints" / "final"), reached, final=True))

    def _tell(self, last_step: int) -> None:
        outcome = ReplayOutcome(
            run=str(self._recording.run_dir),
            first_step=self._first,
            last_step=last_step,
            changed=self._changed,
            difference=self._difference,
            environment=differing(self._own, rounding(self._device) | code()),
        )
        (self._config.run_dir / OUTCOME).write_bytes(msgspec.json.format(msgspec.json.encode(outcome)))
