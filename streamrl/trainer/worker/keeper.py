"""Samples of the trained groups (`records/rollouts.py`), written in parallel with training and without delaying it.

The compute thread passes references to arrays that do not change any more. A separate thread turns tokens into text,
finds out how each token was used, and writes files of several groups. Samples for which the thread is too slow, or the
disk has no room, are left out and counted: no step ever waits for the thread, and no failure in it ends the run.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import queue
import threading
import time
from collections.abc import Collection, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from streamrl.config import AlgorithmConfig
from streamrl.records.rollouts import (
    ELSEWHERE,
    ENVIRONMENT,
    NO_CONTRAST,
    OVER_AGE,
    PROMPT,
    TRAINED,
    WEIGHT_LIMIT,
    KeptGroup,
    branches,
)
from streamrl.records.rollouts_writer import RolloutWriter
from streamrl.trainer.algorithms.losses import behavior_weight
from streamrl.trainer.roles.items import Outputs, TrainItem
from streamrl.types import TrajectoryGroup, special_counts

log = logging.getLogger(__name__)

MOST_WAITING = 64
"""Maximal number of groups in the thread's queue; further groups are left out."""
WRITE_SECONDS = 10.0
"""Longest wait for samples that are still to be written, at a checkpoint and at the end, in seconds."""
LEAST_DELAY, MOST_DELAY = 1.0, 60.0
"""Bounds of `write_delay`, in seconds."""


class Sample(NamedTuple):
    """A group of a training step."""

    step: int
    """The policy version that the step made."""
    time: float
    """Seconds since the epoch."""
    item: TrainItem
    advantages: NDArray[np.float32]
    """`[tokens]`."""
    outputs: Outputs | None
    """None if the step did not compute the group, since it had no gradient."""


class Texts(Protocol):
    """Conversion of tokens to text."""

    def of(self, group: TrajectoryGroup) -> tuple[list[str], NDArray[np.int32], int]:
        """Return the text of each response; `[tokens]` the number of characters of it up to the end of each token; and
        the number of characters of the prompt, which all responses share."""


class RolloutKeeper:
    """Queue of samples with the thread that writes them; `close` it at the end."""

    def __init__(
        self,
        folder: Path,
        *,
        most_bytes: int,
        policy_version: int,
        algorithm: AlgorithmConfig,
        texts: Texts,
        special: Collection[int] = (),
    ) -> None:
        """`folder`: this rank's; groups of steps after `policy_version` that an earlier start wrote there are removed.
        `special`: token ids to count, as in `special_counts`."""
        self._special = special
        self._algorithm = algorithm
        self._texts = texts
        self._folder = folder
        self._waiting: queue.Queue[Sample | threading.Event | None] = queue.Queue(MOST_WAITING)
        self._kept = 0
        self._lost = 0
        self._processor_seconds = 0.0
        self._failing = False
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=self._work, args=(most_bytes, policy_version), name="rollouts", daemon=True
        )
        self._thread.start()

    def keep(self, samples: Sequence[Sample]) -> None:
        """Queue `samples` for writing, up to the room in the queue; return at once."""
        for sample in samples:
            if self._over.is_set():
                self._lost += 1
                continue
            try:
                self._waiting.put_nowait(sample)
            except queue.Full:
                self._lost += 1

    def stats(self) -> dict[str, float]:
        """Return the number of groups that were written and of groups that were left out, and the processor seconds
        that the thread used."""
        return {
            "rollouts_kept_total": self._kept,
            "rollouts_lost_total": self._lost,
            "rollouts_processor_seconds_total": self._processor_seconds,
        }

    def write(self) -> None:
        """Wait until the samples so far are written, for `WRITE_SECONDS` at most. From any thread."""
        request = threading.Event()
        with contextlib.suppress(queue.Full):
            self._waiting.put(request, timeout=WRITE_SECONDS)
        if not self._over.is_set() and not request.wait(WRITE_SECONDS):
            log.warning("the last rollouts are not written yet: %s does not take them", self._folder)

    def close(self) -> None:
        """Wait until all samples are written, for `WRITE_SECONDS` at most."""
        try:
            self._waiting.put(None, timeout=WRITE_SECONDS)
            self._thread.join(WRITE_SECONDS)
        except queue.Full:
            pass
        if self._thread.is_alive():
            log.warning("the last rollouts are not written: %s does not take them", self._folder)

    def _work(self, most_bytes: int, policy_version: int) -> None:
        item: Sample | threading.Event | None = None
        try:
            writer = RolloutWriter(self._folder, most_bytes=most_bytes, policy_version=policy_version)
            began, due = time.monotonic(), math.inf
            while (item := self._next(due)) is not None:
                now = time.monotonic()
                if isinstance(item, Sample):
                    writer.append(kept_group(item, algorithm=self._algorithm, texts=self._texts, special=self._special))
                    due = min(due, now + write_delay(now - began))
                if isinstance(item, threading.Event) or writer.full or now >= due:
                    self._write(writer)
                    due = math.inf
                if isinstance(item, threading.Event):
                    item.set()
                self._processor_seconds = time.thread_time()
            self._write(writer)
        except Exception:  # tolerance point: samples are for people to look at, and must not end a run
            log.exception("no more rollouts are kept in %s; the run continues", self._folder)
            self._over.set()
            if isinstance(item, threading.Event):
                item.set()

    def _next(self, due: float) -> Sample | threading.Event | None:
        """Return the next item of the queue; a request to write if there is none until `due`, in monotonic seconds."""
        try:
            return self._waiting.get(timeout=None if due == math.inf else max(0.0, due - time.monotonic()))
        except queue.Empty:
            return threading.Event()

    def _write(self, writer: RolloutWriter) -> None:
        groups = writer.pending
        try:
            writer.write()
        except OSError as error:
            self._lost += groups
            if not self._failing:
                log.warning(
                    "rollouts cannot be written to %s (%s): they are left out, and the run continues",
                    *(self._folder, error),
                )
            self._failing = True
            return
        self._kept += groups
        if self._failing and groups:
            log.warning("rollouts are written to %s again", self._folder)
            self._failing = False


