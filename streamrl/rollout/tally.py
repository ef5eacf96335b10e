"""The figures of one evaluation, counted group by group. Pure."""

from __future__ import annotations

from statistics import fmean

import numpy as np

from streamrl.evaluation import EvaluationReport, mean_pass_at
from streamrl.transport.control.evaluations import EvaluationTask
from streamrl.types import SampleMeta, TrajectoryGroup


class Tally:
    """Takes in the groups of an evaluation; rejected prompts are counted and enter no figure."""

    def __init__(self, *, samples: int, pass_reward: float) -> None:
        self._samples = samples
        self._pass_reward = np.float32(pass_reward)  # rewards have that precision, too
        self._passed: list[int] = []
        self._rewards: list[float] = []
        self._lengths: list[int] = []
        self._cut = 0
        self._versions: set[int] = set()
        self._rejected = 0

    def add(self, group: TrajectoryGroup) -> None:
        """A prompt's responses, as many as `samples`."""
        meta = SampleMeta.of(group, head=0)
        self._passed.append(int((group.rewards >= self._pass_reward).sum()))
        self._rewards += meta.rewards
        self._lengths += meta.response_lengths
        self._cut += group.finish_reasons.count("length")
        self._versions.update(meta.version_counts)

    def reject(self) -> None:
        """A prompt failed."""
        self._rejected += 1

    def report(self, task: EvaluationTask, *, time: float, seconds: float) -> EvaluationReport:
        """What `task` found, by `time` and within `seconds`."""
        return EvaluationReport(
            policy_version=task.policy_version,
            step=task.step,
            time=time,
            seconds=seconds,
            oldest_version=min(self._versions, default=None),
            newest_version=max(self._versions, default=None),
            prompts=len(self._passed),
            samples=self._samples,
            rejected=self._rejected,
            reward_mean=fmean(self._rewards) if self._rewards else None,
            pass_at=mean_pass_at(self._passed, samples=self._samples),
            response_length_mean=fmean(self._lengths) if self._lengths else None,
            cut_share=self._cut / len(self._rewards) if self._rewards else None,
        )
