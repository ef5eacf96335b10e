"""Construction of a run's models on one model worker: the roles of the graph, each with its backend and layout."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from streamrl.checksum import tensor_sums
from streamrl.config import Config, by_task
from streamrl.config.trainer import RoleName, role_config
from streamrl.device import resolve_dtype
from streamrl.errors import ModelError
from streamrl.hooks import without_garbage_collection
from streamrl.models import check_checkpoint, check_tokens, initial_checkpoint
from streamrl.records import progress
from streamrl.trainer.algorithms import registry
from streamrl.trainer.algorithms.losses import KLCoefficient
from streamrl.trainer.backends.base import AdaptedModel, Head, ModelSpec, ParallelModel, Ranks, WholeWeights
from streamrl.trainer.graph import graph_of
from streamrl.trainer.layout import Layout, layout_of
from streamrl.trainer.roles.actor import Actor
from streamrl.trainer.roles.critic import Critic, RewardModel

Role = Actor | Critic | RewardModel
CRITIC, REFERENCE = "critic", "ref"
"""Folders of the critic's and the reference's weights in a checkpoint."""


class Assembly:
    """The roles of one worker."""

    def __init__(
        self, config: Config, *, roles: frozenset[str], model_dir: Path, rank: int, device: torch.device
    ) -> None:
        """Load all models. Collective; torch's default process group must exist if there are several workers, or a
        backend that needs it."""
        self._config = config
        self.model_dir = model_dir
        self.rank = rank
        self.device = device
        self._kl = KLCoefficient(
            config.algorithm.kl_coef, target=config.algorithm.kl_target, horizon=config.algorithm.kl_horizon
        )
        makers: dict[str, Callable[[], Role]] = {
            "actor": self._actor,
            "ref": self._reference,
            "critic": self._critic,
            "reward": self._reward_model,
        }
        self.folders: dict[str, Path] = {}
        """Checkpoint from which each role was loaded; the model's settings and tokenizer are there."""
        self.reference_changes = False
        """Whether the reference differs from the first policy, and therefore belongs into checkpoints."""
        self.roles: dict[str, Role] = {}
        for name, make in makers.items():
            if name in roles | {"actor"}:
                self.roles[name] = make()

    @property
    def actor(self) -> Actor:
        """The policy, which every run has."""
        role = self.roles["actor"]
        assert isinstance(role, Actor)
        return role

    def layout(self, role: str) -> Layout:
        return layout_of(self._config.trainer, role)

    def _actor(self) -> Role:
        algorithm = self._config.algorithm
        for own in by_task(self._config).values():
            registry.check(own.algorithm)  # a wrong function is found before the model is loaded
        model = self._model(
            "actor", self.model_dir, head="tokens", lr=self._config.trainer.lr, entropy=algorithm.entropy_coef > 0
        )
        return self._policy(model, "actor")

    def published(self) -> WholeWeights:
        """Return the policy's weights for the gservers."""
        model = self.actor.model
        if self._config.model.lora is None or self._config.weights.lora == "adapter":
            return model
        return cast(AdaptedModel, model).merged()

    def _reference(self) -> Role:
        if self._config.reference.path is not None:
            teacher = self._other_model(self._config.reference.path, setting="reference.path")
            return self._policy(self._model("ref", teacher, head="tokens"), "ref")
        if self._config.model.lora is not None:  # the reference is the base model of the adapter
            adapted = cast(AdaptedModel, self.actor.model)
            return self._policy(adapted, "ref", inferring=adapted.without_adapter)
        moved, share = self._resumed(REFERENCE), graph_of(self._config).share_taken_by("ref")
        self.reference_changes = moved is not None or share is not None
        averaged = share is not None and share < 1
        model = self._model("ref", moved or self._first_weights(), head="tokens", averaged=averaged)
        return self._policy(model, "ref")

    def _critic(self) -> Role:
        critic = self._config.critic
        folder = self._resumed(CRITIC)
        if folder is None:
            named = critic.path
            folder = self._first_weights() if named is None else self._other_model(named, setting="critic.path")
        model = self._model("critic", folder, head="scalar", lr=critic.lr)
        return Critic(
            model,
            ranks=self._ranks("critic"),
            trainer=self._config.trainer,
            critic=critic,
            algorithm=self._config.algorithm,
            kl=self._kl,
            device=self.device,
        )

    def _reward_model(self) -> Role:
        path = self._config.reward_model.path
        if path is None:
            raise ModelError("the graph needs a reward model, but reward_model.path is not set")
        folder = self._other_model(path, setting="reward_model.path")
        return RewardModel(self._model("reward", folder, head="scalar"), trainer=self._config.trainer)

    def _policy(
        self, model: ParallelModel, role: str, *, inferring: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> Actor:
        return Actor(
            model,
            ranks=self._ranks(role),
            trainer=self._config.trainer,
            algorithm=self._config.algorithm,
            advantage=registry.advantage_by_task(self._config),
            kl=self._kl,
            longest=self._config.longest_response,
            device=self.device,
            temperature=self._config.rollout.sampling.temperature,
            inferring=inferring,
        )

    def _ranks(self, role: str) -> Ranks:
        return Ranks(self.layout(role), self.rank, device=self.device)

    def _resumed(self, role: str) -> Path | None:
        """Return the folder with weights of `role` in the checkpoint from which the run is resumed, or None."""
        if self._config.run.resume_from is None:
            return None
        folder = Path(self._config.run.resume_from) / role
        return folder if folder.is_dir() else None

    def _other_model(self, path: str, *, setting: str) -> Path:
        """Return the folder of a model that uses the policy's tokens; raises `ModelError` if it does not."""
        folder = Path(path).expanduser()
        check_checkpoint(folder, setting=setting)
        check_tokens(folder, self.model_dir, setting=setting)
        return folder

    def _first_weights(self) -> Path:
        return initial_checkpoint(self._config) if self._config.run.resume_from else self.model_dir

    def _model(
        self,
        role: RoleName,
        folder: Path,
        *,
        head: Head,
        lr: float | None = None,
        entropy: bool = False,
        averaged: bool = False,
    ) -> ParallelModel:
        config, trainer = self._config, self._config.trainer
        self.folders[role] = folder
        updates = config.algorithm.minibatches * config.algorithm.epochs  # of each training step
        begun = None if config.run.resume_from is None else progress.read(Path(config.run.resume_from))
        steps, groups = (0, 0) if begun is None else (begun.policy_version, begun.groups_trained)
        spec = ModelSpec(
            folder=folder,
            head=head,
            device=self.device,
            dtype=resolve_dtype(trainer.dtype, self.device),
            temperature=config.rollout.sampling.temperature if head == "tokens" else 1.0,
            entropy_gradient=entropy,
            lr=lr,
            averaged=averaged,
            optimizer=config.critic_optimizer if role == "critic" else trainer.optimizer,
            total_updates=config.planned_steps(steps=steps, groups=groups) * updates,
            updates_before=None if begun is None else steps * updates,
            gradient_checkpointing=trainer.gradient_checkpointing,
            compiled=trainer.compile and self.device.type == "cuda",
            shard=trainer.shard,
            offload_optimizer="optimizer" in trainer.offload,
            lora=config.model.lora if role == "actor" else None,
            adapter=Path(config.run.resume_from) if role == "actor" and config.run.resume_from else None,
            seed=config.run.seed,
            router_aux_loss_coef=config.algorithm.router_aux_loss_coef if role == "actor" else 0.0,
            replay_routing=trainer.replay_routing and role == "actor",
        )
        layout = self.layout(role)
        with without_garbage_collection():
            if role_config(trainer, role).backend == "torch":
                from streamrl.trainer.backends.torch import TorchModel

                return TorchModel(spec, world=layout.world, context=layout.context)
            with megatron_needed():
                from streamrl.trainer.backends.megatron.model import MegatronModel
            return MegatronModel(spec, layout=layout, rank=self.rank, timeout_seconds=config.limits.call_seconds)


def give_weights(source: ParallelModel, target: ParallelModel, *, share: float, world: int) -> None:
    """Compute `target ← (1 - share) · target + share · source`, between any two layouts. Collective."""

    def mixed() -> Iterator[tuple[str, Tensor]]:
        shapes = dict(source.weight_specs())
        own = target.gather_weights() if share < 1 else None
        for name, weight in source.gather_weights():
            if own is not None:
                _, before = next(own)  # on all ranks, since all of them gather a model that is spread
                weight = torch.lerp(before.to(weight.dtype), weight, share) if weight.numel() else weight
            yield name, _from_rank_0(weight, shapes[name], world)

    target.load_weights(mixed())


def fingerprints(assembly: Assembly) -> dict[str, str]:
    """Return the fingerprint of the weights of each trained role on rank 0, and an empty mapping elsewhere.
    Collective."""
    found = {}
    for name, role in assembly.roles.items():
        if isinstance(role, Critic) or role is assembly.actor:
            whole = hashlib.blake2b(digest_size=16)
            for weight_name, weight in role.model.gather_weights():
                if weight.numel():
                    whole.update(f"{weight_name} {tuple(weight.shape)} {tensor_sums(weight)}\n".encode())
            found[name] = whole.hexdigest()
    return found if assembly.rank == 0 else {}


def resume(assembly: Assembly, folder: Path) -> None:
    """Load the states in the checkpoint `folder`. Collective. Raises `ModelError` if one is damaged, or belongs to
    another model."""
    state = folder / progress.STATE
    for name, role in assembly.roles.items():
        if isinstance(role, Critic) or role is assembly.actor:
            if not (state / name).is_dir():
                raise ModelError(
                    f"the checkpoint {folder} has no {name}: the run that wrote it trained none. Continue with the "
                    "settings of that run (algorithm.advantage, trainer.graph), or begin a new run with its weights "
                    "(model.path)"
                )
            try:
                role.load_state(state / name)
            except ModelError as error:
                raise ModelError(
                    f"{error}; if the checkpoint is damaged, remove {folder}: --resume continues from the one before it"
                ) from error


def _from_rank_0(weight: Tensor, shape: tuple[int, ...], world: int) -> Tensor:
    if world == 1:
        return weight
    whole = weight.contiguous() if dist.get_rank() == 0 else weight.new_empty(shape)
    dist.broadcast(whole, src=0)
    return whole


@contextmanager
def megatron_needed() -> Iterator[None]:
    """Raise `ModelError` if an import within the context fails because Megatron Core is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModelError(
            f'trainer.backend = "megatron" needs Megatron Core ({error}); run: pip install "streamrl[megatron]"'
        ) from error
