"""The group codec: round trip, and a refusal for everything that breaks a rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import WireError
from streamrl.transport import codec
from streamrl.transport.session import Frame
from streamrl.transport.sockets import FramePacker
from streamrl.types import LARGEST_REWARD, NO_VERSION, TrajectoryGroup
from tests.groups import groups, make_group

LIMITS = codec.Limits(max_group_bytes=1 << 20, vocab_size=1000)
Message = tuple[codec.GroupHeader, list[bytes]]
_header_decoder = msgspec.msgpack.Decoder(codec.GroupHeader)


def message(group: TrajectoryGroup) -> Message:
    """With a frame for each array, as large groups have."""
    return codec.header_of(group), [getattr(group, name).tobytes() for name in codec.ARRAYS]


def decode(header: codec.GroupHeader, frames: list[bytes], limits: codec.Limits = LIMITS) -> TrajectoryGroup:
    return codec.decode(header, frames, limits=limits, sender="rollout/0")


def assert_equal(one: TrajectoryGroup, other: TrajectoryGroup) -> None:
    for name in one.__struct_fields__:
        mine, theirs = getattr(one, name), getattr(other, name)
        if isinstance(mine, np.ndarray):
            assert mine.dtype == theirs.dtype
            np.testing.assert_array_equal(mine, theirs)
        else:
            assert mine == theirs


PACKER = FramePacker()


def packed(group: TrajectoryGroup) -> list[Frame]:
    head, *arrays = codec.encode(group, max_group_bytes=1 << 20)
    return [head, *PACKER.pack(arrays)]


@given(groups())
def test_round_trip(group: TrajectoryGroup) -> None:
    head, *frames = packed(group)
    assert len(frames) == 1, "arrays of a small group travel together"
    frames = [bytes(frame) for frame in frames]  # the packer uses its memory again
    back = decode(_header_decoder.decode(head), frames)
    assert_equal(back, group)
    assert_equal(decode(*message(group)), group)
    assert not any(getattr(back, name).flags.writeable for name in codec.ARRAYS)
    assert codec.group_bytes(back) == sum(getattr(group, name).nbytes for name in codec.ARRAYS)


def test_arrays_of_large_groups_are_copied_on_neither_side() -> None:
    group = make_group(seqlens=(20_000, 20_000), routes=2)
    head, *frames = packed(group)
    limits = codec.Limits(max_group_bytes=1 << 20)
    back = codec.decode(_header_decoder.decode(head), frames, limits=limits, sender="rollout/0")
    for name in list(codec.ARRAYS)[3:]:
        assert np.shares_memory(getattr(back, name), getattr(group, name))


def test_what_lies_askew_in_the_receive_buffer_is_aligned() -> None:
    for group in (make_group(), make_group(seqlens=(1000, 200), prompt_length=1)):
        header, frames = message(group)
        for layout in (frames, [b"".join(frames)]):
            askew = [memoryview(bytearray(b"?" + frame))[1:] for frame in layout]
            back = codec.decode(header, askew, limits=LIMITS, sender="rollout/0")
            assert_equal(back, group)
            assert all(getattr(back, name).flags.aligned for name in codec.ARRAYS)


def keeps_the_rules(group: TrajectoryGroup, vocab_size: int) -> bool:
    """The rules once more, token by token."""
    if len(group.seqlens) == 0 or min(group.seqlens) < 1 or sum(map(int, group.seqlens)) != group.tokens:
        return False
    if not 0 <= group.prompt_length <= min(group.seqlens) or not any(group.packed_loss_mask):
        return False
    if not all(abs(reward) <= LARGEST_REWARD for reward in group.rewards):
        return False
    episodes = group.episodes.tolist()
    if sorted(episodes) != episodes or sorted(set(episodes)) != list(range(len(set(episodes)))):
        return False
    if not {len(group.scores), len(group.reward_parts)} <= {0, episodes[-1] + 1}:
        return False
    at = 0
    for seqlen in map(int, group.seqlens):
        if group.packed_loss_mask[at] or not any(group.packed_loss_mask[at : at + seqlen]):
            return False
        for i in range(seqlen):
            sampled = bool(group.packed_loss_mask[at + i])
            logprob = float(group.packed_behavior_logprobs[at + i])
            version = int(group.packed_policy_versions[at + i])
            if int(group.packed_loss_mask.view(np.uint8)[at + i]) not in (0, 1):
                return False
            if not 0 <= group.packed_input_ids[at + i] < vocab_size:
                return False
            if sampled and not (version >= 0 and -np.inf < logprob <= codec.LOGPROB_TOLERANCE):
                return False
            if not sampled and not (version == NO_VERSION and logprob == 0):
                return False
            if i < group.prompt_length and (sampled or group.packed_input_ids[at + i] != group.packed_input_ids[i]):
                return False
        at += seqlen
    return True


@given(groups(), st.data())
def test_one_wrong_value_is_refused_exactly_when_it_breaks_a_rule(group: TrajectoryGroup, data: st.DataObject) -> None:
    header, frames = message(group)
    which = data.draw(st.integers(0, len(frames) - 2))  # any byte may be an expert
    dtype = np.dtype(list(codec.ARRAYS.values())[which])
    array = np.frombuffer(bytearray(frames[which]), np.uint8 if dtype == np.bool_ else dtype)
    position = data.draw(st.integers(0, len(array) - 1))
    array[position] = data.draw(
        st.sampled_from([np.nan, np.inf, -np.inf, 1e30, 0.5, -2.0, 0.0, 1e-6])
        if dtype == np.float32
        else st.sampled_from([0, 1, 2, 5, 255])
        if dtype == np.bool_
        else st.sampled_from([-(2**31), -2, -1, 0, 1, 3, 999, 1000, 2**31 - 1])
    )
    frames[which] = array.tobytes()
    fields = dict(zip(codec.ARRAYS, frames, strict=True))
    corrupted = msgspec.structs.replace(
        group, **{name: np.frombuffer(fields[name], codec.ARRAYS[name]) for name in codec.ARRAYS}
    )
    if keeps_the_rules(corrupted, vocab_size=1000):
        assert_equal(decode(header, frames), corrupted)
    else:
        with pytest.raises(WireError, match=f"group {group.seq} from rollout/0: "):
            decode(header, frames)


def with_header(**changes: Any) -> Callable[[Message], Message]:
    return lambda m: (msgspec.structs.replace(m[0], **changes), m[1])


def with_frame(name: str, values: Any, dtype: str | None = None) -> Callable[[Message], Message]:
    def change(m: Message) -> Message:
        frames = list(m[1])
        frames[list(codec.ARRAYS).index(name)] = np.array(values, dtype or codec.ARRAYS[name]).tobytes()
        return m[0], frames

    return change


def with_group(group: TrajectoryGroup) -> Callable[[Message], Message]:
    return lambda _: message(group)


def without_sampled(begin: int, end: int) -> Callable[[Message], Message]:
    group = make_group()
    group.packed_loss_mask[begin:end] = False
    group.packed_behavior_logprobs[begin:end] = 0
    group.packed_policy_versions[begin:end] = NO_VERSION
    return with_group(group)


def first_sampled(position: int) -> Callable[[Message], Message]:
    group = make_group(prompt_length=0)
    group.packed_loss_mask[[0, 5]] = False
    group.packed_behavior_logprobs[[0, 5]] = 0
    group.packed_policy_versions[[0, 5]] = NO_VERSION
    group.packed_loss_mask[position] = True
    group.packed_policy_versions[position] = 0
    return with_group(group)


MASK = [0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (with_header(seq=-1), "cannot be negative"),
        (with_header(dtypes=("<i8", *list(codec.ARRAYS.values())[1:])), "dtypes"),
        (with_header(prompt_length=6), "prompt_length 6 is not between 0 and 5"),
        (with_header(prompt_length=-1), "prompt_length -1"),
        (with_header(prompt_length=4), "not False over the 4 tokens of the prompt"),
        (with_header(finish_reasons=["stop"]), "1 finish reasons"),
        (with_header(generation_seconds=float("nan")), "generation_seconds"),
        (with_header(size=3), "frames of"),
        (with_header(size=-1), "-1 trajectories"),
        (with_header(tokens=11), "frames of"),
        (with_header(tokens=2**62), "frames of"),
        (lambda m: (m[0], []), r"frames of \[\] bytes, not \[8, 8, 8, 48, 48, 48, 12, 0\]"),
        (lambda m: (m[0], m[1][:-1]), r"frames of \[8, 8, 8, 48, 48, 48, 12\] bytes"),
        (lambda m: (m[0], [*m[1], b""]), r"frames of .* 0, 0\] bytes"),
        (with_header(routes=-1), "-1 experts for each"),
        (with_header(routes=4), "frames of"),
        (with_group(make_group(routes=3)), "36 experts for 12 tokens; the model has 4 for each"),
        (with_group(make_group(routes=4)), "there is no expert 8; the model has 8 in a layer"),
        (lambda m: (m[0], [m[1][0][:-1], *m[1][1:]]), r"frames of \[7, 8"),
        (lambda m: (m[0], [b"".join(m[1])[:-1]]), r"frames of \[179\] bytes, not \[180\]"),
        (with_frame("seqlens", [5, 8]), "seqlens add up to 13"),
        (with_frame("seqlens", [0, 12]), "trajectory of 0 tokens"),
        (with_frame("seqlens", [-5, 17]), "trajectory of -5 tokens"),
        (lambda m: (with_header(size=0)(m)[0], [b"", b"", b"", *m[1][3:]]), "no trajectories"),
        (with_frame("rewards", [1.0, np.nan]), "rewards .* must be finite"),
        (with_frame("rewards", [1.0, -1e30]), "at most 1e\\+09 in magnitude"),
        (with_frame("rewards", [1.0]), r"frames of \[8, 4"),
        (with_frame("episodes", [0, 2]), r"episodes \[0, 2\] must begin with 0 and go up by 0 or 1"),
        (with_frame("episodes", [1, 2]), "episodes .* must begin with 0"),
        (with_frame("episodes", [0, 0]), "1 episodes, not the 2 of rollout.group_size"),
        (with_frame("packed_input_ids", [*range(11), 1000]), "token ids from 0 to 1000"),
        (with_frame("packed_input_ids", [*range(11), -1]), "token ids from -1"),
        (with_frame("packed_input_ids", range(12)), "do not share"),
        (with_frame("packed_loss_mask", [2 * bit for bit in MASK], "u1"), "neither 0 nor 1"),
        (with_frame("packed_loss_mask", [0] * 12, "u1"), "no token was sampled"),
        (without_sampled(5, 12), "a trajectory without a token that the policy sampled"),
        (without_sampled(0, 5), "a trajectory without a token that the policy sampled"),
        (first_sampled(0), "the first token of a trajectory is sampled"),
        (first_sampled(5), "the first token of a trajectory is sampled"),
        (with_header(seq=10**12), "no sequence number from 1000 on can have been handed out yet"),
        (with_header(worker="x" * 256), "name of 256 characters"),
        (with_header(gserver="x" * 256), "name of 256 characters"),
        (with_header(reward_parts=[{"x" * 256: 0.0}, {}]), "name of 256 characters"),
        (with_header(reward_parts=[{}]), "parts of 1 rewards for 2 episodes"),
        (with_header(reward_parts=[{"function": float("inf")}, {}]), "parts of rewards must be finite"),
        (with_frame("packed_policy_versions", [5 * bit - 1 for bit in MASK]), "version 4, but the newest .* is 3"),
        (with_group(make_group(seqlens=(5, 7, 6))), "3 episodes, not the 2 of rollout.group_size"),
        (with_group(make_group(seqlens=(5, 101))), "a trajectory of 101 tokens, more than gserver.max_context = 100"),
        (with_frame("packed_loss_mask", [*MASK[:-1], 0], "u1"), "must be 0 where packed_loss_mask is False"),
        (with_frame("packed_policy_versions", [*(bit - 1 for bit in MASK[:-1]), -1]), "policy versions must be"),
        (with_frame("packed_behavior_logprobs", [0.0] * 11 + [0.1]), "at most 0"),
        (with_frame("packed_behavior_logprobs", [0.0] * 11 + [np.nan]), "finite"),
        (with_frame("packed_behavior_logprobs", [-0.1] * 12), "must be 0 where packed_loss_mask is False"),
        (with_frame("packed_policy_versions", [3] * 12), "policy versions"),
        (with_frame("packed_policy_versions", [-2] * 12), "policy versions"),
    ],
)
def test_refusals_say_what_and_from_whom(change: Callable[[Message], Message], says: str) -> None:
    limits = msgspec.structs.replace(
        LIMITS,
        seqs=1000,
        newest_version=3,
        fewest_siblings=2,
        group_size=2,
        max_context=100,
        routes=4,
        experts=8,
    )
    assert decode(*message(make_group(999, seqlens=(100, 7), version=3)), limits=limits).seq == 999
    with pytest.raises(WireError, match=rf"from rollout/0: .*{says}"):
        decode(*change(message(make_group())), limits=limits)


def test_a_group_may_lack_siblings_down_to_a_limit() -> None:
    limits = msgspec.structs.replace(LIMITS, fewest_siblings=2, group_size=4)
    for siblings in (2, 3, 4):
        assert decode(*message(make_group(seqlens=(5,) * siblings)), limits=limits).size == siblings
    for siblings in (1, 5):
        with pytest.raises(WireError, match=f"{siblings} episodes, not the 2 to 4 of rollout.group_size"):
            decode(*message(make_group(seqlens=(5,) * siblings)), limits=limits)


def test_a_group_over_the_limit_is_refused_on_both_sides() -> None:
    group = make_group(seqlens=(500, 500))
    with pytest.raises(WireError, match=r"more than the 1000 of limits\.group_mb"):
        codec.encode(group, max_group_bytes=1000)
    with pytest.raises(WireError, match=r"more than the 1000 of limits\.group_mb"):
        decode(*message(group), limits=codec.Limits(max_group_bytes=1000))


def test_wrong_dtypes_and_huge_headers_are_not_sent() -> None:
    group = make_group()
    wide = msgspec.structs.replace(group, packed_behavior_logprobs=group.packed_behavior_logprobs.astype(np.float64))
    with pytest.raises(WireError, match="packed_behavior_logprobs must be a vector of float32, not float64"):
        codec.encode(wide, max_group_bytes=1 << 20)
    with pytest.raises(WireError, match="header of"):
        codec.encode(msgspec.structs.replace(group, worker="w" * codec.MAX_HEADER_BYTES), max_group_bytes=1 << 20)
