"""The reward functions that come with streamrl, and the loading of your own.

A reward function of your own is a plain function

    def my_reward(response: Response, prompt: Prompt, *, scale: float = 1.0) -> float:
        return scale * float(response.text == prompt.answer)

`response.text` and `prompt.answer` are text, even if the row has `{"answer": 521}`: a value that is not a string
becomes its JSON, and a row without an answer has None. With `data.answer_type = "as_is"` answers keep the row's type.
`response.text` has no special tokens (`Response`). `prompt.metadata` has the row's other columns in their own types.

`rollout.reward.function = "my_module:my_reward"` names the function, and `rollout.reward.args` has its keyword
arguments. It runs in a reward process with a time limit (`pool.py`), may import any module, and returns a finite
number, even for a response that it cannot parse: an exception counts as a failure of infrastructure
(`rollout.on_failed_sibling`). Up to `rollout.reward.concurrent_calls` calls of a coroutine function run at the same
time in each process. `streamrl.rollout.tasks` has small examples.

Reward processes import this module before the function, so it imports little by itself.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
from collections.abc import Callable
from typing import Any

import msgspec

from streamrl.errors import ConfigError
from streamrl.hooks import load_object
from streamrl.types import Prompt
from streamrl.userland import UserFunction, finite_number

log = logging.getLogger(__name__)

RewardFunction = Callable[["Response", Prompt], Any]

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class Response(msgspec.Struct, frozen=True):
    """A response as a reward function receives it."""

    text: str
    """The sampled tokens as text, without the stop string that ended them and without special tokens: the end token and
    all others that the model's tokenizer.json marks as special, such as `<pad>`."""
    finish_reason: str
    """`stop`: the model ended it; `length`: it reached a limit."""
    output_tokens: int
    """Number of sampled tokens, including special ones."""
    turn: int = 1
    """The turn of the policy, from 1."""


class DataOrigin(msgspec.Struct, frozen=True):
    """The part of the data configuration that is needed to recreate a reasoning-gym entry."""

    source: str
    path: str
    args: dict[str, Any]
    size: int
    seed: int


def serve_reward(*, function: str, args: dict[str, Any], origin: dict[str, Any]) -> UserFunction:
    """Return the reward function for a reward process (`userland.Setup.loader`)."""
    loaded = load_reward(function, args, msgspec.convert(origin, DataOrigin))
    decoder = msgspec.msgpack.Decoder(tuple[Response, Prompt])
    return UserFunction(loaded, arguments=decoder.decode, result=functools.partial(finite_number, what="a reward"))


def load_reward(spec: str, args: dict[str, Any], origin: DataOrigin) -> RewardFunction:
    """Return the function of `rollout.reward` with its arguments bound; raises `ConfigError` if it cannot be used."""
    match spec:
        case "reasoning_gym":
            return ReasoningGymReward(origin, **args)
        case "math_verify":
            return MathVerifyReward(**args)
    function = load_object(spec, key="rollout.reward.function")
    if not callable(function):
        raise ConfigError(f"rollout.reward.function = {spec!r}: is a {type(function).__name__}, not a function")
    try:
        inspect.signature(function).bind("response", "prompt", **args)
    except TypeError as error:
        raise ConfigError(
            f"rollout.reward.function = {spec!r} cannot be called as function(response, prompt, **args) "
            f"with args {args}: {error}"
        ) from error
    return functools.partial(function, **args)


def extract_answer(text: str) -> str:
    """Return the content of the last `<answer>…</answer>`, or else the whole text, stripped."""
    tagged = _TAGGED.findall(text)
    return str(tagged[-1] if tagged else text).strip()


class ReasoningGymReward:
    """Scores with the task's own `score_answer`.

    If the scorer raises, it could not parse the answer. That is the policy's mistake and not an error of the run, so
    the answer scores 0. (Some tasks, such as `propositional_logic`, have no scorer for any answer: they always score
    0.)
    """

    def __init__(self, origin: DataOrigin) -> None:
        self._task: Any = None
        if origin.source == "reasoning_gym":
            from streamrl.rollout.data import create_reasoning_gym

            self._task = create_reasoning_gym(origin.path, size=origin.size, seed=origin.seed, args=origin.args)
        self._entry = functools.lru_cache(maxsize=64)(lambda index: self._task[index])

    def __call__(self, response: Response, prompt: Prompt) -> float:
        answer = extract_answer(response.text)
        if self._task is not None:
            # Recreated instead of taken from the prompt, since JSON types turn tuples into lists.
            scorer, entry = self._task, self._entry(prompt.index)
        else:
            scorer, entry = _scorer_named_by(prompt.metadata), {**prompt.metadata, "answer": prompt.answer}
        try:
            return float(scorer.score_answer(answer=answer, entry=entry))
        except Exception as error:  # the tolerance that the class docstring describes
            log.info("reasoning-gym could not score %r: %s: %s", answer[:80], type(error).__name__, error)
            return 0.0


def _scorer_named_by(row: dict[str, Any]) -> Any:
    """Return the task of an entry that was stored in a file; raises `ConfigError` if the entry does not name it."""
    details = row.get("metadata")
    task = details.get("source_dataset") if isinstance(details, dict) else None
    if task is None:
        raise ConfigError(
            'rollout.reward.function = "reasoning_gym" needs data.source = "reasoning_gym", or rows with the '
            f"entry's metadata.source_dataset; there is {', '.join(row) or 'nothing'}"
        )
    return _task_by_name(str(task))


@functools.lru_cache(maxsize=256)
def _task_by_name(task: str) -> Any:
    from streamrl.rollout.data import create_reasoning_gym

    return create_reasoning_gym(task, size=1, seed=0, args={})


class MathVerifyReward:
    """1 if math-verify finds the response's mathematical answer equal to the reference, else 0."""

    def __init__(self) -> None:
        try:
            import math_verify
        except ModuleNotFoundError as error:
            raise ConfigError('math-verify is not installed: pip install "streamrl[rewards]"') from error
        self._parse = math_verify.parse
        self._verify = math_verify.verify

    def __call__(self, response: Response, prompt: Prompt) -> float:
        if prompt.answer is None:
            raise ValueError("math_verify needs a reference answer; set data.answer_key to its column")
        # Reference answers often have no dollars ("\frac{1}{2}"), and math-verify finds LaTeX only between dollars.
        reference = str(prompt.answer)
        gold = self._parse(reference if "$" in reference or "\\boxed" in reference else f"${reference}$")
        if not gold:
            raise ValueError(f"math_verify finds no mathematics in the reference answer {reference!r}")
        return float(self._verify(gold, self._parse(extract_answer(response.text))))
