"""Everything that a checkpoint holds, copied into host memory so that training can go on while it is written.

    FOLDER/                 the policy as a Hugging Face checkpoint, with its tokenizer
    FOLDER/critic/, ref/    likewise, where there is one (the reference: where it changes)
    FOLDER/state/ROLE/      optimizer, schedule and coefficients of a trained role
    FOLDER/state/progress.json

Random numbers need no place in it: those of a training step are a function of run seed and policy
version, those of a response of run seed and sequence number.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from torch import Tensor

from streamrl import progress
from streamrl.config import Config
from streamrl.progress import Progress
from streamrl.trainer.assembly import CRITIC, REFERENCE, Assembly
from streamrl.trainer.backends.files import copies, export
from streamrl.trainer.roles.actor import Actor
from streamrl.trainer.roles.critic import Critic
from streamrl.trainer.roles.state import RoleState


class Snapshot(msgspec.Struct, frozen=True):
    """A run at the end of a step."""

    progress: Progress
    source: Path
    """Checkpoint whose settings and tokenizer the policy has."""
    weights: dict[str, dict[str, Tensor]]
    """Role → its weights, whole."""
    states: dict[str, RoleState]

    def write(self, folder: Path) -> None:
        """Into `folder`, which exists."""
        for role, weights in self.weights.items():
            target = folder if role == "actor" else folder / role
            export(target, weights.items(), source=self.source, scalar_head=role == CRITIC)
        for role, state in self.states.items():
            home = folder / progress.STATE / role
            home.mkdir(parents=True)
            state.write(home)
        progress.write(folder, self.progress)


def roles_to_save(assembly: Assembly, config: Config) -> list[str]:
    """The roles whose weights a checkpoint has: those that change."""
    saved = {"actor", CRITIC}
    if config.algorithm.ref_update_every:
        saved.add(REFERENCE)
    return [name for name in assembly.roles if name in saved]


def take_snapshot(assembly: Assembly, config: Config, reached: Progress, *, keep: bool) -> Snapshot:
    """Gather everything from all ranks; those without `keep` only take part. Collective.

    The models are on their devices, and no publication reads the weights.
    """
    weights: dict[str, dict[str, Tensor]] = {}
    states: dict[str, RoleState] = {}
    for name in roles_to_save(assembly, config):
        role = assembly.roles[name]
        weights[name] = copies(role.model.gather_weights(), keep=keep)
        if isinstance(role, Critic) or (isinstance(role, Actor) and role is assembly.actor):
            states[name] = role.state().copied(keep=keep)
    source = Path(config.run.resume_from or assembly.model_dir)
    return Snapshot(progress=reached, source=source, weights=weights, states=states)
