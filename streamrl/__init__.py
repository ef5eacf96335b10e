"""streamrl: asynchronous reinforcement learning for language models.

Generation and training run in separate pools; `docs/architecture.md` traces one group of
responses through the system. `docs/python.md` describes the names of this module; each is imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamrl.api import Run as Run
    from streamrl.api import Step as Step
    from streamrl.api import run as run
    from streamrl.config import Config as Config
    from streamrl.errors import ConfigError as ConfigError
    from streamrl.errors import StreamRLError as StreamRLError
    from streamrl.gserver.embedded.engine import EmbeddedEngine as EmbeddedEngine
    from streamrl.ledger import Ledger as Ledger
    from streamrl.trainer.algorithms.objective import objective as objective
    from streamrl.trainer.algorithms.tokens import Tokens as Tokens
    from streamrl.trainer.packing import pack as pack
    from streamrl.trainer.torch_trainer import TorchTrainer as TorchTrainer
    from streamrl.transport.generation import SamplingParams as SamplingParams
    from streamrl.types import Generation as Generation
    from streamrl.types import TrajectoryGroup as TrajectoryGroup

__version__ = "0.2.0"

_HOMES = {
    "Run": "api",
    "Step": "api",
    "run": "api",
    "Config": "config",
    "ConfigError": "errors",
    "StreamRLError": "errors",
    "EmbeddedEngine": "gserver.embedded.engine",
    "Ledger": "ledger",
    "objective": "trainer.algorithms.objective",
    "Tokens": "trainer.algorithms.tokens",
    "pack": "trainer.packing",
    "TorchTrainer": "trainer.torch_trainer",
    "SamplingParams": "transport.generation",
    "Generation": "types",
    "TrajectoryGroup": "types",
}
"""Public name → the module that has it."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'streamrl' has no attribute {name!r}")
    return getattr(import_module(f"streamrl.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
