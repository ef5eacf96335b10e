"""Compares each gserver's log-probabilities with the trainer's, at every version that is trained from.

While a step computes with the weights of its version, the gservers that serve this version score one short response of
its batch (`gserver/manager/checks.py`). The step's first forward pass gives the trainer's log-probabilities of the
same tokens before any weight changes, so the comparison costs the trainer neither computation nor waiting. A large
difference means that a gserver does not have the weights that it reports, or that the two compute differently.

Scores show whether weights and prefill agree. Sampling can only be compared on responses that the present policy has
sampled as a whole, that is, without staleness (`sampling_diff`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from statistics import fmean

from streamrl.errors import StreamRLError, TrainingError
from streamrl.trainer.calls import ResponseReply, Sibling, TrainReply
from streamrl.trainer.master.rollout_pool import RolloutPool
from streamrl.transport.control import Scores
from streamrl.types import SampleMeta
from streamrl.waits import cancel

log = logging.getLogger(__name__)

ENOUGH_TOKENS = 8
"""Sampled tokens that are enough for a mean; a shorter response is chosen only if there is no longer one."""
PER_GSERVER = "logprob_diff_mean/"
"""Prefix of the figure of one gserver; its name follows, for example `gserver_0`."""


def response_to_compare(metas: Sequence[SampleMeta]) -> Sibling | None:
    """Return the first of the shortest sequences with `ENOUGH_TOKENS` sampled tokens, or the one with the most tokens.

    Groups with equal rewards come last, since a step may leave them out.
    """
    candidates = []
    for meta in metas:
        prompt = (meta.tokens - sum(meta.response_lengths)) / meta.size  # on average: it may hold more than a prompt
        alike = len(set(meta.rewards)) == 1
        for index, length in enumerate(meta.response_lengths):
            short = length < ENOUGH_TOKENS
            rank = (alike, short, -length if short else prompt + length)
            candidates.append((rank, Sibling(meta.seq, index)))
    return min(candidates, key=lambda candidate: candidate[0])[1] if candidates else None


def compared_figures(scores: Sequence[Scores], trained: Sequence[float], *, sampled: Sequence[int]) -> dict[str, float]:
    """Return the absolute differences in nats, for each gserver with scores and over all of them.

    `trained`: the trainer's log-probabilities of the sampled tokens; `sampled`: their indices in `Scores.logprobs`. If
    either is empty, no gserver counts as compared.
    """
    figures: dict[str, float] = {}
    means: list[float] = []
    largest: list[float] = []
    for score in scores if trained and sampled else ():
        if score.problem:
            continue
        differences = [abs(score.logprobs[place] - own) for place, own in zip(sampled, trained, strict=True)]
        means.append(fmean(differences))
        largest.append(max(differences))
        label = score.gserver.replace("/", "_")
        figures |= {f"{PER_GSERVER}{label}": means[-1], f"logprob_diff_max/{label}": largest[-1]}
    if means:
        figures |= {"logprob_diff_mean": fmean(means), "logprob_diff_max": max(largest)}
    return figures | {
        "gservers_compared": len(means),
        "gservers_not_compared": len(scores) - len(means),
        "compare_seconds": max((score.seconds for score in scores), default=0.0),
        "compare_tokens": max((score.computed for score in scores), default=0),
    }


class Comparison:
    """The comparison of one version. It begins with the step that starts from this version, and its figures are read
    when the next version is served.

    It neither ends the run nor delays it: a gserver that cannot be compared is logged and counted.
    """

    def __init__(
        self,
        version: int,
        response: Sibling | None,
        *,
        pool: RolloutPool,
        tokens_of: Callable[[Sibling], Awaitable[ResponseReply]],
    ) -> None:
        """`response`: the response to compare, or None for no comparison; `tokens_of` returns its tokens."""
        self.response = response
        self._version = version
        self._pool = pool
        self._sampled: list[int] = []
        self._asking: asyncio.Task[None] | None = None
        if response is not None:
            self._asking = asyncio.create_task(self._ask(tokens_of(response)), name=f"comparison of v{version}")

    async def figures(self, results: Iterable[TrainReply]) -> dict[str, float]:
        """Return the figures; called once the gservers serve the next version. `results`: results of the step."""
        trained = next((result.compared for result in results if result.compared), [])
        scores: list[Scores] = []
        if self._asking is None:
            log.info("v%d was not compared: no group of its batch is young enough as a whole", self._version)
        elif not self._asking.done():
            log.info("v%d was not compared: no request has gone to the gservers yet", self._version)
            await self.close()
        else:
            scores = self._pool.scores(self._version)
        for score in scores:
            if score.problem:
                log.info("%s was not compared at v%d: %s", score.gserver, self._version, score.problem)
        if scores and not trained:
            log.info("v%d was not compared: the step did not compute %s", self._version, self.response)
        return compared_figures(scores, trained, sampled=self._sampled)

    async def close(self) -> None:
        """Cancel the comparison."""
        await cancel(self._asking)

    async def _ask(self, fetching: Awaitable[ResponseReply]) -> None:
        try:
            response = await fetching
        except StreamRLError as error:
            log.info("v%d will not be compared: %s", self._version, error)
            return
        if sampled := response.sampled:
            self._pool.compare(self._version, response.tokens, start=sampled[0])
            self._sampled = [position - sampled[0] for position in sampled]


class MismatchWatch:
    """Warns of large differences in the figures of each step. Pure."""

    def __init__(self, *, warning: float, limit: float | None = None) -> None:
        """`warning`, `limit`: mean differences in nats above which it warns, and above which the run stops."""
        self._complete = True
        """Whether every gserver was compared at the last version."""
        self._warning = warning
        self._limit = limit

    def look(self, figures: Mapping[str, float], *, policy_version: int) -> None:
        """Warn of a large mean difference, or raise `TrainingError`, and name the gserver.

        `policy_version`: version of the compared weights. Also warns when gservers begin not to be compared.
        """
        self._count(figures, policy_version=policy_version)
        found = {
            f"{label.replace('_', '/')} and the trainer": value
            for name, value in figures.items()
            if (label := name.removeprefix(PER_GSERVER)) != name
        }
        if "sampling_diff_mean" in figures:
            found["sampled responses and the trainer"] = figures["sampling_diff_mean"]
        problems = {who: value for who, value in found.items() if value > self._warning}
        if not problems:
            return
        differ = "; ".join(f"{who} differ by {value:.3g} nats for each token" for who, value in problems.items())
        what = f"{differ}, under version {policy_version}"
        look = (
            "a gserver may serve other weights than it reports (compare its /weights_checker with the others'), or the "
            "two compute differently (gserver.dtype and trainer.dtype, another chat template or sampling processor)"
        )
        if self._limit is not None and max(problems.values()) > self._limit:
            raise TrainingError(f"{what}, more than trainer.logprob_diff_limit = {self._limit:g}: {look}")
        log.warning("%s, more than trainer.logprob_diff_warning = %g: %s", what, self._warning, look)

    def _count(self, figures: Mapping[str, float], *, policy_version: int) -> None:
        if "gservers_compared" not in figures:
            return
        compared, missing = figures["gservers_compared"], figures["gservers_not_compared"]
        complete = bool(compared) and not missing
        if self._complete and not complete:
            log.warning(
                "version %d was compared on %.0f gservers, and not on %.0f: the log has the reasons; see the figure "
                "gservers_not_compared of later steps",
                *(policy_version, compared, missing),
            )
        self._complete = complete
