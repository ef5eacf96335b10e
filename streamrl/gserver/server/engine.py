"""What the HTTP server asks of an engine: the protocol, the messages between them, and the tokenizer.

An engine takes `Job`s and replies through `Ticket`s; it changes its weights in a transaction: its `receiver` keeps new
ones aside, and `end_update` swaps them in. The embedded and the simulated engine keep this contract; `http.py` knows
nothing else of them. `Text` turns text to tokens and back with the checkpoint's `tokenizer.json` alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from streamrl.errors import ModelError, Refused, StreamRLError
from streamrl.gserver.server.receiver import WeightReceiver
from streamrl.transport.generation import (
    FinishReason,
    PauseMode,
    SamplingParams,
    VersionSpan,
)


class Text:
    """The tokenizer of the served model."""

    def __init__(self, folder: Path) -> None:
        try:
            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # tokenizers raises nothing more precise
            raise ModelError(f"{folder / 'tokenizer.json'} cannot be read: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Return the tokens of `text`; raises `Refused` when it has characters that the tokenizer does not know."""
        try:
            tokens: list[int] = self._tokenizer.encode(text).ids
        except Exception as error:  # as above
            raise Refused(f"the text cannot be tokenized: {error}") from error
        return tokens

    def decode(self, tokens: list[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `tokens`; those without text are skipped."""
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
        return text


class QueueFull(StreamRLError):
    """The engine has as many waiting requests as it takes."""


class GenerationFailed(StreamRLError):
    """The engine failed while it computed a response."""


class Job(msgspec.Struct, frozen=True):
    """One response to be made, checked by the server."""

    rid: str
    """Unique among the jobs that are not finished."""
    input_ids: list[int]
    """At least one, each below the vocabulary size."""
    params: SamplingParams
    stop: tuple[str, ...] = ()
    """Strings that end the response; left out of its text."""
    logprob_start_len: int = -1
    """From which prompt token on log-probabilities are wanted; -1: none."""
    top_logprobs_num: int = 0
    return_routed_experts: bool = False
    """Whether the last output says which experts computed which tokens."""
    stream: bool = False
    """Whether a response is reported as it grows, or only the finished one."""
    stream_interval: int = 1
    """With `stream`: tokens from one report to the next; the first token is reported."""


class Output(msgspec.Struct, frozen=True):
    """A response so far; the last one has a `finish_reason`."""

    output_ids: list[int]
    logprobs: list[float]
    """`[len(output_ids)]`, in nats."""
    weight_version: str
    """In force now."""
    finish_reason: FinishReason | None = None
    spans: list[VersionSpan] = []
    """Which version made which tokens; in the last one only."""
    top_logprobs: list[list[tuple[float, int]]] = []
    """`[len(output_ids)]`, each `top_logprobs_num` pairs of log-probability and token."""
    input_logprobs: list[float | None] = []
    """Log-probabilities of the prompt from `logprob_start_len` on; None for a token without one before it."""
    input_top_logprobs: list[list[tuple[float, int]] | None] = []
    cached_tokens: int = 0
    """Prompt tokens that were not computed again."""
    num_retractions: int = 0
    routed_experts: NDArray[np.uint8] | None = None
    """`[tokens - 1, layers, top_k]` of prompt and response without the last token, as in `types.Trajectory`; in the
    last one only, and None where it is not known or not wanted."""


class Ticket:
    """The asking side of a job. The engine calls `deliver` and `fail` on the event loop."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._latest: Output | None = None
        self._failure: GenerationFailed | None = None
        self._changed = asyncio.Event()

    @property
    def done(self) -> bool:
        """Whether no further output will come."""
        finished = self._latest is not None and self._latest.finish_reason is not None
        return finished or self._failure is not None

    def deliver(self, output: Output) -> None:
        """A newer output replaces one that nobody has looked at yet."""
        self._latest = output
        self._changed.set()

    def fail(self, message: str) -> None:
        """The engine failed: whoever waits gets a `GenerationFailed` with `message`."""
        self._failure = GenerationFailed(message)
        self._changed.set()

    async def result(self) -> Output:
        """Return the finished response; raises `GenerationFailed`."""
        async for output in self.updates():
            if output.finish_reason is not None:
                return output
        raise GenerationFailed(f"request {self.job.rid} ended without a finish reason")

    async def updates(self) -> AsyncIterator[Output]:
        """Yield outputs as they grow, the finished one last; raises `GenerationFailed`."""
        while True:
            await self._changed.wait()
            if not self.done:
                self._changed.clear()
            if self._failure is not None:
                raise self._failure
            if self._latest is not None:
                yield self._latest
                if self._latest.finish_reason is not None:
                    return


class Served(Protocol):
    """What a gserver process needs to know of whatever answers its requests."""

    name: str
    """`embedded`, `sglang` or `simulated`."""

    async def failed(self) -> None:
        """Wait until it cannot go on, and raise why."""

    def stats(self) -> dict[str, float]:
        """Return figures for heartbeats."""


class Engine(Served, Protocol):
    """An inference engine in this process; all methods are called on the event loop."""

    model_path: str
    vocab_size: int
    max_running: int
    """Requests that it computes together."""
    max_context: int
    """Prompt and response, in tokens."""
    receiver: WeightReceiver
    """Takes new weights in while generation goes on."""

    @property
    def weight_version(self) -> str:
        """What the weights are called that are served now."""

    async def start(self) -> None:
        """Load the weights and be ready; raises `ModelError`."""

    async def close(self) -> None:
        """Stop; unfinished jobs fail."""

    def submit(self, job: Job) -> Ticket:
        """Queue `job`; raises `QueueFull`."""

    async def abort(self, rid: str) -> bool:
        """End a job with what it has; False: there is none of this name."""

    async def abort_all(self) -> int:
        """End all jobs with what they have; return how many."""

    async def pause(self, mode: PauseMode) -> None:
        """Stop between two steps; new jobs wait."""

    async def resume(self) -> None:
        """Go on after a pause; nothing happens when there was none."""

    async def flush(self) -> None:
        """Forget cached prompts; raises `Refused` while requests run."""

    async def end_update(self) -> str:
        """Swap the staged weights in between two steps; return what was done."""

    async def load(self, folder: Path, version: str | None) -> str:
        """Take the weights in `folder`: aside in an update that has begun, else they are swapped in at once.

        Returns what was done.
        """

    async def set_version(self, version: str) -> None:
        """Call the served weights `version` from the next token on."""

    async def checksum(self) -> Any:
        """Return a checksum of the served weights: equal weights give equal ones."""
