"""Execution of the graph: runs each MFC on the model workers as soon as its keys are ready.

A `ModelFunctionCall` carries out one MFC: it divides groups among data-parallel ranks, plans the transfers of their
arrays, and sends one request to all workers. `load_data` fills the buffer. `arrivals` MFCs run in separate loops while
groups arrive; `execute_step` runs the `batch` MFCs on one training batch, and each waits only for its own keys.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

import msgspec

from streamrl.config import Config
from streamrl.trainer.calls import (
    CallDone,
    DataTransfer,
    Function,
    Hook,
    Inference,
    MasterHook,
    MinibatchShare,
    ParamRealloc,
    Sibling,
    StorageNotice,
    TrainReply,
    TrainStep,
)
from streamrl.trainer.graph import MFC, Graph
from streamrl.trainer.layout import layout_of
from streamrl.trainer.master.batches import BatchFormer
from streamrl.trainer.master.buffer import AsyncIOSequenceBuffer, Shares
from streamrl.trainer.master.figures import Span
from streamrl.trainer.master.history import History
from streamrl.trainer.master.synchronous import SynchronousGeneration
from streamrl.trainer.master.workers import ModelWorkers
from streamrl.trainer.redistributor import Transfer, concerning
from streamrl.transport.request_reply import Requests
from streamrl.types import SampleMeta


class StepResult(msgspec.Struct, frozen=True):
    """The result of one training batch."""

    spans: list[Span]
    trained: list[TrainReply]
    """The replies of all workers to all training MFCs."""


class ModelFunctionCall:
    """Calls of one MFC of the graph."""

    def __init__(
        self,
        mfc: MFC,
        *,
        channel: Requests,
        buffer: AsyncIOSequenceBuffer,
        former: BatchFormer,
        config: Config,
        policy_version: int,
        kept_per_step: int = 0,
    ) -> None:
        """`policy_version`: version at which the run begins. `kept_per_step`: see `metrics.rollouts_per_step`."""
        self.mfc = mfc
        self._channel = channel
        self._buffer = buffer
        self._former = former
        self._layout = layout_of(config.trainer, mfc.role)
        self._timeout = config.limits.call_seconds
        self._kept_per_step = kept_per_step
        self._pre_hooks, self._post_hooks = hooks_of(mfc, policy_version=policy_version)

    def gives_weights(self, policy_version: int) -> bool:
        """Return whether a call at `policy_version` copies one role's weights to another."""
        hooks = [*self._pre_hooks.pending(policy_version), *self._post_hooks.pending(policy_version)]
        return any(isinstance(hook, ParamRealloc) for hook in hooks)

    async def infer(self, metas: Sequence[SampleMeta], *, policy_version: int) -> float:
        """Compute the MFC's keys for `metas`, and record them in the buffer; return the seconds of computation."""
        shares = self._buffer.deal([meta.seq for meta in metas], self._layout)
        plan = self._buffer.bring(shares, self.mfc.inputs, self._layout)
        kind = Function if self.mfc.interface == "function" else Inference
        pre, post = self._pre_hooks.due(policy_version), self._post_hooks.due(policy_version)
        calls = {}
        for worker in range(self._layout.world):
            mine = shares[self._layout.coordinates(worker).data]
            calls[worker] = kind(self.mfc.name, mine, [*_transfer(plan, worker), *pre], post)
        replies = await self._channel.request(calls, CallDone, timeout=self._timeout)
        rewards = {seq: found for done in replies.values() for seq, found in done.rewards.items()}
        self._buffer.amend_batch(self.mfc.outputs, shares, self._layout, rewards=rewards)
        return max(done.compute_seconds for done in replies.values())

    async def train(
        self, metas: Sequence[SampleMeta], *, policy_version: int, compared: Sibling | None, lr_scale: float
    ) -> list[TrainReply]:
        """Train on the batch `metas`, minibatch by minibatch; `compared` and `lr_scale`: see `TrainStep`."""
        minibatches: list[tuple[Shares, int, int]] = []
        for part in self._former.minibatches(metas):
            tokens = sum(self._former.tokens_in_loss(meta, policy_version=policy_version) for meta in part)
            shares = self._buffer.deal([meta.seq for meta in part], self._layout)
            minibatches.append((shares, tokens, sum(meta.episode_count for meta in part)))
        everything = [
            [seq for shares, _, _ in minibatches for seq in shares[data]] for data in range(self._layout.data)
        ]
        plan = self._buffer.bring(everything, self.mfc.inputs, self._layout)
        pre, post = self._pre_hooks.due(policy_version), self._post_hooks.due(policy_version + 1)
        kept = self._sampled(metas, policy_version=policy_version) if self.mfc.role == "actor" else frozenset[int]()
        calls = {}
        for worker in range(self._layout.world):
            data = self._layout.coordinates(worker).data
            calls[worker] = TrainStep(
                mfc=self.mfc.name,
                policy_version=policy_version,
                oldest_version=policy_version - self._former.max_staleness,
                minibatches=[MinibatchShare(shares[data], tokens, size) for shares, tokens, size in minibatches],
                compared=compared,
                lr_scale=lr_scale,
                kept=[seq for seq in everything[data] if seq in kept],
                pre_hooks=[*_transfer(plan, worker), *pre],
                post_hooks=post,
            )
        replies = await self._channel.request(calls, TrainReply, timeout=self._timeout)
        return list(replies.values())

    def _sampled(self, metas: Sequence[SampleMeta], *, policy_version: int) -> frozenset[int]:
        """Return the groups for which the run keeps every token: a random sample of the batch, but the same in each
        run."""
        chance = random.Random(policy_version)
        return frozenset(chance.sample([meta.seq for meta in metas], min(self._kept_per_step, len(metas))))