def write_delay(age: float) -> float:
    """Return for how many seconds a sample may wait for others of the same file, `age` seconds after the beginning: the
    longer a run, the fewer files for each minute, so that a long run has few enough to read."""
    return min(MOST_DELAY, max(LEAST_DELAY, age / 30))


# --- content of a sample ---


def kept_group(sample: Sample, *, algorithm: AlgorithmConfig, texts: Texts, special: Collection[int] = ()) -> KeptGroup:
    """Return all facts about a group that was trained on; `special`: as in `special_counts`."""
    item, outputs = sample.item, sample.outputs
    group = item.group
    written, ends, prompt_chars = texts.of(group)
    proximal = item.proximal_logprobs
    if proximal is None and outputs is not None:
        proximal = outputs.logprobs
    return KeptGroup(
        step=sample.step,
        seq=group.seq,
        time=sample.time,
        worker=group.worker,
        gserver=group.gserver,
        reward_parts=[group.reward_parts[episode] for episode in group.episodes] if group.reward_parts else [],
        scores=[group.scores[episode] for episode in group.episodes] if group.scores else [],
        prompt_length=group.prompt_length,
        prompt_chars=prompt_chars,
        finish_reasons=group.finish_reasons,
        texts=written,
        special=special_counts(group, special),
        seqlens=group.seqlens,
        rewards=group.rewards,
        episodes=group.episodes,
        input_ids=group.packed_input_ids,
        text_ends=ends,
        behavior_logprobs=group.packed_behavior_logprobs,
        policy_versions=group.packed_policy_versions,
        token_uses=token_uses(item, outputs, algorithm),
        advantages=sample.advantages,
        proximal_logprobs=proximal,
        ref_logprobs=item.ref_logprobs,
        values=item.values,
        entropies=outputs.entropy if outputs is not None else None,
    )


