"""What is kept of a training step: every token's figures and fate, its text, and that keeping never holds up a step."""

from __future__ import annotations

import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM

from streamrl.config import AlgorithmConfig
from streamrl.records.rollouts import FOLDER, TOKEN_USES, Rollouts
from streamrl.records.rollouts_writer import RolloutWriter
from streamrl.trainer.calls import MinibatchShare, TrainStep
from streamrl.trainer.roles.items import Outputs, TrainItem
from streamrl.trainer.worker import keeper
from streamrl.trainer.worker.keeper import RolloutKeeper, Sample, TokenizerTexts, token_uses
from streamrl.types import NO_VERSION, TrajectoryGroup
from tests.groups import make_group
from tests.trainer.models import branching_group, random_group
from tests.trainer.worker.test_computation import Worker


def item_of(group, *, version=1, oldest=0, **more):
    versions = group.packed_policy_versions
    return TrainItem(
        group=group,
        age=version - versions,
        trainable=group.packed_loss_mask & (versions >= oldest),
        comparable=group.packed_loss_mask & False,
        **more,
    )


def outputs_of(group, shift=0.0):
    return Outputs(group.packed_behavior_logprobs + np.float32(shift), np.ones(group.tokens, np.float32))


def uses(item, outputs, **algorithm):
    return [TOKEN_USES[use] for use in token_uses(item, outputs, AlgorithmConfig(**algorithm))]


def group_of(*responses, prompt=2, episodes=None):
    """`responses`: characters, `.` for a token of the environment, a digit for one that the policy sampled."""
    trajectories = [np.array([ord(c) for c in "?" * prompt + r]) for r in responses]
    packed = np.concatenate(trajectories)
    digits = (packed >= ord("0")) & (packed <= ord("9"))
    return TrajectoryGroup(
        seq=0,
        worker="rollout/0",
        prompt_length=prompt,
        seqlens=np.array([len(t) for t in trajectories], np.int32),
        rewards=np.arange(len(responses), dtype=np.float32),
        packed_input_ids=packed.astype(np.int32),
        packed_loss_mask=digits,
        packed_behavior_logprobs=np.where(digits, -1, 0).astype(np.float32),
        packed_policy_versions=np.where(digits, packed - ord("0"), NO_VERSION).astype(np.int32),
        finish_reasons=["stop"] * len(responses),
        episodes=np.array(episodes if episodes is not None else range(len(responses)), np.int32),
    )


def test_what_became_of_each_token():
    group = group_of("13..3.", "3")
    item = item_of(group, version=5, oldest=2)
    assert uses(item, outputs_of(group)) == [
        *("prompt", "prompt", "over_age", "trained", "environment", "environment", "trained", "environment"),
        *("prompt", "prompt", "trained"),
    ]
    assert uses(item, None)[3:7] == ["no_contrast", "environment", "environment", "no_contrast"]
    masked = uses(item, outputs_of(group, shift=2.0), behavior_weight_limit="mask", behavior_weight_cap=2.0)
    assert masked[2:4] == ["over_age", "weight_limit"]


def test_tokens_that_are_trained_on_in_another_branch():
    group = group_of("33..44", "33..55", "33..66", episodes=[0, 0, 1])
    second = slice(10, 14)  # its first call, of which the policy's answer is in the loss of the branch before
    group.packed_loss_mask[second] = False
    group.packed_policy_versions[second] = NO_VERSION
    found = uses(item_of(group, version=6), outputs_of(group))
    assert found[8:16] == [
        *("prompt", "prompt", "elsewhere", "elsewhere", "environment", "environment", "trained", "trained")
    ] or found[8:16] == ["prompt", "prompt", "elsewhere", "elsewhere", "prompt", "prompt", "trained", "trained"]
    assert found[18:20] == ["trained", "trained"]


