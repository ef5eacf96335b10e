"""Has each gserver score one response under each version that it serves, so that the trainer can compare.

The trainer names the response as soon as it begins to train from a version; a gserver is asked once it serves that
version, and scores it beside its other requests: nothing waits for it. Scores that have not come when the next version
is served are reported as missing. Owns the scores of the version that is served and of the one before it.

Invariants: scores count only if all of them were computed while the gserver called its weights by that version; each
gserver that took groups under a version that was asked about is in the scores, with log-probabilities or with the
reason why there are none.
"""

from __future__ import annotations

import asyncio
import math
import time

import msgspec

from streamrl import essential
from streamrl.errors import StreamRLError
from streamrl.gserver.manager.gserver import Gserver, serves
from streamrl.gserver.manager.routing import Fleet
from streamrl.ledger import Ledger
from streamrl.transport.control import Compare, Done, Scores
from streamrl.transport.generation import GenerateReply, GenerateRequest, GenerationClient, SamplingParams, adapter_name

NO_MODEL = "simulated"
"""The engine that has no model."""


class Comparisons:
    """Asks gservers for scores under the ledger's policy version, and keeps them."""

    def __init__(self, *, fleet: Fleet, client: GenerationClient, ledger: Ledger, named_adapters: bool = False) -> None:
        """`named_adapters`: as in `Config`."""
        self._named_adapters = named_adapters
        self._fleet = fleet
        self._client = client
        self._ledger = ledger
        self._asked: Compare | None = None
        """The latest question; what it is about may not be served yet."""
        self._scores: dict[int, dict[Gserver, Scores]] = {}
        """Policy version → gserver → its scores."""
        self._running: dict[Gserver, tuple[int, asyncio.Task[None]]] = {}
        """Gserver that is being asked → about which version, and the request."""

    async def ask(self, message: Compare) -> Done:
        """Take in a response that the trainer wants scored."""
        self._asked = message
        self.look()
        return Done()

    def scores(self, version: int) -> list[Scores]:
        """Return the scores of `version` by index of the gserver; complete once the next version is served."""
        scores = self._scores.get(version, {})
        return [scores[gserver] for gserver in sorted(scores, key=lambda g: g.index)]

    def look(self) -> None:
        """Ask all gservers that serve the version in question."""
        for gserver in self._fleet.serving():
            self.look_at(gserver)

    def look_at(self, gserver: Gserver) -> None:
        """Ask `gserver`, unless it has replied or does not serve the version in question; one whose request failed is
        asked again."""
        question = self._asked
        if question is None or question.version != self._ledger.policy_version or not gserver.serving:
            return
        before = self._scores.get(question.version, {}).get(gserver)
        if gserver in self._running or (before is not None and not before.problem):
            return
        task = essential.begin(self._score(gserver, question), name=f"{gserver.name} scores v{question.version}")
        self._running[gserver] = question.version, task

    def next_version(self, version: int) -> None:
        """`version` is served from now on: scores of the one before it that have not come will not come."""
        late = "it had not answered when the next weights came"
        for gserver, (asked, task) in self._running.items():
            task.cancel()
            self._scores.setdefault(asked, {}).setdefault(gserver, Scores(gserver.name, problem=late))
        self._running.clear()
        for old in [known for known in self._scores if known < version - 1]:
            del self._scores[old]

    async def close(self) -> None:
        """Cancel the requests in progress, and forget all questions and scores."""
        self._asked = None
        self._scores.clear()
        tasks = [task for _, task in self._running.values()]
        self._running.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _score(self, gserver: Gserver, question: Compare) -> None:
        began = time.monotonic()
        if gserver.info is not None and gserver.info.engine == NO_MODEL:
            score = Scores(gserver.name, problem="its engine is simulated, it has no model")
        else:
            try:
                reply = await self._client.generate(gserver.address, self._request(question))
            except StreamRLError as error:
                score = Scores(gserver.name, problem=str(error))
            else:
                score = read_scores(
                    reply, question, gserver=gserver.name, label=self._ledger.lineage.label(question.version)
                )
        score = msgspec.structs.replace(score, seconds=time.monotonic() - began)
        self._scores.setdefault(question.version, {})[gserver] = score
        self._running.pop(gserver, None)

    def _request(self, question: Compare) -> GenerateRequest:
        return GenerateRequest(
            input_ids=list(question.tokens),
            sampling_params=SamplingParams(max_new_tokens=0),
            return_logprob=True,
            logprob_start_len=question.start - 1,  # SGLang says nothing of the first
            lora_path=adapter_name(question.version) if self._named_adapters else None,
        )


def read_scores(reply: GenerateReply, question: Compare, *, gserver: str, label: str) -> Scores:
    """Return the log-probabilities in `reply`, or why it is no reply to `question` under the weights called `label`."""
    meta = reply.meta_info
    wanted = question.tokens[question.start :]
    told = (meta.input_token_logprobs or [])[-len(wanted) :]
    named = [token for _, token, _ in told]
    same = len(named) == len(wanted) and all(name in (token, 0) for name, token in zip(named, wanted, strict=True))
    logprobs = [logprob for logprob, _, _ in told if logprob is not None and math.isfinite(logprob)]
    problem = ""
    if meta.finish_reason is not None and meta.finish_reason.type == "abort":
        problem = f"its answer was broken off: {meta.finish_reason.message or 'no reason given'}"
    elif not serves(meta.weight_version, label):
        problem = f"it answered with weights {meta.weight_version!r}"
    elif not same:  # SGLang calls the last token of the vocabulary 0; what it tells of it is right
        problem = f"it told log-probabilities of {len(told)} tokens, not of the {len(wanted)} that it was asked for"
    elif len(logprobs) != len(wanted):
        problem = f"{len(wanted) - len(logprobs)} of its log-probabilities are not finite"
    if problem:
        return Scores(gserver, problem=problem)
    return Scores(gserver, logprobs, computed=meta.prompt_tokens - meta.cached_tokens)
