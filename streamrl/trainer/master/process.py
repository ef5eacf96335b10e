"""The trainer's master: forms batches, drives the graph, counts policy versions.

It moves metadata only; groups and weights stay on the model workers. One step forms a batch by the ledger's rules, runs
the graph's MFCs on it, and publishes the new weights. Publication overlaps with the next step's computation and ends
before that step changes the weights.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from streamrl.config import Config
from streamrl.config.checks import COMPARES_SIBLINGS
from streamrl.errors import TrainingError
from streamrl.ledger import ReadyGroups, Selection
from streamrl.mixture import Mixture
from streamrl.records import progress, rollouts_writer
from streamrl.records.collapse import Health, advice
from streamrl.records.evaluation import EvaluationReport
from streamrl.records.lineage import FIRST, Lineage
from streamrl.records.metrics import Final, StepReport, mean_age, write_final
from streamrl.records.sinks import MetricsWriter, start_sinks
from streamrl.trainer.calls import EvaluateHook, SaveHook, StorageNotice, TrainReply, WorkerSpec
from streamrl.trainer.graph import graph_of
from streamrl.trainer.master.batches import BatchFormer
from streamrl.trainer.master.buffer import AsyncIOSequenceBuffer
from streamrl.trainer.master.comparison import Comparison, MismatchWatch, response_to_compare
from streamrl.trainer.master.executor import FunctionExecutor, StepResult
from streamrl.trainer.master.figures import (
    Span,
    batch_metrics,
    groups_with_contrast,
    masked_ages,
    sample_of_lengths,
    task_metrics,
    token_ages,
    train_metrics,
)
from streamrl.trainer.master.history import History, RunControl, SnapshotPace
from streamrl.trainer.master.own_figures import OwnFigures
from streamrl.trainer.master.rollout_pool import RolloutPool
from streamrl.trainer.master.workers import Checkpoints, ModelWorkers
from streamrl.trainer.replay import recording
from streamrl.transport.control import DataFacts
from streamrl.transport.request_reply import Requests
from streamrl.types import SampleMeta
from streamrl.waits import cancel, first_of, warned_of

log = logging.getLogger(__name__)

STOP_SECONDS = 1.5
"""Time for sinks to write their last figures when the run is stopped. The launcher waits longer for the controller."""


class Master:
    """Drives the model workers through the steps of a run."""

    _control: RunControl
    _data: DataFacts

    def __init__(
        self,
        config: Config,
        *,
        pool: RolloutPool,
        channel: Requests,
        stored: asyncio.Queue[StorageNotice],
        lineage: Lineage = FIRST,
    ) -> None:
        """`channel`: to the model workers, and in a synchronous graph to rollout workers; `stored`: notices of model
        workers about groups that have arrived; `lineage`: lineage of the new policy versions."""
        self._config = config
        self._pool = pool
        self._ledger = pool.ledger
        self.waiting_for = ""
        """Description of the present wait; empty if there is none."""
        self._leaving = asyncio.Event()
        self._graph = graph_of(config)
        self._former = BatchFormer(config)
        self._mixture = Mixture.of(config)
        begun = progress.of_run(config)
        self._buffer = AsyncIOSequenceBuffer(self._graph, pool.ledger)
        self._history = History(config, begun, lineage=lineage)
        self._weights_at_rest = asyncio.Lock()
        """Locked while weights may change, and while their publication is being set up."""
        self._workers = ModelWorkers(config, channel=channel)
        self._executor = FunctionExecutor(
            graph=self._graph,
            buffer=self._buffer,
            channel=channel,
            workers=self._workers,
            stored=stored,
            former=self._former,
            config=config,
            history=self._history,
            weights_at_rest=self._weights_at_rest,
        )
        self._begun = begun
        self._metrics = MetricsWriter(config.run_dir)
        self._own_figures = OwnFigures(config.metrics)
        self._evaluated: set[int] = set()
        """Policy versions whose evaluations were reported."""
        pool.on_evaluation(self._take_evaluation)
        self._checkpoints = Checkpoints(config, channel=channel)
        self._snapshots = SnapshotPace(config.trainer.snapshot_every_steps, step=self._history.policy_version)
        self._publication: asyncio.Task[Any] | None = None
        self._counted: list[WorkerSpec] = []
        self._dropped = (0, 0)
        """Numbers of groups and sampled tokens that were dropped as too old since the last step."""
        self._mismatch = MismatchWatch(warning=config.logprob_diff_warning, limit=config.trainer.logprob_diff_limit)
        self._comparison: Comparison | None = None
        """The latest comparison. The comparison before it belongs to the publication."""
        self.stopped = False
        """Whether the run ended before its last step, by request."""

    @property
    def policy_version(self) -> int:
        """Number of completed training steps."""
        return self._history.policy_version

    def stats(self) -> dict[str, float]:
        """Return the master's figures for the controller's heartbeats."""
        return {
            "policy_version": self.policy_version,
            "groups_held": len(self._buffer),
            "groups_trained_total": len(self._ledger.trained_seqs),
        }

    def leave(self) -> None:
        """Write a checkpoint and end the run after the present step."""
        self._leaving.set()

    async def run(self) -> str:
        """Make all steps; return why the run ended."""
        self._begin_records()
        async with asyncio.TaskGroup() as helpers:
            background = [
                helpers.create_task(self._executor.load_data(), name="data"),
                helpers.create_task(self._wake_to_leave(), name="leaving"),
            ]
            if await self._prepared(self._initialize()):
                # only now: gservers without a copy of the checkpoint may join long before its weights are loaded
                background.append(helpers.create_task(self._follow_resyncs(), name="resyncs"))
                background.append(helpers.create_task(self._executor.run_arrivals(), name="mfcs"))
                reason = await self._steps()
            else:
                reason = self._stop()
            for task in background:
                task.cancel()
        return reason

    async def finish(self) -> str:
        """Write the last checkpoint and wait for the last evaluation; return an addition to the reason of the end."""
        if self.stopped:
            return await self._save_before_stop()
        # a finished run that was resumed may have made this evaluation before
        made = progress.evaluated(self._config.run_dir, policy_version=self.policy_version)
        at_end = self._config.evaluation.at_end and not made
        if at_end:
            self._pool.evaluate(self.policy_version, training_over=True)
        with self._waits_for("the last checkpoint"):
            if self._config.trainer.save_at_end:
                await self._checkpoints.save_final(self._reached())
            unwritten = await self._checkpoints.finish()
        self._counted = await self._workers.specs()
        if at_end:
            with self._waits_for(f"the evaluation of version {self.policy_version}"):
                waiting, *_ = await first_of(self._last_evaluation(), self._leaving.wait(), self._follow_resyncs())
            unwritten += "; its evaluation was not waited for" if waiting.cancelled() else waiting.result()
        elif (found := self._pool.status().evaluation) is not None and (task := found.waiting or found.running):
            log.warning(
                "the run ends before the evaluation of version %d is done: set evaluation.at_end to wait for it",
                task.policy_version,
            )
        if sinks := self._metrics.waits_for:
            with self._waits_for(f"{sinks} to take the last figures"):
                await asyncio.to_thread(self._metrics.close)
        return unwritten

    async def _last_evaluation(self) -> str:
        """Wait for the report of the last version, at most `limits.evaluation_seconds`; return an addition to the
        reason of the run's end."""
        version, seconds = self.policy_version, self._config.limits.evaluation_seconds
        if await self._buffer.until(lambda: version in self._evaluated, timeout=seconds):
            return ""
        missed = f"the evaluation of version {version} was not finished within limits.evaluation_seconds = {seconds:g}"
        if (status := self._pool.status().evaluation) is not None:
            done = f"{status.prompts_done} of {status.prompts} prompts are done"
            missed += f" ({done if status.prompts else 'no rollout worker has opened the held-out data'})"
        log.warning("%s", missed)
        return f"; {missed}"

    async def _save_before_stop(self) -> str:
        """Write a checkpoint unless this version has one; return an addition to the reason of the end."""
        if self.policy_version == (self._begun.policy_version if self._begun is not None else 0):
            return ""
        with self._waits_for("the checkpoint before the stop"):
            await self._checkpoints.save(self._reached())
            return await self._checkpoints.finish()

    def write_final(self) -> None:
        """Write `final.json` for the report."""
        final = Final(
            status=msgspec.to_builtins(self._pool.status(), str_keys=True),
            policy_version=self.policy_version,
            train_seconds=self._history.train_seconds,
            groups_trained=len(self._ledger.trained_seqs),
            groups_held=len(self._buffer),
            groups_duplicated=sum(c.duplicated for c in self._counted),
            max_staleness=self._ledger.max_staleness,
            over_age=self._config.staleness.over_age,
            tokens_dropped=self._history.tokens_dropped,
        )
        write_final(self._config.run_dir, final)

    async def close(self) -> None:
        """Cancel the publication and the comparison, and close the sinks."""
        self._buffer.close()
        await cancel(self._publication)
        if self._comparison is not None:
            await self._comparison.close()
        if self._metrics.waits_for:
            await asyncio.to_thread(self._metrics.close, timeout=STOP_SECONDS)
        self._metrics.close()

    def _begin_records(self) -> None:
        """Remove the records of steps after the checkpoint, or all without a checkpoint, and start the sinks."""
        run_dir = self._config.run_dir
        version = self._begun.policy_version if self._begun is not None else 0
        progress.rewind(run_dir, policy_version=version)
        rollouts_writer.rewind(run_dir, policy_version=version)
        recording.cut(run_dir, policy_version=version)
        self._metrics = MetricsWriter(run_dir, sinks=start_sinks(self._config))

    async def _initialize(self) -> None:
        self.waiting_for = "model workers to connect"
        await self._workers.connected()
        with self._waits_for("model workers to load the models"):
            await self._workers.initialize()
            model = await self._workers.model_config()
        log.info("model: %s", model)
        self._pool.take_model(model)
        self._history.begin()

    async def _begin_counting(self) -> None:
        """Wait for the size of the data set, begin to count epochs, checkpoints and evaluations, and request the first
        evaluation if it is due."""
        with self._waits_for("a rollout worker to report the size of the data set"):
            data = self._data = await self._pool.data()
        self._control = RunControl(
            self._config,
            data_rows=data.rows,
            step=self.policy_version,
            consumed=self._buffer.consumed,
            now=time.monotonic(),
        )
        # a resumed run makes the evaluation of its checkpoint again if its report was lost
        began = self._config.run.resume_from is None
        due = self._config.evaluation.at_start if began else self._history.evaluation_due
        if due and not progress.evaluated(self._config.run_dir, policy_version=self.policy_version):
            self._pool.evaluate(self.policy_version, training_over=False)

    @contextmanager
    def _waits_for(self, what: str) -> Iterator[None]:
        """Report the wait for `what`, and log a warning if it is long."""
        self.waiting_for = what
        try:
            with warned_of(lambda: self.waiting_for, after=self._config.limits.warning_seconds, log=log):
                yield
        finally:
            self.waiting_for = ""

    def _reached(self) -> progress.Progress:
        """Return the progress of the run for a checkpoint."""
        return self._history.reached(self._ledger, data=self._data)

    async def _published(self) -> None:
        """Wait for the end of the publication in progress; raises its error."""
        if self._publication is not None:
            await self._publication

    async def _prepared(self, work: Coroutine[Any, Any, None]) -> bool:
        """Do `work` before the first step; return False if it was cancelled to leave the run."""
        working, _ = await first_of(work, self._leaving.wait())
        return not working.cancelled()

    async def _wake_to_leave(self) -> None:
        """End the wait for a batch when the master is requested to leave."""
        await self._leaving.wait()
        self._buffer.wake()

    def _end(self) -> str | None:
        """Return why the run is over, if it is."""
        reason = self._control.end(
            step=self.policy_version, consumed=self._buffer.consumed, rewards=self._history.rewards
        )
        return self._stop() if reason is None and self._leaving.is_set() else reason

    def _stop(self) -> str:
        self.stopped = True
        return f"stopped on request after step {self.policy_version}"

    async def _steps(self) -> str:
        if not await self._prepared(self._begin_counting()):
            return self._stop()
        while (reason := self._end()) is None:
            await self._step()
        await self._published()
        return reason

    async def _step(self) -> None:
        version = self.policy_version
        begin = time.time()
        batch = await self._form_batch(version)
        if not batch:
            return
        await self._executor.until_generated()
        before = self._history.watch.health
        async with self._weights_at_rest:
            save = await self._train(batch, version=version, begin=begin)
        stop = self._tell(before)
        if save or stop:
            with self._waits_for(f"checkpoint {self.policy_version}"):
                await self._published()  # the publication writes the step's figures, which belong to the checkpoint
                await self._checkpoints.save(self._reached())
        elif self._snapshots.due(self.policy_version) and self._pool.reads_snapshots:
            await self._take_snapshot(step_seconds=time.time() - begin)
        if stop:
            await self._stop_collapsing()

    async def _take_snapshot(self, *, step_seconds: float) -> None:
        """Take a snapshot in memory, unless it has no place there; `step_seconds`: duration of the step."""
        if self._checkpoints.memory_is_short:
            return
        began = time.monotonic()
        await self._published()
        await self._checkpoints.take_snapshot(self._reached())
        seconds = time.monotonic() - began
        self._snapshots.taken(self.policy_version, seconds=seconds, step_seconds=step_seconds)

    def _tell(self, before: Health) -> bool:
        """Log a change of the run's health since `before`; return whether the run has to stop."""
        health = self._history.watch.health
        if health.state == before.state:
            return False
        log.log(
            logging.INFO if health.state == "healthy" else logging.WARNING, "step %d: %s", self.policy_version, health
        )
        return health.state == "collapsing" and self._config.algorithm.on_collapse == "stop"

    async def _stop_collapsing(self) -> None:
        """Wait for the last checkpoint, then raise `TrainingError` with the cause and a remedy."""
        await self._published()
        unwritten = await self._checkpoints.finish()
        healthy = progress.last_healthy(self._config.run_dir)
        remedy = (
            f"continue from the last healthy checkpoint, run.resume_from={healthy.absolute()}"
            if healthy is not None
            else "it wrote no checkpoint while it was healthy (trainer.save_every): start again"
        )
        raise TrainingError(
            f'step {self.policy_version}: {self._history.watch.health}; stopped by algorithm.on_collapse = "stop"'
            f"{unwritten}; {remedy}, with other settings"
        )

    def _take_evaluation(self, report: EvaluationReport) -> None:
        self._metrics.write_evaluation(report)
        self._evaluated.add(report.policy_version)
        self._buffer.wake()
        if report.reward_mean is not None:
            self._history.watch = self._history.watch.evaluated(report.reward_mean)

    async def _train(self, batch: Sequence[SampleMeta], *, version: int, begin: float) -> bool:
        """Train on `batch` and begin to publish the new weights; return whether a checkpoint is due."""
        formed = time.time()
        comparison = self._comparison = self._compare(batch, version=version)
        result = await self._executor.execute_step(
            batch,
            compared=comparison.response if comparison is not None else None,
            lr_scale=self._lr_scale(batch),
        )
        self._history.policy_version += 1
        held = self._buffer.trained_on(meta.seq for meta in batch)
        await self._workers.clear(held, come_again=False)
        end = time.time()
        await self._published()
        figures = batch_metrics(batch, self._former, policy_version=version) | train_metrics(result.trained)
        figures |= task_metrics(batch, self._mixture, policy_version=version)
        self._history.rewards.append(figures["reward_mean"])
        figures |= self._look_after(figures, age=mean_age(token_ages(result.trained)) or 0.0)
        report = self._report(batch, result, figures, begin=begin, formed=formed, end=end)
        evaluate, save = self._is_due(self.policy_version)
        self._history.evaluation_due = evaluate
        await self._begin_publication(
            self._publish(report, batch, comparison, result.trained, evaluate=evaluate),
            name=f"publication of v{version + 1}",
        )
        return save

    async def _begin_publication(self, work: Coroutine[Any, Any, Any], *, name: str) -> asyncio.Task[Any]:
        """Start `work` as the publication. The wait for groups is woken at its end, since it may have failed."""
        publication = self._publication = asyncio.create_task(work, name=name)
        publication.add_done_callback(lambda _: self._buffer.wake())
        await asyncio.sleep(0)  # the workers receive its call before any later one
        return publication

    def _lr_scale(self, batch: Sequence[SampleMeta]) -> float:
        """Return the factor of the policy's learning rate for this batch (`staleness.lr_by_contrast`)."""
        compares = self._config.algorithm.advantage in COMPARES_SIBLINGS
        given = any("advantages" in mfc.inputs for mfc in self._graph.mfcs)
        stale = self._ledger.max_staleness > 0
        if given or not (compares and stale and self._config.staleness.lr_by_contrast):
            return 1.0
        return self._history.watch.lr_scale(groups_with_contrast(batch), len(batch))

    def _look_after(self, figures: dict[str, float], *, age: float) -> dict[str, float]:
        """Update the run's health by the last step, on tokens of mean `age`; return additional figures of the step."""
        watch = self._history.watch
        more = {"grad_norm_ratio": watch.grad_norm_ratio(figures["grad_norm"])}
        self._history.watch = watch.after(
            figures | more,
            step=self.policy_version,
            turn=advice(self._config),
            age=age,
            most_drift=self._config.staleness.most_drift,
        )
        return more | {"admitted_staleness": self._history.watch.staleness(self._ledger.max_staleness)}

    def _compare(self, batch: Sequence[SampleMeta], *, version: int) -> Comparison | None:
        """Begin to compare gservers and trainer under `version`, on a response of the first minibatch. Simulated
        gservers are not compared."""
        if not self._config.gserver.traits.computes:
            return None
        first = self._former.minibatches(batch)[0]
        young = [m for m in first if self._former.tokens_in_loss(m, policy_version=version) == m.sampled_tokens]
        heads = {meta.seq: meta.head for meta in young}
        return Comparison(
            version,
            response_to_compare(young),
            pool=self._pool,
            tokens_of=lambda chosen: self._workers.response(chosen, worker=heads[chosen.seq]),
        )

    def _is_due(self, version: int) -> tuple[bool, bool]:
        """Return whether an evaluation and a checkpoint are due, by run control or by a hook."""
        evaluate, save = self._control.due(step=version, consumed=self._buffer.consumed, now=time.monotonic())
        save |= self._pool.save_requested
        self._pool.save_requested = False
        return (
            evaluate or self._graph.due(EvaluateHook, policy_version=version),
            save or self._graph.due(SaveHook, policy_version=version),
        )

    async def _form_batch(self, version: int) -> Sequence[SampleMeta]:
        """Wait for the next batch and return it; it is empty if the run is over. Drops groups that are too old."""

        def select(ready: ReadyGroups) -> Selection | None:
            self._former.max_staleness = self._ledger.max_staleness  # the run's owner may change it
            if self._publication is not None and self._publication.done():
                self._publication.result()  # a failed update ends the run here, not after a wait
            if self._end() is not None:
                return None  # the last groups of the last epoch were rejected
            selection = self._former.select(ready, policy_version=version, next_in_order=self._ledger.next_in_order)
            self.waiting_for = self._former.describe(selection, policy_version=version)
            return selection

        with self._waits_for("groups"):
            batch, too_old = await self._buffer.take_batch(select)
            while too_old:
                await self._drop(too_old)
                batch, too_old = await self._buffer.take_batch(select)
        return batch

    async def _drop(self, metas: Sequence[SampleMeta]) -> None:
        seqs = [meta.seq for meta in metas]
        tokens = sum(meta.sampled_tokens for meta in metas)
        self._history.tokens_dropped += tokens
        self._dropped = self._dropped[0] + len(metas), self._dropped[1] + tokens
        with self._buffer.dropping(seqs) as held:
            await self._workers.clear(held, come_again=True)

    def _report(
        self,
        batch: Sequence[SampleMeta],
        result: StepResult,
        figures: dict[str, float],
        *,
        begin: float,
        formed: float,
        end: float,
    ) -> StepReport:
        """Return the report of the last step: `figures` and its timeline."""
        computing = sum(span.compute_seconds for span in result.spans)
        metrics = figures | {
            "run_seconds": self._history.train_seconds,
            "step_seconds": end - begin,
            "wait_seconds": formed - begin,
            "train_seconds": computing,
            "update_seconds": sum(span.update_seconds for span in result.spans),
            "overhead_seconds": max(0.0, end - formed - computing),
            "tokens_per_second": figures["tokens_trained"] / (end - begin),
            "save_seconds": self._checkpoints.take_seconds(),
            "groups_dropped": self._dropped[0],
            "tokens_dropped": self._dropped[1],
            "epoch": self._control.epochs(self._buffer.consumed),
        }
        self._dropped = (0, 0)
        spans = [Span("wait", begin, formed, 0.0), *self._executor.take_spans()]
        return StepReport(
            step=self.policy_version,
            time=end,
            metrics=metrics,
            token_ages=token_ages(result.trained),
            masked_ages=masked_ages(
                batch, policy_version=self.policy_version - 1, max_staleness=self._former.max_staleness
            ),
            spans=[(span.name, span.begin, span.end) for span in spans],
            seqs=[meta.seq for meta in batch],
            health=self._history.watch.health,
            response_lengths=sample_of_lengths(batch),
        )

    async def _publish(
        self,
        report: StepReport,
        batch: Sequence[SampleMeta],
        comparison: Comparison | None,
        trained: Sequence[TrainReply],
        *,
        evaluate: bool,
    ) -> None:
        """Publish the step's weights, then report the step with the comparison of the weights before it, and request
        an evaluation if one is due."""
        begin = time.time()
        published = await self._workers.publish(report.step)
        report.metrics["publish_seconds"] = published.seconds
        report.metrics["pause_seconds"] = published.pause_seconds
        report.metrics["publish_bytes"] = float(published.bytes)
        report.spans.append(("publish", begin, time.time()))
        if comparison is not None:
            report.metrics.update(await comparison.figures(trained))
        report.metrics.update(await self._own_figures.of_step(report, batch))
        self._metrics.write(report)
        self._pool.report(report)
        self._mismatch.look(report.metrics, policy_version=report.step - 1)
        if evaluate:
            self._pool.evaluate(report.step, training_over=False)

    async def _follow_resyncs(self) -> None:
        """Between two steps, publish the current weights again to the gservers that lack them."""
        while True:
            gservers = await self._pool.resync_needed()
            if self._publication is not None and not self._publication.done():
                await asyncio.wait({self._publication})
                continue
            async with self._weights_at_rest:
                if self._publication is not None:
                    if not self._publication.done():
                        continue  # newer weights are on their way
                    self._publication.result()  # raise its failure, which a new publication would replace
                log.info("weights v%d are sent to %s as well", self.policy_version, ", ".join(gservers))
                work = self._workers.publish(self.policy_version, resync=True)
                publication = await self._begin_publication(work, name=f"resync to v{self.policy_version}")
            await asyncio.wait({publication})
