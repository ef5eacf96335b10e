"""A `TrajectoryGroup` as the frames of one message: a small msgpack header, then the raw arrays.

Each array has a frame of its own and is never copied, unless the group is small: then the socket sends all arrays in
one frame. A received array uses the message's own memory and is read-only. Invariant: the groups that `decode` returns
keep every rule of `streamrl.types`, so code behind the stream does not check again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import sub
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from streamrl.errors import WireError
from streamrl.transport.session import Frame
from streamrl.types import ARRAY_FIELDS, LARGEST_REWARD, NO_EXPERT, NO_VERSION, GroupFacts, TrajectoryGroup

ARRAYS: dict[str, str] = {field.name: field.dtype for field in ARRAY_FIELDS}
"""Array field → dtype, in wire order."""

MOST_FRAMES = len(ARRAYS)
"""Maximum frames of arrays of one message: each array in a frame of its own."""

MAX_HEADER_BYTES = 1 << 18
"""Maximum size of any message's first frame, in bytes."""
LONGEST_NAME = 255
"""Maximum length of a worker's name, in characters."""
LOGPROB_TOLERANCE = 1e-4
"""How far above 0 rounding may move a log-probability, in nats."""
UNALIGNED_BELOW = 16384
"""Size in bytes below which a frame may be unaligned in the receive buffer, and is copied out of it."""

_NAMES = tuple(ARRAYS)
_DTYPE_NAMES = tuple(ARRAYS.values())
_DTYPES = tuple(map(np.dtype, _DTYPE_NAMES))
_ITEM_BYTES = [dtype.itemsize for dtype in _DTYPES]
_OF_TOKENS = [field.name for field in ARRAY_FIELDS if field.per == "token"]
_LARGEST_FLOAT = float(np.finfo(np.float32).max)


class GroupHeader(GroupFacts, frozen=True, kw_only=True, tag="group"):
    """First frame of a group: everything except the arrays."""

    seq: int
    dtypes: tuple[str, ...]
    """The dtypes of the arrays that follow, in the order of `ARRAYS`."""
    size: int
    """Number of trajectories."""
    tokens: int
    """Tokens of all trajectories."""
    routes: int = 0
    """Number of known experts per token."""
    permit: str = ""
    """Proof that `seq` was leased to the sender."""


class Limits(msgspec.Struct, frozen=True):
    """Limits that a group must not exceed. The defaults are beyond every run."""

    max_group_bytes: int
    """Size of all arrays together, in bytes."""
    seqs: int = 2**62
    """Sequence numbers are below this."""
    newest_version: int = 2**31 - 1
    """Newest policy version that may have sampled a token."""
    fewest_siblings: int = 1
    """Minimum number of episodes."""
    group_size: int = 2**31 - 1
    """Maximum number of episodes."""
    max_context: int = 2**31 - 1
    """Maximum tokens of a trajectory."""
    vocab_size: int = 2**31
    """Token ids are below this."""
    routes: int | None = None
    """Experts per token, if groups carry them."""
    experts: int = NO_EXPERT
    """Expert indices are below this."""

    def check_seq(self, seq: int, *, where: str) -> None:
        """Raise `WireError`, with the prefix `where`, for a sequence number that was not handed out."""
        if seq < 0:
            raise WireError(f"{where}: a sequence number cannot be negative")
        if seq >= self.seqs:
            raise WireError(f"{where}: no sequence number from {self.seqs} on can have been handed out yet")


_encoder = msgspec.msgpack.Encoder()