def _transfer(plan: Sequence[Transfer], worker: int) -> list[Hook]:
    """Return the part of `plan` that `worker` carries out."""
    mine = concerning(plan, worker)
    return [DataTransfer(mine)] if mine else []


class FunctionExecutor:
    """Loads data into the buffer, and runs the MFCs of one graph on it."""

    def __init__(
        self,
        *,
        graph: Graph,
        buffer: AsyncIOSequenceBuffer,
        channel: Requests,
        workers: ModelWorkers,
        stored: asyncio.Queue[StorageNotice],
        former: BatchFormer,
        config: Config,
        history: History,
        weights_at_rest: asyncio.Lock,
    ) -> None:
        """`stored`: notices of the workers' StreamDatasets. `history` has the policy version of the calls.
        `weights_at_rest` is held while no other task may change weights or begin to publish them, as in
        `execute_step`."""
        self._weights_at_rest = weights_at_rest
        self._history = history
        self._graph = graph
        self._buffer = buffer
        self._workers = workers
        self._stored = stored
        self._batch_groups = config.trainer.batch_groups
        self._calls = {
            mfc.name: ModelFunctionCall(
                mfc,
                channel=channel,
                buffer=buffer,
                former=former,
                config=config,
                policy_version=history.policy_version,
                kept_per_step=config.metrics.rollouts_per_step,
            )
            for source in ("arrivals", "batch")
            for mfc in graph.reading(source)
        }
        self._generation = (
            SynchronousGeneration(graph, channel=channel, buffer=buffer, config=config) if graph.of_rollout else None
        )
        self._generating = False
        self._spans: list[Span] = []

    async def load_data(self) -> None:
        """Load data into the buffer for as long as the run lasts.

        An asynchronous graph loads the groups that arrive at the workers' StreamDatasets. A synchronous graph also
        loads prompts from the data source whenever a training batch is awaited: rollout workers generate groups from
        them, which arrive in the same way.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._load_groups(), name="groups")
            if self._generation is not None:
                tasks.create_task(self._load_prompts(self._generation), name="prompts")

    async def until_generated(self) -> None:
        """Wait until no rollout worker generates groups for the last formed batch (synchronous graph)."""
        await self._buffer.until(lambda: not self._generating)

    async def _load_groups(self) -> None:
        while True:
            unwanted = self._buffer.put_batch((await self._stored.get()).metas)
            for meta in unwanted:  # given up by another worker before this one had stored it
                await self._workers.clear({meta.head: [meta.seq]}, come_again=False)

    async def _load_prompts(self, generation: SynchronousGeneration) -> None:
        while True:
            await self._buffer.until(lambda: self._buffer.batch_awaited)
            self._generating = True
            self._spans += await generation.make(self._batch_groups)
            self._generating = False
            self._buffer.wake()

    def take_spans(self) -> list[Span]:
        """Return the spans since the last call of this method."""
        spans, self._spans = self._spans, []
        return spans

    async def run_arrivals(self) -> None:
        """Run the `arrivals` MFCs forever."""
        async with asyncio.TaskGroup() as tasks:
            for mfc in self._graph.reading("arrivals"):
                tasks.create_task(self._run_arrivals_of(self._calls[mfc.name]), name=mfc.name)

    async def execute_step(
        self,
        batch: Sequence[SampleMeta],
        *,
        compared: Sibling | None = None,
        lr_scale: float = 1.0,
    ) -> StepResult:
        """Run the `batch` MFCs on `batch` concurrently, each as soon as its keys are ready.

        `compared` and `lr_scale`: see `TrainStep`.
        """
        policy_version = self._history.policy_version
        trained: list[TrainReply] = []

        async def run(mfc: MFC) -> Span:
            call, left = self._calls[mfc.name], list(batch)
            begin = compute = updating = 0.0
            while left:
                part = await self._buffer.get_batch_for_rpc(mfc, batch=left)
                left = left[len(part) :]
                begin = begin or time.time()
                if mfc.interface == "train_step":
                    done = await call.train(part, policy_version=policy_version, compared=compared, lr_scale=lr_scale)
                    trained.extend(done)
                    compute += max(result.compute_seconds for result in done)
                    updating += max(result.update_seconds for result in done)
                else:
                    compute += await call.infer(part, policy_version=policy_version)
            return Span(mfc.name, begin, time.time(), compute, updating)

        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(run(mfc), name=mfc.name) for mfc in self._graph.reading("batch")]
        spans = [task.result() for task in running]
        self._spans += spans
        return StepResult(spans, trained)

    async def _run_arrivals_of(self, call: ModelFunctionCall) -> None:
        mfc = call.mfc
        while True:
            metas = await self._buffer.get_batch_for_rpc(mfc)
            begin = time.time()
            undisturbed: AbstractAsyncContextManager[None] = nullcontext()
            if call.gives_weights(self._history.policy_version):
                # ranks that gather weights for this call cannot gather them for a publication at the same time
                undisturbed = self._weights_at_rest
            async with undisturbed:
                compute = await call.infer(metas, policy_version=self._history.policy_version)
            self._spans.append(Span(mfc.name, begin, time.time(), compute))


class DueHooks:
    """The workers' hooks before or after an MFC's calls."""

    def __init__(self, hooks: Iterable[Hook | MasterHook], *, reached: int) -> None:
        """`reached`: the policy version up to which they have been carried out."""
        self._hooks = [hook for hook in hooks if not isinstance(hook, MasterHook)]
        self._reached = reached

    def pending(self, policy_version: int) -> list[Hook]:
        """Return the hooks that are due for a call at `policy_version`."""
        return [
            hook
            for hook in self._hooks
            if not isinstance(hook, ParamRealloc) or policy_version // hook.every > self._reached // hook.every
        ]

    def due(self, policy_version: int) -> list[Hook]:
        """Return the hooks as `pending`, and record that the call carries them out."""
        found, self._reached = self.pending(policy_version), policy_version
        return found


def hooks_of(mfc: MFC, *, policy_version: int) -> tuple[DueHooks, DueHooks]:
    """Return the hooks before and the hooks after the calls of `mfc`, in a run that begins at `policy_version`."""
    before = max(policy_version - 1, 0)
    # a checkpoint is made after the step that made its version, and before any other call at that version
    after = policy_version if mfc.interface == "train_step" else before
    return DueHooks(mfc.pre_hooks, reached=before), DueHooks(mfc.post_hooks, reached=after)
