"""Workflows of plain functions whose parameters name models and data (ECS). docs/graphs.md has an example.

`trainer.graph = "my_graph:workflow"` with `workflow = MasterWorkerECS([ref_inf, actor_train])` traces each function
once, with handles in place of models and data. Each `generate`, `inference` and `train_step` that a function calls on a
model becomes an MFC of the graph (`trainer/graph.py`). The order of the calls follows from their keys alone.
`packed_input_ids` stands for all arrays that belong to a group's tokens: mask, lengths, log-probabilities, versions.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Generic, get_args, get_origin

from streamrl.config import Config
from streamrl.errors import ConfigError
from streamrl.trainer.graph import GENERATED_KEYS, MFC, ROLLOUT, STREAM_KEYS, Interface, model_call, required_keys
from streamrl.trainer.layout import ROLES

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    Name = TypeVar("Name", default=Any)

    class Query(Generic[Name]):
        """`ModelQuery["ref"]` and `Annotated[ModelQuery, "ref"]` are the same annotation; checkers read the second."""
else:

    class Query:
        def __class_getitem__(cls, name):
            return cls if name is Name else Annotated[cls, name]

    Name = object()

IDS, PROMPTS = "packed_input_ids", "prompts"
INFERRED_KEYS = {
    "actor": "proximal_logprobs",
    "ref": "ref_logprobs",
    "critic": "values",
    "reward": "rewards",
}
"""Model → the key of the array that its `inference` returns."""
TRAINING_KEYS = STREAM_KEYS | {"ref_logprobs", "proximal_logprobs", "values", "advantages"}
"""Keys that `train_step` accepts."""
SHORT = {"generate": "gen", "inference": "inf", "train_step": "train"}
"""Interface → suffix of an MFC's name, if its function calls several models."""


@dataclass
class ModelCall:
    """One call on a model in a function: an MFC without the configuration."""

    model: str
    interface: Interface
    inputs: frozenset[str]
    outputs: set[str] = field(default_factory=set)
    """Keys of the used results; filled while the function is traced."""
    name: str = ""
    """Name of the MFC; set once the function has returned."""

    def mfc(self, config: Config) -> MFC:
        """Return the MFC; rollout workers run generation, and also rewards if there is no reward model."""
        scored_by_rollout = self.model == "reward" and config.reward_model.path is None
        role = ROLLOUT if scored_by_rollout or self.interface == "generate" else self.model
        return model_call(config, self.name, role, self.interface, self.inputs, frozenset(self.outputs))


class DataQuery(Query[Name]):
    """A handle of the data with a key: data of the groups, or computed by a model of this or another function."""

    def __init__(self, key: str, call: ModelCall | None = None) -> None:
        """`call`: the call of the same function that computes it, if any."""
        self.key = key
        self.call = call

    def __bool__(self) -> bool:
        raise ConfigError(f"{self.key} has no value while a function is traced; do not branch on data")


class RawDataQuery(DataQuery[Name]):
    """A handle of data of the prompt source, for `generate`: `RawDataQuery["prompts"]`."""


class ModelInputs:
    """The arguments of a call on a model: keys of data."""

    def __init__(self, keys: frozenset[str]) -> None:
        self.keys = keys


class ModelOutputs:
    """The results of a call on a model, by key."""

    def __init__(self, call: ModelCall, keys: Iterable[str], where: str) -> None:
        self._call = call
        self._keys = frozenset(keys)
        self._where = where

    def __getitem__(self, key: str) -> DataQuery:
        if key not in self._keys:
            raise ConfigError(f"{self._where} returns {', '.join(sorted(self._keys))}, not {key}")
        return DataQuery(key, self._call)


class Commands:
    """Operations on data, for one function."""

    def __init__(self, function: str) -> None:
        self.function = function
        self.calls: list[ModelCall] = []
        self.given: set[str] = set()
        """Keys that the function passed to a model."""

    def build_model_inputs(self, **data: DataQuery) -> ModelInputs:
        """Return the arguments of a call on a model; each name must equal the key of its data."""
        for name, handle in data.items():
            where = f"{self.function}: build_model_inputs({name}=…)"
            if not isinstance(handle, DataQuery):
                raise ConfigError(f"{where} takes a parameter or a result of a model, not {type(handle).__name__}")
            if handle.key != name:
                raise ConfigError(f"{where} is given key {handle.key}; models read data by key, so give it key {name}")
            if handle.call is not None:
                self._publish(name, handle, handle.call)
            self.given.add(name)
        return ModelInputs(frozenset(data))

    def set_data(self, key: str, data: DataQuery) -> None:
        """Publish `data`, a result of a model, to other functions as `key`."""
        if not isinstance(data, DataQuery) or data.call is None:
            raise ConfigError(f"{self.function}: set_data({key!r}, …) takes a result of a model called in the function")
        self._publish(key, data, data.call)

    def _publish(self, key: str, data: DataQuery, call: ModelCall) -> None:
        if call.interface != "generate":
            call.outputs.add(key)
        elif key != data.key:
            raise ConfigError(f"{self.function}: {data.key} cannot be renamed to {key}; generated data keep their keys")
        else:
            call.outputs |= GENERATED_KEYS