def encode(group: TrajectoryGroup, *, max_group_bytes: int, permit: str = "") -> list[Frame]:
    """Return the frames of `group`, which must not change until they are sent.

    Raises `WireError` if the frames could not be decoded: a wrong dtype, or more than `max_group_bytes`.
    """
    head = _encoder.encode(header_of(group, permit=permit))
    arrays: list[Frame] = []
    for name, dtype in zip(_NAMES, _DTYPES, strict=True):
        array = getattr(group, name)
        if array.dtype != dtype or array.ndim != 1:
            raise WireError(
                f"group {group.seq}: {name} must be a vector of {dtype.name}, "
                f"not {array.dtype.name} of shape {array.shape}"
            )
        arrays.append(np.ascontiguousarray(array).view(np.uint8).data)
    if len(head) > MAX_HEADER_BYTES:
        raise WireError(f"group {group.seq}: a header of {len(head)} bytes, more than {MAX_HEADER_BYTES}")
    _check_size(arrays, max_group_bytes, where=f"group {group.seq}")
    return [head, *arrays]


def decode(header: GroupHeader, frames: Sequence[Frame], *, limits: Limits, sender: str) -> TrajectoryGroup:
    """Return the group with the arrays in `frames`; raises `WireError`, which names `sender`, if it breaks any rule."""
    where = f"group {header.seq} from {sender}"
    limits.check_seq(header.seq, where=where)
    for name in (header.worker, header.gserver, *(name for parts in header.reward_parts for name in parts)):
        if len(name) > LONGEST_NAME:
            raise WireError(f"{where}: a name of {len(name)} characters, more than {LONGEST_NAME}")
    if header.dtypes != _DTYPE_NAMES:
        raise WireError(f"{where}: arrays of dtypes {list(header.dtypes)[:10]}, not {list(_DTYPE_NAMES)}")
    _check_size(frames, limits.max_group_bytes, where=where)
    arrays = dict(zip(_NAMES, _split(header, frames, where), strict=True))
    group = TrajectoryGroup.of(header.seq, header, arrays)
    check(group, limits, where=where)
    return group


def _split(header: GroupHeader, frames: Sequence[Frame], where: str) -> list[NDArray[Any]]:
    """Return the arrays of a message; the lengths of its frames must match the header."""
    if header.size < 0 or header.tokens < 0 or header.routes < 0:
        raise WireError(
            f"{where}: {header.size} trajectories of {header.tokens} tokens, {header.routes} experts for each"
        )
    shape = {"size": header.size, "tokens": header.tokens, "routes": header.routes}
    lengths = [field.length(**shape) for field in ARRAY_FIELDS]
    sizes = [length * item for length, item in zip(lengths, _ITEM_BYTES, strict=True)]
    together = len(frames) == 1
    found, expected = [len(frame) for frame in frames], [sum(sizes)] if together else sizes
    if found != expected:
        raise WireError(f"{where}: frames of {found[:10]} bytes, not {expected}")
    if together:
        whole = _readable(frames[0])
        offsets = [0, *accumulate(sizes)]
        return [np.frombuffer(whole, *piece) for piece in zip(_DTYPES, lengths, offsets, strict=False)]
    return [np.frombuffer(_readable(frame), dtype) for frame, dtype in zip(frames, _DTYPES, strict=True)]


def _readable(frame: Frame) -> Frame:
    """Return the same bytes, aligned and read-only."""
    return bytes(frame) if len(frame) < UNALIGNED_BELOW else memoryview(frame).toreadonly()


def check(group: TrajectoryGroup, limits: Limits, *, where: str) -> None:
    """Raise `WireError`, with the prefix `where`, unless `group` keeps every rule of its type, and `limits`."""
    _check_trajectories(group, limits, where)
    _check_tokens(group, limits, where)
    _check_prompts(group, where)


def group_bytes(group: TrajectoryGroup) -> int:
    """Return the size of the arrays of `group`, in bytes."""
    shape = {"size": group.size, "tokens": group.tokens, "routes": group.routes}
    return sum(field.length(**shape) * item for field, item in zip(ARRAY_FIELDS, _ITEM_BYTES, strict=True))


def header_of(group: TrajectoryGroup, *, permit: str = "") -> GroupHeader:
    """Return the header of `group`; `permit`: from its admission."""
    return GroupHeader(
        **msgspec.structs.asdict(group.facts),
        seq=group.seq,
        dtypes=_DTYPE_NAMES,
        size=group.size,
        tokens=group.tokens,
        routes=group.routes,
        permit=permit,
    )


