"""The interface of an agent's function: its `Policy`, its `Score`, and its loading.

Agents' processes import this module before the function, possibly in an interpreter that has only msgspec.
"""

from __future__ import annotations

import functools
import inspect
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from streamrl.errors import ConfigError
from streamrl.hooks import load_object
from streamrl.userland import UserFunction, finite_number

SCORE_SECONDS = 30.0


class Endpoint(msgspec.Struct, frozen=True):
    """Access of an episode's agent to the policy."""

    root: str
    """URL of the server, without the episode."""
    id: str
    """Id of the episode in URLs."""
    api_key: str
    """Key of this episode alone."""
    model: str
    """The name of the policy in requests. Requests with other names are served, too."""

    @property
    def base_url(self) -> str:
        """Base URL for OpenAI's client."""
        return f"{self.anthropic_base_url}/v1"

    @property
    def anthropic_base_url(self) -> str:
        """Base URL for Anthropic's client, which adds the `/v1`."""
        return f"{self.root}/episodes/{self.id}"

    @property
    def score_url(self) -> str:
        """URL to which the episode's score may be posted."""
        return f"{self.anthropic_base_url}/score"


class Lease(msgspec.Struct, frozen=True):
    """An episode to play."""

    task: dict[str, Any]
    access: Endpoint


class EpisodeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request to open an episode. `streamrl gateway` keeps both fields with the finished episode; a run has tasks of
    its own and ignores them."""

    task: dict[str, Any] = {}
    """The agent's task, of any JSON types."""
    group: str = ""
    """Name of the group of episodes with which this one is compared, for example the id of its task."""


class Score(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An agent's report on its episode."""

    score: float | None = None
    """Score of the whole episode, which its last answer earns; None: not reported."""
    rewards: dict[str, float] = {}
    """Additional rewards of single answers: the id of an answer, or its number from 0 in order → reward."""
    metrics: dict[str, float] = {}
    """The agent's own figures, by name; streamrl shows their means."""

    @property
    def said(self) -> bool:
        """Whether the report has a score or rewards."""
        return self.score is not None or bool(self.rewards)


class Policy:
    """The episode's own model server, for any client of OpenAI's or Anthropic's APIs."""

    def __init__(self, access: Endpoint) -> None:
        self.base_url = access.base_url
        """Base URL for OpenAI's client."""
        self.anthropic_base_url = access.anthropic_base_url
        """Base URL for Anthropic's client."""
        self.api_key = access.api_key
        self.model = access.model
        self._score_url = access.score_url

    def notify_score(
        self,
        score: float,
        *,
        rewards: Mapping[str | int, float] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Report the episode's score, instead of returning it. May be called again; the last call counts.

        `rewards`: additional rewards of single answers; the id of an answer, or its number from 0 → reward. `metrics`:
        figures of your own, by name. Raises `ValueError` for an unknown answer.
        """
        said = {"score": score, "rewards": {str(key): reward for key, reward in (rewards or {}).items()}}
        request = urllib.request.Request(
            self._score_url,
            data=json.dumps(said | {"metrics": dict(metrics or {})}).encode(),
            headers={"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=SCORE_SECONDS):
                pass
        except urllib.error.HTTPError as error:
            if error.code == 400:
                raise ValueError(json.loads(error.read())["error"]["message"]) from None
            raise


def serve_agent(*, function: str, args: dict[str, Any]) -> UserFunction:
    """Return the agent's function for an agent's process (`userland.Setup.loader`); raises `ConfigError`."""
    loaded: Callable[..., Any] = load_object(function, key="rollout.agent.function")
    try:
        inspect.signature(loaded).bind(None, None, **args)
    except TypeError as error:
        names = "".join(f", *, {name}" if not place else f", {name}" for place, name in enumerate(args))
        raise ConfigError(f"rollout.agent.function = {function!r} must take (task, policy{names}): {error}") from error
    decoder = msgspec.msgpack.Decoder(Lease)

    def arguments(payload: msgspec.Raw) -> tuple[dict[str, Any], Policy]:
        lease = decoder.decode(payload)
        return lease.task, Policy(lease.access)

    return UserFunction(functools.partial(loaded, **args), arguments=arguments, result=as_score)


def as_score(value: object) -> Score:
    """Return the return value of an agent as a `Score`; raises `ValueError` if it is none."""
    if not isinstance(value, Mapping):
        return Score(None if value is None else finite_number(value, "a score"))
    unknown = value.keys() - set(Score.__struct_fields__)
    if unknown:
        known, found = ", ".join(Score.__struct_fields__), ", ".join(sorted(map(repr, unknown)))
        raise ValueError(f"it returned a mapping with {found}; known: {known}")
    score = value.get("score")
    numbers: dict[str, dict[str, float]] = {}
    for name, what in (("rewards", "a reward"), ("metrics", "a metric")):
        given = value.get(name) or {}
        if not isinstance(given, Mapping):
            raise ValueError(f"it returned {name} = {given!r:.200}; it is a mapping to numbers")
        numbers[name] = {str(key): finite_number(number, f"{what} ({key})") for key, number in given.items()}
    return Score(None if score is None else finite_number(score, "a score"), **numbers)