def token_uses(item: TrainItem, outputs: Outputs | None, algorithm: AlgorithmConfig) -> NDArray[np.uint8]:
    """Return `[tokens]`: how each token of a group was used, as an index in `TOKEN_USES`."""
    group = item.group
    sampled = group.packed_loss_mask
    uses = np.where(sampled, TRAINED, ENVIRONMENT).astype(np.uint8)
    starts = np.cumsum(group.seqlens) - group.seqlens
    seen = np.cumsum(sampled)
    before = np.repeat(seen[starts] - sampled[starts], group.seqlens)
    uses[~sampled & (seen == before)] = PROMPT
    for index, branch in enumerate(branches(group.packed_input_ids, group.seqlens, group.episodes)):
        if branch.parent < 0:
            continue
        own = slice(int(starts[index]), int(starts[index]) + branch.shared)
        parents = slice(int(starts[branch.parent]), int(starts[branch.parent]) + branch.shared)
        policys = sampled[parents] | (uses[parents] == ELSEWHERE)
        uses[own] = np.where(~sampled[own] & policys, ELSEWHERE, uses[own])
    uses[sampled & ~item.trainable] = OVER_AGE
    if outputs is None:
        uses[item.trainable] = NO_CONTRAST
    elif algorithm.behavior_weight_limit == "mask" and algorithm.proximal != "behavior":
        uses[np.flatnonzero(item.trainable)[_beyond_limits(item, outputs, algorithm)]] = WEIGHT_LIMIT
    return uses


def _beyond_limits(item: TrainItem, outputs: Outputs, algorithm: AlgorithmConfig) -> NDArray[np.bool_]:
    """Return `[trainable]`: whether the behaviour weight is outside the limits, as `objective` computes it."""
    group = item.group
    proximal = outputs.logprobs if item.proximal_logprobs is None else item.proximal_logprobs
    responses = np.repeat(np.arange(group.size), group.seqlens)
    found = behavior_weight(
        torch.from_numpy(proximal[item.trainable]),
        torch.from_numpy(group.packed_behavior_logprobs[item.trainable]),
        torch.from_numpy(responses[item.trainable]),
        group.size,
        level=algorithm.behavior_weight_level,
        limit="mask",
        cap=algorithm.behavior_weight_cap,
        floor=algorithm.behavior_weight_floor,
    )
    limited: NDArray[np.bool_] = found.limited.numpy()
    return limited


class TokenizerTexts:
    """`Texts` made with the tokenizer of a checkpoint."""

    def __init__(self, model_dir: Path) -> None:
        """Note the checkpoint's folder; the tokenizer is loaded on first use, in the thread that uses it."""
        self._file = model_dir / "tokenizer.json"
        self._tokenizer: Tokenizer | None = None

    def of(self, group: TrajectoryGroup) -> tuple[list[str], NDArray[np.int32], int]:
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.from_file(str(self._file))
        tokenizer = self._tokenizer
        reader = _Reader(tokenizer)
        token_ids = group.packed_input_ids.tolist()
        prompt = reader.pieces(token_ids[: group.prompt_length])
        texts: list[str] = []
        ends: list[int] = []
        first = 0
        for length in group.seqlens.tolist():
            own = token_ids[first + group.prompt_length : first + length]
            pieces = [*prompt, *reader.copy().pieces(own)]
            if not pieces[-1]:
                pieces[-1] = _unfinished(tokenizer, token_ids[first : first + length], "".join(pieces))
            texts.append("".join(pieces))
            ends += accumulate(map(len, pieces))
            first += length
        return texts, np.array(ends, np.int32), len("".join(prompt))


class _Reader:
    """Incremental decoder; the text of a character that spans several tokens comes with the last of them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=False)
        self._waiting: list[int] = []
        """Tokens whose text is not complete yet."""

    def copy(self) -> _Reader:
        """Return a decoder in the same state."""
        other = copy.copy(self)
        other._stream, other._waiting = copy.copy(self._stream), self._waiting.copy()
        return other

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text that each token adds."""
        return [self._piece(token_id) for token_id in token_ids]

    def _piece(self, token_id: int) -> str:
        self._waiting.append(token_id)
        try:
            piece: str = self._stream.step(self._tokenizer, token_id) or ""
        except Exception:  # the library raises nothing more precise: this byte changes the bytes before it
            self._stream = DecodeStream(skip_special_tokens=False)
            piece = "".join(self._stream.step(self._tokenizer, waiting) or "" for waiting in self._waiting)
        if piece:
            self._waiting.clear()
        return piece


def _unfinished(tokenizer: Tokenizer, token_ids: Sequence[int], text: str) -> str:
    """Return the text of an incomplete character at the end of the tokens."""
    whole: str = tokenizer.decode(token_ids, skip_special_tokens=False)
    return whole.removeprefix(text) if whole.startswith(text) else ""