class ModelQuery(Query[Name]):
    """A handle of a model: `actor`, `ref`, `critic` or `reward`."""

    def __init__(self, model: str, commands: Commands) -> None:
        self._model = model
        self._commands = commands

    def generate(self, inputs: ModelInputs) -> ModelOutputs:
        """Sample a group of responses for each prompt; returns `packed_input_ids`."""
        return self._call("generate", inputs, takes={PROMPTS}, needs=PROMPTS, returns=GENERATED_KEYS)

    def inference(self, inputs: ModelInputs) -> ModelOutputs:
        """Make a forward pass; returns one array, whose key depends on the model (`INFERRED_KEYS`)."""
        takes = required_keys(self._model, "inference")
        return self._call("inference", inputs, takes=takes, needs=IDS, returns={INFERRED_KEYS[self._model]})

    def train_step(self, inputs: ModelInputs) -> None:
        """Train on the batch: all minibatches and epochs of the algorithm."""
        self._call("train_step", inputs, takes=TRAINING_KEYS, needs=IDS, returns=())

    def _call(
        self, interface: Interface, inputs: ModelInputs, *, takes: Iterable[str], needs: str, returns: Iterable[str]
    ) -> ModelOutputs:
        where = f"{self._commands.function}: {self._model}.{interface}"
        if not isinstance(inputs, ModelInputs):
            raise ConfigError(f"{where} takes commands.build_model_inputs(…), not {type(inputs).__name__}")
        if interface == "generate" and self._model != "actor":
            raise ConfigError(f"{where}: only the actor generates")
        if needs not in inputs.keys:
            raise ConfigError(f"{where} lacks the argument {needs}; add it to build_model_inputs")
        if unknown := sorted(inputs.keys.difference(takes)):
            raise ConfigError(f"{where} has no argument {unknown[0]}; it has {', '.join(sorted(takes))}")
        calls = self._commands.calls
        if interface != "train_step" and any((c.model, c.interface) == (self._model, "train_step") for c in calls):
            raise ConfigError(f"{where} comes after a train_step, but keys alone decide the order; move it before that")
        keys = frozenset() if interface == "generate" else inputs.keys | required_keys(self._model, interface)
        call = ModelCall(self._model, interface, keys)
        calls.append(call)
        return ModelOutputs(call, returns, where)


class MasterWorkerECS:
    """A workflow: its functions become the master's graph. MFCs are also accepted, and stay unchanged."""

    def __init__(self, functions: Sequence[Callable[..., None] | MFC]) -> None:
        self._functions = list(functions)

    @cached_property
    def calls(self) -> list[ModelCall | MFC]:
        """The model calls of all functions, in the order of the functions."""
        found: list[ModelCall | MFC] = []
        for function in self._functions:
            found += [function] if isinstance(function, MFC) else trace(function)
        return found

    def __call__(self, config: Config) -> list[MFC]:
        """Return the MFCs of a run of `config`."""
        return [call if isinstance(call, MFC) else call.mfc(config) for call in self.calls]


def trace(function: Callable[..., None]) -> list[ModelCall]:
    """Call `function` with handles and return its model calls; all of them wait for the parameters that it passes to no
    model.

    Raises `ConfigError` if it makes no call, or does not use a result."""
    name = function.__name__
    commands = Commands(name)
    try:
        parameters = inspect.signature(function, eval_str=True).parameters.values()
    except NameError as error:
        raise ConfigError(f"{name}: an annotation is not readable ({error}); quote or define that name") from error
    arguments = {parameter.name: _handle(parameter, commands) for parameter in parameters}
    function(**arguments)
    calls = commands.calls
    if not calls:
        raise ConfigError(f"{name} calls no model; call generate, inference or train_step, or remove the function")
    data = {argument.key for argument in arguments.values() if type(argument) is DataQuery}
    counts = Counter[str]()
    for call in calls:
        if call.interface != "train_step" and not call.outputs:
            raise ConfigError(f"{name}: the result of {call.model}.{call.interface} is not used; give it to set_data")
        call.inputs |= data - commands.given
        own_name = f"{name}.{call.model}_{SHORT[call.interface]}"
        counts[own_name] += 1
        call.name = name if len(calls) == 1 else own_name + (f"_{counts[own_name]}" if counts[own_name] > 1 else "")
    return calls


def _handle(parameter: inspect.Parameter, commands: Commands) -> Any:
    """Return the argument for `parameter`: a handle, or `commands`."""
    where = f"{commands.function}: parameter {parameter.name}"
    if parameter.annotation is Commands:
        return commands
    is_query = get_origin(parameter.annotation) is Annotated
    kind, name = get_args(parameter.annotation)[:2] if is_query else (None, None)
    if kind is ModelQuery and name not in ROLES:
        raise ConfigError(f"{where} asks for the model {name!r}; there are {', '.join(ROLES)}")
    if kind is RawDataQuery and name != PROMPTS:
        raise ConfigError(f"{where} asks for raw data {name!r}; there is {PROMPTS!r}")
    if kind is ModelQuery:
        return ModelQuery(name, commands)
    if kind in (DataQuery, RawDataQuery) and isinstance(name, str):
        return kind(name)
    raise ConfigError(f'{where} is none of Commands, ModelQuery["…"], DataQuery["…"], RawDataQuery["…"]; annotate it')
