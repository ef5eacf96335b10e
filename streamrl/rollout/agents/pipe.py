"""What a rollout worker and the processes in which agents' functions run say to each other over a pipe.

In frames (`streamrl/children.py`) with a body in msgpack. The worker sends one `Setup`, then any number of `Begin`s
and `Cancel`s; the process replies `Ready`, and for each `Begin` one `Ended` or `Failed`, in any
order.
"""

from __future__ import annotations

from typing import Any

import msgspec

from streamrl.children import framed

MOST_AT_ONCE = 192
"""Episodes of a plain function that one process runs at the same time."""
HANG_SECONDS = 2.0
"""A process that reacts to nothing for so long hangs, and which of its episodes keeps it from that is not known. It is
replaced where it would have to end one of them."""


class Setup(msgspec.Struct, frozen=True, tag="setup"):
    """Which function to serve; the reply is `Ready`, or `Failed` with `episode` -1."""

    function: str
    """As `rollout.agent.function`."""
    memory_mb: int
    """Address space that the process may have; 0: no limit."""
    args: dict[str, Any] = {}
    """Keyword arguments of the function, besides `task` and `policy`."""


class Endpoint(msgspec.Struct, frozen=True):
    """How an episode's agent reaches the policy."""

    root: str
    """URL of the server, without the episode."""
    id: str
    """The episode's, in URLs."""
    api_key: str
    """The episode's own; no other opens it, and it opens no other."""
    model: str
    """The name under which the policy is asked. Any other is answered, too."""

    @property
    def base_url(self) -> str:
        """For OpenAI's client."""
        return f"{self.anthropic_base_url}/v1"

    @property
    def anthropic_base_url(self) -> str:
        """For Anthropic's client, which adds the `/v1`."""
        return f"{self.root}/episodes/{self.id}"

    @property
    def score_url(self) -> str:
        """Where the episode's score may be posted to."""
        return f"{self.anthropic_base_url}/score"


class Lease(msgspec.Struct, frozen=True):
    """An episode for whoever asked for one."""

    task: dict[str, Any]
    access: Endpoint


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Run the function once."""

    episode: int
    task: dict[str, Any]
    access: Endpoint
    sent: float = 0.0
    """When, in seconds of the machine's monotonic clock: from then on its time counts."""


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Nobody waits for this episode any more."""

    episode: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The function is imported."""

    threads: bool = False
    """Whether it is a plain function, of which each episode takes a thread."""


class Score(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What an agent says of its episode."""

    score: float | None = None
    """What the episode is worth as a whole: it is earned with the last answer. None: the agent does not say."""
    rewards: dict[str, float] = {}
    """What single answers earn besides: an answer's id, or its number from 0 in the order of the answers → reward."""
    metrics: dict[str, float] = {}
    """Figures of the agent's own, by name: their means are shown."""

    @property
    def said(self) -> bool:
        """Whether it says what the episode earns."""
        return self.score is not None or bool(self.rewards)


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """What the function returned: finite numbers, or nothing."""

    episode: int
    score: Score


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The function could not be imported, raised, returned something else, or was cancelled."""

    episode: int
    message: str
    held_up: bool = False
    """Whether it was cancelled, and another may have had the process hang in its time."""


ToAgents = Setup | Begin | Cancel
FromAgents = Ready | Ended | Failed


def frame(message: ToAgents | FromAgents) -> bytes:
    """Return `message` as it goes through the pipe; raises `TypeError` for values that msgpack has no type for."""
    return framed(msgspec.msgpack.encode(message))
