"""Checks of a gserver's weights: their version before it is given groups (on joining, after silence, after a failure),
and its scores of one response under each version that it serves, for comparison by the trainer.

Invariants: at most one check of a gserver is in progress. A gserver that does not reply is suspect; its next heartbeat
starts the next check.

The trainer names the response as soon as it begins to train from a version. The manager requests scores from a gserver
once it serves that version; the gserver computes them along with its other requests, and nothing waits for them. Scores
that have not arrived when the next version is served are reported as missing. `Comparisons` owns the scores of the
served version and of the one before it. Invariants: scores count only if all of them were computed while the gserver
labelled its weights with that version; each gserver that took groups under a version with a comparison is in the
scores, with log-probabilities or with the reason for their absence.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from streamrl import essential
from streamrl.errors import StreamRLError
from streamrl.gserver.manager.gserver import Gserver, serves
from streamrl.gserver.manager.registry import MemberEvent, MemberState
from streamrl.gserver.manager.routing import Fleet
from streamrl.gserver.updates.calls import WeightCalls
from streamrl.ledger import Ledger
from streamrl.transport.control import Scores
from streamrl.transport.generation import GenerateReply, GenerateRequest, GenerationClient, SamplingParams, adapter_name
from streamrl.waits import ANSWER_SECONDS, cancel

log = logging.getLogger(__name__)

NO_MODEL = "simulated"
"""Name of the engine that has no model."""


@dataclass(kw_only=True, eq=False)
class GserverChecks:
    """Requests the abilities and the weight version of gservers, and compares the version with the ledger's. Calls
    `on_checked` after every check."""

    calls: WeightCalls
    ledger: Ledger
    on_checked: Callable[[], None]

    def __post_init__(self) -> None:
        self._running: dict[Gserver, asyncio.Task[None]] = {}

    def start(self, gserver: Gserver) -> asyncio.Task[None]:
        """Start a check of `gserver`, unless one is in progress; return its task."""
        task = self._running.get(gserver)
        if task is None:
            task = essential.begin(self._check(gserver), name=f"check of {gserver.name}")
            self._running[gserver] = task
            task.add_done_callback(lambda _: self._running.pop(gserver, None))
        return task

    async def close(self) -> None:
        """End the checks in progress."""
        await cancel(*self._running.values())

    async def _check(self, gserver: Gserver) -> None:
        try:
            gserver.info = await self.calls.info(gserver)
            if gserver.state is MemberState.SUSPECT:
                await self.calls.resume(gserver, timeout=ANSWER_SECONDS)
            label = await self.calls.label(gserver)
        except StreamRLError as error:
            log.warning("%s takes no groups until it replies: %s", gserver.name, error)
            gserver.handle(MemberEvent.UNREACHABLE)
        else:
            self._found(gserver, label)
        self.on_checked()

    def _found(self, gserver: Gserver, label: str) -> None:
        """Compare `label`, by which `gserver` labels its weights, with the current version, and update its state."""
        unchecked = gserver.state in (MemberState.UNCHECKED, MemberState.SUSPECT)
        wanted = self.ledger.lineage.label(self.ledger.policy_version)
        if serves(label, wanted):
            gserver.handle(MemberEvent.FOUND_CURRENT)
            if unchecked:
                log.info("%s at %s takes groups", gserver.name, gserver.address)
        else:
            gserver.handle(MemberEvent.FOUND_OUTDATED)
            if unchecked:
                log.info(
                    "%s serves weights %r instead of %r: it takes groups once it has them",
                    *(gserver.name, label, wanted),
                )


class Question(NamedTuple):
    """A response to be scored by every gserver that serves `version`."""

    version: int
    tokens: Sequence[int]
    """Prompt and response."""
    start: int
    """Index of the first token, above 0, to score; all tokens after it are scored, too."""


@dataclass(kw_only=True, eq=False)
class Comparisons:
    """Requests scores from gservers under the ledger's policy version, and keeps them."""

    fleet: Fleet
    client: GenerationClient
    ledger: Ledger
    named_adapters: bool = False
    """As in `Config`."""

    def __post_init__(self) -> None:
        self._asked: Question | None = None
        """The latest comparison; its version may not be served yet."""
        self._scores: dict[int, dict[Gserver, Scores]] = {}
        """Policy version → gserver → its scores."""
        self._running: dict[Gserver, tuple[int, asyncio.Task[None]]] = {}
        """Gserver with a scoring request in progress → the version, and the request's task."""

    def ask(self, question: Question) -> None:
        """Have a response scored, now by the gservers that serve its version, and later by others once they do."""
        self._asked = question
        self.look()

    def scores(self, version: int) -> list[Scores]:
        """Return the scores of `version` by gserver index; complete once the next version is served."""
        scores = self._scores.get(version, {})
        return [scores[gserver] for gserver in sorted(scores, key=lambda g: g.index)]

    def look(self) -> None:
        """Request scores from all gservers that serve the version of the comparison."""
        for gserver in self.fleet.serving():
            self.look_at(gserver)

    def look_at(self, gserver: Gserver) -> None:
        """Request scores from `gserver` if it serves the version of the comparison and has not scored it yet.

        A failed request is repeated.
        """
        question = self._asked
        if question is None or question.version != self.ledger.policy_version or not gserver.serving:
            return
        before = self._scores.get(question.version, {}).get(gserver)
        if gserver in self._running or (before is not None and not before.problem):
            return
        task = essential.begin(self._score(gserver, question), name=f"{gserver.name} scores v{question.version}")
        self._running[gserver] = question.version, task

    def next_version(self, version: int) -> None:
        """Record that `version` is served from now on: missing scores of the version before will not come."""
        late = "it had not replied when the next weights came"
        for gserver, (asked, task) in self._running.items():
            task.cancel()
            self._scores.setdefault(asked, {}).setdefault(gserver, Scores(gserver.name, problem=late))
        self._running.clear()
        for old in [known for known in self._scores if known < version - 1]:
            del self._scores[old]

    async def close(self) -> None:
        """Cancel the requests in progress, and forget the comparison and all scores."""
        self._asked = None
        self._scores.clear()
        tasks = [task for _, task in self._running.values()]
        self._running.clear()
        await cancel(*tasks)

    async def _score(self, gserver: Gserver, question: Question) -> None:
        began = time.monotonic()
        if gserver.info is not None and gserver.info.engine == NO_MODEL:
            score = Scores(gserver.name, problem="its engine is simulated, it has no model")
        else:
            try:
                reply = await self.client.generate(gserver.address, self._request(question))
            except StreamRLError as error:
                score = Scores(gserver.name, problem=str(error))
            else:
                score = read_scores(
                    reply, question, gserver=gserver.name, label=self.ledger.lineage.label(question.version)
                )
        score = msgspec.structs.replace(score, seconds=time.monotonic() - began)
        self._scores.setdefault(question.version, {})[gserver] = score
        self._running.pop(gserver, None)

    def _request(self, question: Question) -> GenerateRequest:
        return GenerateRequest(
            input_ids=list(question.tokens),
            sampling_params=SamplingParams(max_new_tokens=0),
            return_logprob=True,
            logprob_start_len=question.start - 1,  # SGLang returns no log-probability for the first token
            lora_path=adapter_name(question.version) if self.named_adapters else None,
        )


def read_scores(reply: GenerateReply, question: Question, *, gserver: str, label: str) -> Scores:
    """Return the log-probabilities in `reply`, or why it does not fit `question` under the weights' label `label`."""
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
        problem = f"its reply has weights {meta.weight_version!r}"
    elif not same:  # SGLang reports the vocabulary's last token as 0; its log-probability is right
        problem = f"its reply has log-probabilities of {len(told)} tokens, not of the {len(wanted)} requested"
    elif len(logprobs) != len(wanted):
        problem = f"{len(wanted) - len(logprobs)} of its log-probabilities are not finite"
    if problem:
        return Scores(gserver, problem=problem)
    return Scores(gserver, logprobs, computed=meta.prompt_tokens - meta.cached_tokens)