def _check_size(frames: Sequence[Frame], max_group_bytes: int, *, where: str) -> int:
    total = sum(map(len, frames))
    if total > max_group_bytes:
        raise WireError(f"{where}: {total} bytes, more than the {max_group_bytes} of limits.group_mb")
    return total


def _check_trajectories(group: TrajectoryGroup, limits: Limits, where: str) -> None:
    seqlens, rewards = group.seqlens.tolist(), group.rewards.tolist()
    if not seqlens:
        raise WireError(f"{where}: no trajectories")
    if not len(seqlens) == len(rewards) == len(group.finish_reasons):
        raise WireError(
            f"{where}: {len(seqlens)} seqlens, {len(rewards)} rewards and "
            f"{len(group.finish_reasons)} finish reasons; there must be one of each for every trajectory"
        )
    _check_episodes(group.episodes.tolist(), limits, where)
    shortest, tokens = min(seqlens), sum(seqlens)
    if shortest < 1:
        raise WireError(f"{where}: a trajectory of {shortest} tokens")
    if max(seqlens) > limits.max_context:
        raise WireError(
            f"{where}: a trajectory of {max(seqlens)} tokens, more than gserver.max_context = {limits.max_context}"
        )
    for name in _OF_TOKENS:
        if len(getattr(group, name)) != tokens:
            raise WireError(f"{where}: {name} has {len(getattr(group, name))} items, but seqlens add up to {tokens}")
    if not 0 <= group.prompt_length <= shortest:
        raise WireError(
            f"{where}: prompt_length {group.prompt_length} is not between 0 and {shortest}, the shortest trajectory"
        )
    if not all(-LARGEST_REWARD <= reward <= LARGEST_REWARD for reward in rewards):  # NaN fails, too
        raise WireError(f"{where}: rewards {rewards[:16]} must be finite, and at most {LARGEST_REWARD:g} in magnitude")
    episodes = int(group.episodes[-1]) + 1
    if len(group.scores) not in (0, episodes):
        raise WireError(f"{where}: {len(group.scores)} scores for {episodes} episodes")
    if not all(-LARGEST_REWARD <= score <= LARGEST_REWARD for score in group.scores):
        raise WireError(f"{where}: scores {group.scores[:16]} must be finite, and at most {LARGEST_REWARD:g}")
    if len(group.reward_parts) not in (0, episodes):
        raise WireError(f"{where}: parts of {len(group.reward_parts)} rewards for {episodes} episodes")
    if not all(-LARGEST_REWARD <= part <= LARGEST_REWARD for parts in group.reward_parts for part in parts.values()):
        raise WireError(f"{where}: parts of rewards must be finite, and at most {LARGEST_REWARD:g} in magnitude")
    if not 0 <= group.generation_seconds < math.inf:
        raise WireError(f"{where}: generation_seconds {group.generation_seconds} must be finite and not negative")


def _check_episodes(episodes: list[int], limits: Limits, where: str) -> None:
    """Check that episodes are numbered from 0 without a gap, and that their number is right."""
    if episodes[0] != 0 or any(step not in (0, 1) for step in map(sub, episodes[1:], episodes)):
        raise WireError(f"{where}: episodes {episodes[:16]} must begin with 0 and go up by 0 or 1")
    if not limits.fewest_siblings <= episodes[-1] + 1 <= limits.group_size:
        fewest = "" if limits.fewest_siblings == limits.group_size else f"{limits.fewest_siblings} to "
        raise WireError(
            f"{where}: {episodes[-1] + 1} episodes, not the {fewest}{limits.group_size} of rollout.group_size"
        )