def byte_level(folder):
    """A tokenizer with a token for each byte, so that many tokens end within a character."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def test_text_with_the_bounds_of_its_tokens(tmp_path):
    tokenizer = byte_level(tmp_path)
    prompt, answers = "wörld ", ["日本\n", "ok<b>"]
    ids = [tokenizer.encode(prompt + answer).ids for answer in answers]
    ids[1] += tokenizer.encode("é").ids[:1]  # half a character at the end
    group = make_group(seqlens=tuple(map(len, ids)), prompt_length=len(tokenizer.encode(prompt).ids))
    group.packed_input_ids[:] = np.concatenate(ids)
    texts, ends, prompt_chars = TokenizerTexts(tmp_path).of(group)
    assert texts == [prompt + answers[0], prompt + answers[1] + "\ufffd"]
    assert prompt_chars == len(prompt)
    assert ends[: len(ids[0])].tolist() == [1, 1, 2, 3, 4, 5, 6, 6, 6, 7, 7, 7, 8, 9]
    assert ends[-1] == len(texts[1])


def byte_fallback(folder):
    """A tokenizer that has a token for each byte beside a few for words, as Llama 2 and Mistral have."""
    tokens = [f"<0x{byte:02X}>" for byte in range(256)] + ["<unk>", "▁a", "▁b", "c"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.save(str(folder / "tokenizer.json"))
    return vocabulary


def texts_of(folder, *responses, prompt=0):
    group = make_group(seqlens=tuple(map(len, responses)), prompt_length=prompt)
    group.packed_input_ids[:] = np.concatenate(responses)
    texts, ends, _ = TokenizerTexts(folder).of(group)
    cuts = np.split(ends, np.cumsum(group.seqlens)[:-1])
    return [[text[a:b] for a, b in pairwise([0, *own.tolist()])] for text, own in zip(texts, cuts, strict=True)]


@given(st.lists(st.sampled_from([0x0A, 0x41, 0xE2, 0x82, 0xAC, 0xFF, 257, 258, 259]), min_size=1, max_size=12))
def test_any_tokens_have_a_text(token_ids):
    with tempfile.TemporaryDirectory() as folder:
        byte_fallback(Path(folder))
        (pieces,) = texts_of(Path(folder), token_ids)
    words = [piece.strip() for token_id, piece in zip(token_ids, pieces, strict=True) if token_id > 256]
    assert [word[-1] for word in words] == ["abc"[token_id - 257] for token_id in token_ids if token_id > 256]


class Plainly:
    """Texts without a tokenizer; waits for `allowed` before each group."""

    def __init__(self):
        self.allowed = threading.Semaphore(0)

    def of(self, group):
        self.allowed.acquire()
        return [""] * group.size, np.zeros(group.tokens, np.int32), 0


def samples(*seqs):
    found = []
    for seq in seqs:
        group = make_group(seq)
        advantages = np.zeros(group.tokens, np.float32)
        found.append(Sample(1, time.time(), item_of(group), advantages, outputs_of(group)))
    return found


def test_a_full_disk_and_a_mistake_do_not_end_the_run(tmp_path, monkeypatch, caplog):
    texts = Plainly()
    for _ in range(100):
        texts.allowed.release()
    write = RolloutWriter.write
    no_room = OSError(28, "No space left on device")
    errors = [None, no_room, no_room, None, ValueError("?")]

    def failing(self):
        if self.pending and (error := errors.pop(0)):
            self._pending.clear()
            raise error
        write(self)

    monkeypatch.setattr(RolloutWriter, "write", failing)
    kept = RolloutKeeper(
        tmp_path / FOLDER / "rank-0", most_bytes=2**30, policy_version=0, algorithm=AlgorithmConfig(), texts=texts
    )
    for seq in range(5):
        kept.keep(samples(seq))
        kept.write()
    kept.close()
    kept.keep(samples(5))
    assert caplog.text.count("No space left on device") == 1
    assert "are written to" in caplog.text
    assert "no more rollouts are kept" in caplog.text
    assert np.unique(Rollouts(tmp_path).rows["seq"].to_numpy()).tolist() == [0, 3]
    assert (kept.stats()["rollouts_kept_total"], kept.stats()["rollouts_lost_total"]) == (2, 3)


def test_samples_are_written_soon_though_the_run_continues(tmp_path):
    texts = Plainly()
    texts.allowed.release()
    kept = RolloutKeeper(
        tmp_path / FOLDER / "rank-0", most_bytes=2**30, policy_version=0, algorithm=AlgorithmConfig(), texts=texts
    )
    kept.keep(samples(7))
    until = time.monotonic() + 60
    found = Rollouts(tmp_path)
    while not found.refresh() and time.monotonic() < until:
        time.sleep(0.05)
    assert found.group(1, 7).seq == 7
    kept.close()


def test_a_long_run_writes_fewer_files_a_minute():
    delays = [keeper.write_delay(age) for age in range(0, 20_000, 10)]
    assert (delays[0], delays[-1]) == (1.0, 60.0)
    assert delays == sorted(delays)
    written = at = 0.0
    while at < 24 * 3600:
        at += keeper.write_delay(at)
        written += 1
    assert written < 2000


def logprobs_of(folder, ids):
    """By transformers alone, of each token after the first."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    return torch.log_softmax(logits, -1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()


def test_a_training_step_keeps_the_trainers_logprobs(tmp_path):
    rng = np.random.default_rng(0)
    groups = [random_group(0, rng, gaps=True), branching_group(1, rng), random_group(2, rng)]
    groups[0] = msgspec.structs.replace(groups[0], gserver="gserver/3", reward_parts=[{"function": 1.0}] * 4)
    groups[2] = msgspec.structs.replace(groups[2], rewards=np.zeros(groups[2].size, np.float32))
    worker = Worker(
        tmp_path,
        groups=groups,
        run={"dir": str(tmp_path), "name": "kept", "device": "cpu"},
        algorithm={"behavior_kl_coef": 0.0},
    )
    tokens = sum(int(group.packed_loss_mask.sum()) for group in groups)
    batch = MinibatchShare([0, 1, 2], tokens, sum(group.size for group in groups))
    worker.computation.carry_out(TrainStep("actor_train", 1, 0, [batch], kept=[0, 2]))
    worker.computation.close()
    found = Rollouts(tmp_path / "kept")
    assert np.unique(found.rows["seq"].to_numpy()).tolist() == [0, 2]
    first = found.group(2, 0)
    assert (first.gserver, first.reward_parts) == ("gserver/3", [{"function": 1.0}] * 4)
    assert found.table(limit=1, filter="gserver=gserver/3").total == 4
    for index in range(first.size):
        begin, end = first.bounds(index)
        sampled = groups[0].packed_loss_mask[begin:end]
        expected = logprobs_of(tmp_path / "model", groups[0].packed_input_ids[begin:end].tolist())
        assert first.proximal_logprobs[begin:end][sampled] == pytest.approx(expected[sampled[1:]], abs=1e-5)
        assert np.isnan(first.proximal_logprobs[begin:end][~sampled]).all()
        assert len(set(first.advantages[begin:end][sampled].tolist())) == 1
    assert first.texts[0].split()[0].startswith("t")
    assert {TOKEN_USES[use] for use in found.group(2, 2).token_uses} == {"prompt", "no_contrast"}
    assert found.group(2, 2).proximal_logprobs is None
    stats = worker.computation.stats()
    assert (stats["rollouts_kept_total"], stats["rollouts_lost_total"]) == (2, 0)
    assert stats["rollouts_processor_seconds_total"] > 0
