"""The interface between the HTTP server and an engine: the protocol, its messages, and the tokenizer.

An engine takes `Job`s and replies through `Ticket`s. It changes its weights in a transaction: its `receiver` stages new
weights, and `end_update` swaps them in. The embedded and the simulated engine implement this contract; `http.py` knows
nothing else of them. `Text` converts text to tokens and back with the checkpoint's `tokenizer.json` alone.
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
        """Return the tokens of `text`; raises `Refused` if it has characters unknown to the tokenizer."""
        try:
            tokens: list[int] = self._tokenizer.encode(text).ids
        except Exception as error:  # as above
            raise Refused(f"the text cannot be tokenized: {error}") from error
        return tokens

    def decode(self, tokens: list[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `tokens`; tokens without text are skipped."""
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
        return text


class QueueFull(StreamRLError):
    """The engine's queue of waiting requests is full."""


class GenerationFailed(StreamRLError):
    """The engine failed while it computed a response."""


class Job(msgspec.Struct, frozen=True):
    """A request for one response, checked by the server."""

    rid: str
    """Unique among the unfinished jobs."""
    input_ids: list[int]
    """At least one token, each below the vocabulary size."""
    params: SamplingParams
    stop: tuple[str, ...] = ()
    """Strings that end the response; left out of its text."""
    logprob_start_len: int = -1
    """First prompt token with log-probabilities; -1: none."""
    top_logprobs_num: int = 0
    return_routed_experts: bool = False
    """Whether the last output includes the experts that computed each token."""
    stream: bool = False
    """Whether the response is reported as it grows, or only when finished."""
    stream_interval: int = 1
    """With `stream`: number of tokens between two reports; the first token is reported."""


class Output(msgspec.Struct, frozen=True):
    """A response so far; the last one has a `finish_reason`."""

    output_ids: list[int]
    logprobs: list[float]
    """`[len(output_ids)]`, in nats."""
    weight_version: str
    """The version in force now."""
    finish_reason: FinishReason | None = None
    spans: list[VersionSpan] = []
    """The version of each token; in the last output only."""
    top_logprobs: list[list[tuple[float, int]]] = []
    """`[len(output_ids)]`, each `top_logprobs_num` pairs of log-probability and token."""
    input_logprobs: list[float | None] = []
    """Log-probabilities of the prompt from `logprob_start_len` on; None for a token without a predecessor."""
    input_top_logprobs: list[list[tuple[float, int]] | None] = []
    cached_tokens: int = 0
    """Number of prompt tokens taken from the cache."""
    num_retractions: int = 0
    routed_experts: NDArray[np.uint8] | None = None
    """`[tokens - 1, layers, top_k]` for prompt and response without the last token, as in `types.Trajectory`; in the
    last output only, and None if unknown or not requested."""


class Ticket:
    """The receiving end of a job's outputs. The engine calls `deliver` and `fail` on the event loop."""

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
        """Store `output`; it replaces an earlier one that was not read yet."""
        self._latest = output
        self._changed.set()

    def fail(self, message: str) -> None:
        """Fail the job: all waiting calls raise a `GenerationFailed` with `message`."""
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


class ServedEngine(Protocol):
    """The gserver process's view of the server of its requests."""

    name: str
    """`embedded`, `sglang` or `simulated`."""

    async def failed(self) -> None:
        """Wait until it cannot continue, and raise the cause."""

    def stats(self) -> dict[str, float]:
        """Return figures for heartbeats."""


class Engine(ServedEngine, Protocol):
    """An inference engine in this process; all methods are called on the event loop."""

    model_path: str
    vocab_size: int
    max_running: int
    """Number of requests that it computes together."""
    max_context: int
    """Longest prompt and response together, in tokens."""
    receiver: WeightReceiver
    """Receives new weights while generation continues."""

    @property
    def weight_version(self) -> str:
        """The name of the weights that are served now."""

    async def start(self) -> None:
        """Load the weights and get ready; raises `ModelError`."""

    async def close(self) -> None:
        """Stop; unfinished jobs fail."""

    def submit(self, job: Job) -> Ticket:
        """Queue `job`; raises `QueueFull`."""

    async def abort(self, rid: str) -> bool:
        """End a job with its tokens so far; return False if there is no such job."""

    async def abort_all(self) -> int:
        """End all jobs with their tokens so far; return their number."""

    async def pause(self, mode: PauseMode) -> None:
        """Stop between two steps; new jobs wait."""

    async def resume(self) -> None:
        """Continue after a pause; without a pause, do nothing."""

    async def end_update(self) -> str:
        """Swap the staged weights in between two steps; return a description."""

    async def load(self, folder: Path, version: str | None) -> str:
        """Load the weights in `folder`: into the stage if an update has begun, else swap them in at once.

        Returns a description.
        """

    async def set_version(self, version: str) -> None:
        """Name the served weights `version` from the next token on."""

    async def checksum(self) -> Any:
        """Return a checksum of the served weights; equal weights have equal checksums."""
