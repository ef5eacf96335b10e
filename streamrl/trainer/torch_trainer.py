"""`TorchTrainer`: the training steps of a run in one process, without the run.

The calls of a step are planned by `ReplayPlan` and carried out by the model worker's `Computation`, so a step on the
same groups has the same result in a run.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from streamrl.config import Config
from streamrl.device import compute_with, resolve_device
from streamrl.errors import ConfigError, DataError
from streamrl.export import copy_settings
from streamrl.models import ensure_checkpoint
from streamrl.safetensors_files import MODEL, file_name, write_file
from streamrl.stream_dataset import StreamDataset
from streamrl.trainer.calls import TrainReply
from streamrl.trainer.graph import graph_of
from streamrl.trainer.master.batches import BatchFormer
from streamrl.trainer.master.figures import batch_metrics, train_metrics
from streamrl.trainer.replay.plan import ReplayBatch, ReplayPlan
from streamrl.trainer.replay.recording import RecordedStep
from streamrl.trainer.worker.assembly import Assembly
from streamrl.trainer.worker.computation import Computation
from streamrl.trainer.worker.data import WorkerData
from streamrl.types import TrajectoryGroup


class TorchTrainer:
    """The policy, and the other models that its algorithm needs, in this process; trains on groups of any origin."""

    def __init__(self, config: Config, *, folder: Path | None = None) -> None:
        """Load the models. `folder`: a Hugging Face checkpoint with the first weights; None: `config.model`.

        Uses `[model]`, `[trainer]`, `[algorithm]`, `[critic]`, `[reference]`, `[staleness]` and
        `rollout.sampling`. Raises `ConfigError` for settings that need several processes or a run, and `ModelError`.
        """
        graph = graph_of(config)
        mfcs = [*graph.reading("arrivals"), *graph.reading("batch")]
        _check(config, functions=[mfc.name for mfc in mfcs if mfc.interface == "function"])
        self._config = config = msgspec.structs.replace(
            config,
            run=msgspec.structs.replace(config.run, record=False, resume_from=None),
            metrics=msgspec.structs.replace(config.metrics, rollouts_per_step=0),
            weights=msgspec.structs.replace(config.weights, lora="merged"),
        )
        self.policy_version = 0
        """Number of completed training steps."""
        self.folder = folder if folder is not None else ensure_checkpoint(config)
        """The checkpoint with the first weights and the tokenizer."""
        self._assembly = Assembly(
            config,
            roles=frozenset(mfc.role for mfc in mfcs),
            model_dir=self.folder,
            rank=0,
            device=resolve_device(config.run.device),
        )
        self._groups = StreamDataset(rank=0, capacity_groups=config.capacity_groups)
        self._data = WorkerData(self._groups, rank=0)
        free = threading.Event()
        free.set()
        self._computation = Computation(
            config, rank=0, graph=graph, assembly=self._assembly, data=self._data, weights_free=free
        )
        self._plan = ReplayPlan(config, mfcs, rank=0, policy_version=0, changed=())
        self._former = BatchFormer(config)

    def train_step(self, groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
        """Train on a batch of `groups` of any number; return the figures of the step by name (docs/figures.md).

        Tokens older than `staleness.max_staleness` are left out of the loss. Raises `DataError` if two groups have the
        same `seq` or there is none, and `TrainingError`.
        """
        seqs = [group.seq for group in groups]
        if not seqs or len(set(seqs)) < len(seqs):
            raise DataError(f"a training batch needs groups with different seq, not those with {seqs}")
        compute_with(self._config.trainer.threads)
        batch = ReplayBatch(
            [RecordedStep(self.policy_version + 1, rank=0, calls=[], answers=[], groups=list(groups), given={})]
        )
        self._groups.capacity_groups = len(seqs)
        for group in groups:
            self._groups.offer(group)
        try:
            results = [self._computation.carry_out(call) for call in self._plan.calls(batch)]
        finally:
            self._data.discard(seqs, come_again=True)
        trained = [result for result in results if isinstance(result, TrainReply)]
        figures = batch_metrics(batch.metas, self._former, policy_version=self.policy_version) | train_metrics(trained)
        self.policy_version += 1
        return figures

    def logprobs(self, groups: Sequence[TrajectoryGroup]) -> list[NDArray[np.float32]]:
        """Return the policy's log-probabilities of all sampled tokens (0 elsewhere), packed like each group."""
        compute_with(self._config.trainer.threads)
        return self._assembly.actor.inference(groups) or []

    def weights(self) -> dict[str, Tensor]:
        """Return the policy's weights by Hugging Face name, not copied; an adapter is merged."""
        return dict(self._assembly.published().gather_weights())

    def save(self, folder: Path) -> Path:
        """Write the policy as a Hugging Face model into `folder`, which is returned. A model there is replaced."""
        folder.mkdir(parents=True, exist_ok=True)
        weights = self._assembly.published()
        entries = [(name, torch.float32, shape) for name, shape in weights.weight_specs()]
        write_file(folder / file_name(MODEL, 0, 1), entries, (weight for _, weight in weights.gather_weights()))
        copy_settings(self.folder, folder)
        return folder


def _check(config: Config, *, functions: Sequence[str]) -> None:
    """Raise `ConfigError` for settings that a single process without a run cannot carry out."""
    if config.trainer.workers > 1 or config.trainer.backend != "torch":
        raise ConfigError(
            f"TorchTrainer is one process with the torch backend; trainer.backend = {config.trainer.backend!r} with "
            f"{config.trainer.workers} model workers needs `streamrl run`"
        )
    if config.reward_model.path is not None:
        raise ConfigError("reward_model.path: groups for a TorchTrainer have their rewards; unset it")
    if functions:
        raise ConfigError(f"trainer.graph: {functions[0]} calls a function of the user, which needs `streamrl run`")
