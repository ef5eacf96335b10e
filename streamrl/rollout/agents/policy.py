"""`Policy`: what an agent's function is given to reach the policy in training."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping

from streamrl.rollout.agents.pipe import Endpoint

SCORE_SECONDS = 30.0


class Policy:
    """A model server of the episode's own; any client of OpenAI's or Anthropic's APIs talks to it."""

    def __init__(self, access: Endpoint) -> None:
        self.base_url = access.base_url
        """For OpenAI's client."""
        self.anthropic_base_url = access.anthropic_base_url
        """For Anthropic's client."""
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
        """Say what the episode is worth, instead of returning it; may be said again, the last one counts.

        `rewards`: what single answers earn besides; the id of an answer, or its number from 0 → reward. `metrics`:
        figures of your own, by name. Raises `ValueError` for an answer that there is not.
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