def _check_tokens(group: TrajectoryGroup, limits: Limits, where: str) -> None:
    """Check the values of each token.

    This is the hot part of the stream's receiving end, so it makes few passes over each array. Versions come last
    because `SampleMeta` reads them again right after."""
    ids, logprobs, versions = group.packed_input_ids, group.packed_behavior_logprobs, group.packed_policy_versions
    bound = limits.vocab_size
    if np.maximum.reduce(ids.view(np.uint32)) >= bound:  # a negative id reads as 2**31 or more
        raise WireError(f"{where}: token ids from {ids.min()} to {ids.max()}, not all in 0 to {bound - 1}")
    mask_bytes = group.packed_loss_mask.tobytes()
    if b"\1" not in mask_bytes:
        _check_mask(group, where)
        raise WireError(f"{where}: no token was sampled by the policy (packed_loss_mask is False everywhere)")
    lowest, highest = float(np.minimum.reduce(logprobs)), float(np.maximum.reduce(logprobs))
    if not (lowest >= -_LARGEST_FLOAT and highest <= LOGPROB_TOLERANCE):  # NaN fails both
        raise WireError(f"{where}: behavior_logprobs from {lowest} to {highest}; they must be finite and at most 0")
    if ((logprobs != 0) | group.packed_loss_mask).tobytes() != mask_bytes:
        _check_mask(group, where)
        raise WireError(f"{where}: behavior_logprobs must be 0 where packed_loss_mask is False")
    if np.minimum.reduce(versions) < NO_VERSION or (versions >= 0).tobytes() != mask_bytes:
        _check_mask(group, where)
        raise WireError(
            f"{where}: policy versions must be 0 or more where packed_loss_mask is True and {NO_VERSION} elsewhere"
        )
    if len(group.packed_routed_experts):
        _check_routes(group, limits, where)
    newest = int(np.maximum.reduce(versions))
    if newest > limits.newest_version:
        raise WireError(f"{where}: policy version {newest}, but the newest there can be is {limits.newest_version}")


def _check_routes(group: TrajectoryGroup, limits: Limits, where: str) -> None:
    """Check that the experts of all tokens are present, and exist in the model."""
    experts = group.packed_routed_experts
    if len(experts) % group.tokens or limits.routes not in (None, group.routes):
        raise WireError(
            f"{where}: {len(experts)} experts for {group.tokens} tokens; the model has {limits.routes} for each"
        )
    wrong = (experts >= limits.experts) & (experts != NO_EXPERT)
    if wrong.any():
        raise WireError(f"{where}: there is no expert {experts[wrong][0]}; the model has {limits.experts} in a layer")


def _check_mask(group: TrajectoryGroup, where: str) -> None:
    """Raise `WireError` for bytes that are neither 0 nor 1. Such bytes differ from the result of every comparison, so
    this is called only after another check has failed."""
    if group.packed_loss_mask.view(np.uint8).max(initial=0) > 1:
        raise WireError(f"{where}: packed_loss_mask has bytes that are neither 0 nor 1")


def _check_prompts(group: TrajectoryGroup, where: str) -> None:
    """Check the trajectories of a group: they share their first `prompt_length` tokens, the policy sampled none of
    these, it sampled at least one later token of each, and never a first token, which has no context."""
    length = group.prompt_length
    ids = group.packed_input_ids.view(np.uint8).data
    mask = group.packed_loss_mask.tobytes()
    prompt = ids[: 4 * length].tobytes()
    start = 0
    for seqlen in group.seqlens.tolist():
        if mask.find(1, start, start + length) >= 0:
            raise WireError(f"{where}: packed_loss_mask is not False over the {length} tokens of the prompt")
        if mask[start]:
            raise WireError(f"{where}: the first token of a trajectory is sampled; there must be a prompt before it")
        if mask.find(1, start + length, start + seqlen) < 0:
            raise WireError(f"{where}: a trajectory without a token that the policy sampled")
        if ids[4 * start : 4 * (start + length)].tobytes() != prompt:
            raise WireError(f"{where}: trajectories do not share the {length} tokens of the prompt")
        start += seqlen
