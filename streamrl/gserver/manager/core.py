"""The gserver manager's parts, wired together: membership, groups, weights, evaluations, the end of the run.

Each part handles its own calls of `transport/control.py`; this module carries a change in one part over to the others,
and has the methods that the trainer's master calls. State changes happen between two awaits of one event loop, and
every change that a coroutine may wait for is signalled (`run_state.py`).

Invariant: a run that is over admits nothing, and every process learns of its end.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from streamrl.architecture import Architecture
from streamrl.config import Config, by_task
from streamrl.errors import RunStopped, StreamRLError
from streamrl.gserver.manager.admission import Admissions, GroupCalls
from streamrl.gserver.manager.checks import Comparisons, GserverChecks, Question
from streamrl.gserver.manager.evaluations import Evaluations
from streamrl.gserver.manager.gserver import Gserver
from streamrl.gserver.manager.members import Members, has_ended
from streamrl.gserver.manager.registry import Access, Member, MemberState, Registry
from streamrl.gserver.manager.routing import Fleet
from streamrl.gserver.manager.row_sampler import RowSampler
from streamrl.gserver.manager.run_state import RunState
from streamrl.gserver.manager.status import ledger_status, process_status, waits_for, waits_for_members
from streamrl.gserver.updates.calls import WeightCalls
from streamrl.gserver.updates.publication import WeightUpdates
from streamrl.gserver.updates.update import UpdateRecord
from streamrl.ledger import Ledger
from streamrl.machine import machine_identity
from streamrl.mixture import Mixture
from streamrl.records import progress
from streamrl.records.evaluation import EvaluationReport
from streamrl.records.lineage import Lineage, record_kept
from streamrl.records.metrics import StepReport
from streamrl.records.timeline import PublicationEntry, Timeline
from streamrl.transport.control import (
    DataFacts,
    Done,
    FailRun,
    FinishRun,
    Register,
    RegisterReply,
    Scores,
    Status,
    Steer,
    SteerReply,
)
from streamrl.transport.credentials import control_key, generation_key
from streamrl.transport.generation import GenerationClient
from streamrl.transport.model_files import ModelFiles
from streamrl.transport.secret import Secret

log = logging.getLogger(__name__)

TELL_SECONDS = 10.0
"""Longest time, in seconds, that the manager stays after the end of the run for processes not yet informed of it."""
LINGER_SECONDS = 1.0
"""Time, in seconds, after the last process has been informed of the end: it may still request the final figures."""
STANDSTILL_SECONDS = 1.0
"""Lateness for a deadline, in seconds, that shows that this process or its machine stood still and received nothing."""


class Manager:
    """The manager of one run. `watch` has to run alongside the calls; `close` ends the work in progress."""

    def __init__(
        self,
        config: Config,
        *,
        client: GenerationClient,
        timeline: Timeline,
        secret: Secret,
        open_to_others: bool = False,
    ) -> None:
        lease = config.limits.silence_seconds
        self._config = config
        self._client = client
        self._secret = secret
        self._timeline = timeline
        self._state = state = RunState()
        self._registry = Registry(lease_seconds=lease)
        self.access = Access(secret, self._registry, gserver_key=generation_key(config, secret))
        self.ledger = Ledger(
            groups_per_batch=config.trainer.batch_groups,
            max_staleness=config.staleness.max_staleness,
            lease_seconds=lease,
            in_order=config.staleness.over_age == "wait",
            task=Mixture.of(config).task,
        )
        self._fleet = Fleet(on_capacity=state.capacity)
        self._sampler = None
        if any(own.data.sampler for own in by_task(config).values()):
            self._sampler = RowSampler(config, ledger=self.ledger, wake=state.admissions.wake, fail=self.fail)
        self.admissions = Admissions(
            ledger=self.ledger,
            fleet=self._fleet,
            group_size=config.rollout.group_size,
            permit=self.access.permit,
            sampler=self._sampler,
        )
        calls = WeightCalls(
            client,
            timeout=config.limits.update_seconds,
            request_seconds=config.limits.request_seconds,
        )
        self._checks = GserverChecks(
            calls=calls,
            ledger=self.ledger,
            on_checked=self._gserver_checked,
        )
        self.weights = WeightUpdates(
            config=config,
            ledger=self.ledger,
            fleet=self._fleet,
            changed=state.gservers,
            calls=calls,
            on_version=self._version_served,
            on_record=self._update_ended,
            on_unrecoverable=self.fail,
        )
        self.comparisons = Comparisons(
            fleet=self._fleet,
            client=client,
            ledger=self.ledger,
            named_adapters=config.named_adapters,
        )
        self.model = ModelFiles(config)
        self.members = Members(
            config=config,
            registry=self._registry,
            access=self.access,
            state=state,
            timeline=timeline,
            ledger=self.ledger,
            calls=calls,
            updating=lambda: self.weights.under_way,
            on_joined=self._joined,
            on_heard=self._heard,
            on_silent=self._fell_silent,
            on_left=lambda member: self._take_back_held_out(member, lost=False),
            on_died=self._worker_died,
            open_to_others=open_to_others,
        )
        self.evaluations = Evaluations(config.evaluation, fleet=self._fleet)
        self.groups = GroupCalls(
            config=config,
            ledger=self.ledger,
            admissions=self.admissions,
            sampler=self._sampler,
            evaluations=self.evaluations,
            fleet=self._fleet,
            checks=self._checks,
            members=self.members,
            state=state,
            live_workers=lambda: self._registry.live("rollout"),
        )
        self._death: asyncio.Future[str] | None = None
        """Description of the death of a model worker of this lineage, once one has died."""
        self._trainer_machines: set[str] = set()
        self._join_deadline: float | None = time.monotonic() + config.limits.start_seconds
        self._last_step: StepReport | None = None
        self._architecture: Architecture | None = None
        self.save_requested = False
        """Whether the owner wants a checkpoint after the present step; the master resets it."""

    @property
    def finished(self) -> bool:
        """Whether the run has made its last step."""
        return self._state.name == "finished"

    def raise_early_end(self) -> None:
        """Raise `StreamRLError` if the run has failed, `RunStopped` if it was stopped before its last step."""
        if self._state.name == "failed":
            raise StreamRLError(f"the run has failed: {self._state.message}")
        if self._state.name == "stopped":
            raise RunStopped(f"the run was stopped: {self._state.message}")

    # Called by the master

    async def until_over(self) -> None:
        """Wait for the end of the run."""
        await self._state.changed.until(lambda: self._state.over)

    def enter(self, message: Register) -> RegisterReply:
        """Enter the process that this manager runs in as a member of the run."""
        self._registry.remove("controller", 0)  # its record in the previous lineage
        granted = self.members.enter(message)
        for member in self._registry.of("controller"):
            member.end_reported = True
        return granted

    async def begin(self, config: Config, *, lineage: Lineage) -> None:
        """Begin `lineage` at the start of the run or after the death of a model worker.

        `config` is the run's configuration, except for `run.resume_from`, from which the lineage begins.

        Model workers join again. Only the groups that the checkpoint counts and those that rollout workers keep
        remain; the prompts of all others are given out again. gservers and rollout workers stay, and gservers take
        groups once they have the weights of that checkpoint.
        """
        begun = progress.of_run(config)
        self.members.begin_lineage(config, lineage)
        self._death = asyncio.get_running_loop().create_future()
        self.evaluations.forget()
        await self.comparisons.close()
        # an update that has gone too far to be aborted still takes effect
        await self.weights.abort("the run goes back to an earlier version")
        self.groups.begin(lineage, begun)
        for gserver in self._fleet.all():
            gserver.forget_updates()
            self._checks.start(gserver)

    async def death(self) -> str:
        """Wait until a model worker of this lineage has died or is silent; return a description."""
        assert self._death is not None, "a lineage has begun"
        return await asyncio.shield(self._death)

    @property
    def trainer_is_here(self) -> bool:
        """Whether all model workers of the run, past ones included, share memory with this process."""
        return self._trainer_machines <= {machine_identity()}

    @property
    def reads_snapshots(self) -> bool:
        """Whether model worker 0, which writes snapshots, shares memory with this process."""
        writer = self._registry.get("model_worker", 0)
        return writer is not None and writer.machine == machine_identity()

    async def data(self) -> DataFacts:
        """Wait until a rollout worker has reported the facts of the training data."""
        return await self.groups.data()

    async def resync_needed(self) -> list[str]:
        """Wait for gservers that lack the served weights; return their names."""
        return await self.weights.resync_needed()

    def compare(self, version: int, tokens: Sequence[int], *, start: int) -> None:
        """Have the gservers that serve `version` score a response, from the token at `start` on."""
        self.comparisons.ask(Question(version, tokens, start))

    def scores(self, version: int) -> list[Scores]:
        """Return the gservers' scores of the response compared at `version`; complete once the next one is served."""
        return self.comparisons.scores(version)

    def take_model(self, model: Architecture) -> None:
        """Keep the configuration of the policy's transformer for /status."""
        self._architecture = model

    def report(self, report: StepReport) -> None:
        """Keep the report of a step for /status, and admit by its `admitted_staleness` from now on."""
        self._last_step = report.finite()
        lineage, kept = self.ledger.lineage, self.ledger.kept
        if kept and report.step == lineage.policy_version + 1:
            record_kept(self._config.run_dir, lineage, groups=kept)
        self.groups.limit_staleness(int(report.metrics.get("admitted_staleness", self.ledger.max_staleness)))

    def evaluate(self, version: int, *, training_over: bool) -> None:
        """Request one evaluation of `version`, which the gservers serve.

        `training_over`: the run ends after it, so no further group starts.
        """
        if training_over:
            self.groups.stop()
        self.evaluations.request(version)
        self._state.held_out.wake()

    def on_evaluation(self, take: Callable[[EvaluationReport], None]) -> None:
        """Set `take` as the callback for each evaluation report."""
        self.evaluations.on_report = take

    def finish(self, reason: str, *, stopped: bool) -> None:
        """End the run. `stopped`: by request, before its last step."""
        self._state.end("stopped" if stopped else "finished", reason)

    def fail(self, reason: str) -> None:
        """End the run as failed."""
        self._state.end("failed", reason)

    # Calls

    async def steer(self, message: Steer) -> SteerReply:
        """Change the course of the run; raises `StreamRLError` if its configuration does not allow the change."""
        staleness = self._config.staleness
        if message.max_staleness is not None:
            if self._config.trainer.synchronous:
                raise StreamRLError("max_staleness is 0 with a synchronous trainer.graph, and cannot be changed")
            if staleness.over_age == "wait" and message.max_staleness > staleness.max_staleness:
                raise StreamRLError(
                    f'with staleness.over_age = "wait", max_staleness cannot exceed the configured '
                    f"{staleness.max_staleness}: stream.capacity_groups is for that many groups"
                )
            self.groups.set_staleness(message.max_staleness)
        if message.paused is not None:
            if self._config.trainer.synchronous:
                raise StreamRLError("a run with a synchronous trainer.graph cannot be paused: each step generates")
            self.groups.pause(message.paused)
        self.save_requested |= message.save
        return SteerReply(policy_version=self._last_step.step if self._last_step is not None else 0)

    async def finish_run(self, message: FinishRun) -> Done:
        """End the run for its owner."""
        if message.error:
            self.fail(message.error)
        else:
            self.finish(message.reason, stopped=False)
        return Done()

    async def fail_run(self, message: FailRun) -> Done:
        """End the run as failed: the configuration stops it at such an error."""
        self.fail(message.error)
        return Done()

    async def until_all_know_of_the_end(self) -> None:
        """Wait until the run is over and every live member is informed, at most `TELL_SECONDS` after its end."""
        await self.until_over()
        if not await self._state.changed.until(lambda: not self._registry.unaware_of_end(), timeout=TELL_SECONDS):
            names = ", ".join(m.name for m in self._registry.unaware_of_end())
            log.warning("the manager ends, but these processes have not received the end of the run: %s", names)
        await asyncio.sleep(LINGER_SECONDS)

    def status(self) -> Status:
        """Return the content of /status."""
        state, registry, now = self._state, self._registry, time.monotonic()
        return Status(
            run=self._config.run.name,
            state=state.name,
            message=waits_for(self._config, state, registry, self._fleet, self.ledger),
            ledger=ledger_status(self.ledger, given_up=self.admissions.given_up),
            processes=[process_status(member, now=now) for member in registry.everyone()],
            last_step=self._last_step,
            publication=self.weights.status(),
            data_rows=self.groups.data_rows,
            evaluation=self.evaluations.status() if self._config.evaluation.enabled else None,
            model=self._architecture,
        )

    async def watch(self) -> None:
        """Expire leases and mark members as silent, each at its time."""
        while True:
            now = time.monotonic()
            self.members.notice_silence(now=now)
            self.admissions.expire(now=now)
            if self._join_deadline is not None and now >= self._join_deadline:
                self._joining_took_too_long()
            deadlines = (self._registry.next_silence(), self.ledger.next_expiry(), self._join_deadline)
            known = [deadline for deadline in deadlines if deadline is not None]
            timeout = min(known) - time.monotonic() if known else None
            await self._state.changed.sleep(timeout)
            late = time.monotonic() - min(known) if known else 0.0
            if late > STANDSTILL_SECONDS:
                log.warning("the manager stood still for %.0f s; no process counts as silent for it", late)
                self._registry.excuse(late)
                self.ledger.excuse(late)
                await asyncio.sleep(STANDSTILL_SECONDS)  # time to read the messages that arrived in between

    async def close(self) -> None:
        """Stop: report the end of the run to every waiting call, and resume paused gservers."""
        if self._registry.everyone():
            self._state.end("failed", "the controller was stopped")
        if self._sampler is not None:
            await self._sampler.close()
        await self.comparisons.close()
        await self.members.close()
        await self.weights.close()
        await self._checks.close()

    # Consequences of changes

    def _joined(self, member: Member) -> None:
        if isinstance(member, Gserver):
            self._client.control_keys[member.address] = control_key(self._config, self._secret, member.index)
            self._fleet.join(member)
            self._checks.start(member)
            self._state.gservers.notify()
        elif member.role == "model_worker":
            self._trainer_machines.add(member.machine)
        elif member.role == "rollout":
            self.admissions.worker_replaced(member.name)
            self._take_back_held_out(member, lost=True)
        if self._state.name == "joining" and not waits_for_members(self._registry, self._config):
            self._state.name = "running"
            log.info("all processes have joined")

    def stats(self) -> dict[str, float]:
        """Return how many groups may start, are running or returned, and how many calls wait."""
        ledger = self.ledger
        return {
            "ledger_room": ledger.room,
            "groups_running": ledger.running,
            "groups_returned": ledger.returned,
            "groups_untrained": max(0, ledger.accepted - ledger.trained),
            "admissions_waiting": len(self._state.admissions),
            "routes_waiting": len(self._state.routes),
        }

    def _heard(self, member: Member) -> None:
        now = member.last_heard.at
        if member.role == "rollout":
            self.ledger.renew(member.name, now=now)
        elif isinstance(member, Gserver) and member.takes_part:
            self._fleet.measured(member, member.stats, now=now)
            if member.state in (MemberState.UNCHECKED, MemberState.SUSPECT):
                self._checks.start(member)
            self.comparisons.look_at(member)
            self._state.gservers.notify()

    def _fell_silent(self, member: Member) -> None:
        if member.role == "gserver":
            if not self._fleet.serving_count:
                log.error("no gserver is left to generate; the run waits for one to (re)join")
        elif member.role == "rollout":
            self._take_back_held_out(member, lost=True)
        elif member.role == "model_worker":
            # Calls to a dead model worker fail, but a process that waits for its groups may never call it.
            silent = f"has been silent for {member.last_heard.seconds(now=time.monotonic()):.0f} s"
            self._worker_died(f"{member.name} {'has ended' if has_ended(member) else silent}")

    def _worker_died(self, how: str) -> None:
        if self._death is not None and not self._death.done():
            self._death.set_result(how)

    def _take_back_held_out(self, member: Member, *, lost: bool) -> None:
        """Give the held-out prompts of `member` to others. `lost`: it was lost, and did not leave by request."""
        self.evaluations.give_back(member.name, lost=lost)
        self._state.held_out.wake()

    def _gserver_checked(self) -> None:
        self.weights.look_for_lacking()
        self.comparisons.look()
        self._start_if_served()

    def _start_if_served(self) -> None:
        """Admit groups from now on if enough gservers serve the current weights: the configured number, or any after
        the run has gone back."""
        if self._fleet.serving_count >= (1 if self.ledger.lineage.cause else self._config.gserver.count):
            self.groups.start()

    def _joining_took_too_long(self) -> None:
        self._join_deadline = None
        self.groups.start()
        missing = waits_for_members(self._registry, self._config)
        if missing:
            log.warning("after %.0f s the run still waits for %s", self._config.limits.start_seconds, missing)

    def _version_served(self, version: int) -> None:
        self.comparisons.next_version(version)
        self.groups.start()

    def _update_ended(self, record: UpdateRecord) -> None:
        self._start_if_served()  # all gservers may have begun without the weights that the run resumes from
        self._timeline.add(
            PublicationEntry(
                time=record.end,
                begin=record.begin,
                end=record.end,
                pause=record.pause_seconds,
                version=record.version,
                done=record.done,
                error=record.error,
            )
        )
        self.comparisons.look()
