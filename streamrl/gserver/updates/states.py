"""The states of one weight update. Pure: events come in, actions go out; there is no I/O and no clock.

    prepare ──────▶ (commit) ──────▶ check ──────▶ apply ─────▶ done
       │                │              │             │ none swapped
       └────────────────┴──────────────┴─────────────┴──▶ roll back ──▶ rolled back

*Prepare* brings the weights to every gserver, *check* compares them with the trained weights, *apply* pauses, swaps and
resumes each gserver on its own (a gserver that has no stage and reads files does all of it there). Gservers pass
`prepare` and `check` together: no gserver enters the next phase before all have finished the present one, and *check*
begins only after the publisher has committed.

Invariants: until the first swap succeeds every failure rolls back, and gservers with unmixed weights continue at the
old version; from then on the update stands, and a gserver that fails is evicted. A gserver for which a pause was
requested is also resumed, and one with mixed weights must first end its requests. If every action gets a reply, and
`overdue` is called when `awaits` requires it, the update ends.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Generic, Literal, TypeVar

Who = TypeVar("Who", bound=Hashable)
"""A gserver."""


class UpdateStep(Enum):
    """An action of a gserver; each is one or more calls with a deadline."""

    JOIN = "join"
    """Join the weight group, together with the other members."""
    BEGIN = "begin"
    """Prepare to receive."""
    RECEIVE = "receive"
    """Receive the new weights: into the stage or, without one, over the served weights."""
    VERIFY = "verify"
    """Prove that the new weights are the trained ones."""
    PAUSE = "pause"
    """Pause generation."""
    MARK = "mark"
    """Label the served weights as mixed before they are, so that tokens sampled from them can be recognised."""
    SWAP = "swap"
    """Serve the new weights from here on."""
    ASK = "ask"
    """Report which weights are served."""
    CLEAR = "clear"
    """End all requests, with the tokens generated so far."""
    RESUME = "resume"
    """Resume generation."""


@dataclass(frozen=True)
class MemberPlan:
    """The steps of one gserver, by phase."""

    prepare: tuple[UpdateStep, ...] = ()
    check: tuple[UpdateStep, ...] = ()
    apply: tuple[UpdateStep, ...] = (UpdateStep.PAUSE, UpdateStep.SWAP)
    mixes: UpdateStep | None = None
    """The step from which on, until the swap has succeeded, the served weights may be of two versions."""


Way = Literal["broadcast", "snapshot", "adapter"]
"""How the weights travel: by broadcast, in files, or as an adapter in files."""


def plan_for(*, way: Way, staged: bool, joined: bool, verified: bool, cut: bool = False) -> MemberPlan:
    """Return the steps of one gserver.

    `staged`: it keeps new weights separate from the served ones until the swap; real SGLang cannot. `joined`: it is in
    the weight group already. `verified`: the received weights are compared with the trained ones. `cut`: requests end
    when a new adapter comes; otherwise each continues with the adapter that it began with.
    """
    join = (UpdateStep.JOIN,) if way == "broadcast" and not joined else ()
    check = (UpdateStep.VERIFY,) if verified else ()
    if staged:
        return MemberPlan(prepare=(*join, UpdateStep.BEGIN, UpdateStep.RECEIVE), check=check)
    if way == "adapter":  # it is loaded in addition to others, and no request names it before the swap
        return MemberPlan(
            prepare=(UpdateStep.RECEIVE,),
            check=check,
            apply=(UpdateStep.PAUSE, UpdateStep.SWAP) if cut else (UpdateStep.SWAP,),
        )
    if way == "snapshot":  # the gserver is untouched until its turn, when it reads the files
        return MemberPlan(
            apply=(UpdateStep.PAUSE, UpdateStep.MARK, UpdateStep.RECEIVE, *check, UpdateStep.SWAP),
            mixes=UpdateStep.MARK,
        )
    steps = (*join, UpdateStep.PAUSE, UpdateStep.BEGIN, UpdateStep.MARK, UpdateStep.RECEIVE)
    return MemberPlan(prepare=steps, check=check, apply=(UpdateStep.SWAP,), mixes=UpdateStep.MARK)


@dataclass(frozen=True, eq=False)
class Action(Generic[Who]):
    """The instruction that `who` take `step`; `succeeded`, `failed` or, for ASK, `serves` reports its outcome."""

    who: Who
    step: UpdateStep


Serves = Literal["old", "new", "other"]
"""The weights that a gserver reports as served: the old ones, the updated ones, or neither."""


class MemberHealth(Enum):
    """The health of one gserver, as observed by an update."""

    FINE = "fine"
    """It did its part, or was doing so when another gserver failed."""
    SLOW = "slow"
    """A call of the update timed out, but it replies to other calls."""
    REFUSED = "refused"
    """It replied with an error, or with an invalid reply."""
    LOST = "lost"
    """It does not reply at all."""


class Phase(Enum):
    """The part of the update that all gservers are in."""

    PREPARE = "prepare"
    CHECK = "check"
    APPLY = "apply"
    ROLL_BACK = "roll back"
    ENDED = "ended"


class _Member(Generic[Who]):
    def __init__(self, who: Who, plan: MemberPlan) -> None:
        self.who = who
        self.plan = plan
        self.left = list(plan.prepare)
        """Remaining steps of this phase."""
        self.now: Action[Who] | None = None
        """The action in progress."""
        self.paused = False
        self.mixed = False
        self.swapped = False
        self.health = MemberHealth.FINE
        self.problem = ""
        """Why it failed; empty if it did not."""
        self.serves: Serves | None = None

    @property
    def through(self) -> bool:
        """Whether nothing is left to do in this phase."""
        return self.now is None and not self.left


class UpdateStates(Generic[Who]):
    """One update of the gservers in `plans`. Every event returns the next actions; no event raises an error."""

    def __init__(self, plans: Mapping[Who, MemberPlan]) -> None:
        self.phase = Phase.PREPARE
        self.reason = ""
        """Why the update was rolled back."""
        self._members = {who: _Member(who, plan) for who, plan in plans.items()}
        self._started = False
        self._committed = False
        self._publisher_failed = False
        self._left_early = False
        self._evicted: set[Who] = set()
        self._blamed: set[Who] = set()

    # Queries

    @property
    def ended(self) -> bool:
        """Whether nothing is left to do."""
        return self.phase is Phase.ENDED

    @property
    def done(self) -> bool:
        """Whether any gserver serves the new weights."""
        return any(member.swapped for member in self._members.values())

    @property
    def swapped(self) -> list[Who]:
        """The gservers that serve the new weights."""
        return [who for who, member in self._members.items() if member.swapped]

    @property
    def evicted(self) -> frozenset[Who]:
        """The gservers that lack the weights that the others serve; complete when the update has ended."""
        return frozenset(self._evicted)

    @property
    def blamed(self) -> frozenset[Who]:
        """The gservers that made the update fail, to be left out of the next attempt if possible."""
        return frozenset(self._blamed)

    @property
    def outstanding(self) -> list[Action[Who]]:
        """The actions whose outcome is awaited; all others returned before no longer matter."""
        return [member.now for member in self._members.values() if member.now is not None]

    @property
    def awaits(self) -> Literal["commit", "others", ""]:
        """The event that has a deadline now: the publisher's commit, or the other gservers' remaining work after a
        first failure; empty if none has. `overdue` is to be called once the deadline has passed."""
        if self.phase is Phase.PREPARE and not self._problems() and all(m.through for m in self._members.values()):
            return "commit"
        return "others" if self.phase in (Phase.PREPARE, Phase.CHECK) and self._problems() else ""

    @property
    def state(self) -> str:
        """The present phase, the wait for the commit, or the outcome, for display."""
        if self.ended:
            return "done" if self.done else "rolled_back"
        return "waiting_commit" if self.awaits == "commit" else self.phase.value

    def steps(self) -> dict[Who, UpdateStep | None]:
        """Return the step in progress of each gserver."""
        return {who: member.now.step if member.now is not None else None for who, member in self._members.items()}

    # Events

    def start(self) -> list[Action[Who]]:
        """Begin the update. Only `commit` and `abort` may be called before."""
        self._started = True
        return self._go_on([action for member in self._members.values() for action in self._next(member)])

    def succeeded(self, action: Action[Who]) -> list[Action[Who]]:
        """Record that `action` was carried out."""
        member = self._reply_to(action)
        if member is None:
            return []
        if action.step is UpdateStep.SWAP:
            member.swapped, member.mixed = True, False
        if action.step is UpdateStep.RESUME:
            member.paused = False
        return self._go_on(self._next(member))

    def failed(self, action: Action[Who], health: MemberHealth, reason: str) -> list[Action[Who]]:
        """Record that `action` failed with the error `reason`; it may have been carried out and the reply lost."""
        member = self._reply_to(action)
        if member is None:
            return []
        match action.step:
            case UpdateStep.ASK:
                return self._told(member, None)
            case UpdateStep.RESUME:
                member.paused = False
            case UpdateStep.CLEAR:
                pass  # it is evicted, and resumed nevertheless
            case _:
                member.health, member.problem, member.left = health, reason, []
                if self.phase is Phase.APPLY and action.step is UpdateStep.SWAP:
                    member.left = [UpdateStep.ASK]
        return self._go_on(self._next(member))

    def serves(self, action: Action[Who], what: Serves) -> list[Action[Who]]:
        """Record the reply to `action`, an ASK: the gserver serves `what`."""
        member = self._reply_to(action)
        return [] if member is None else self._told(member, what)

    def commit(self) -> list[Action[Who]]:
        """Record that the publisher has sent all weights."""
        self._committed = True
        return self._go_on([]) if self._started else []

    def abort(self, reason: str) -> list[Action[Who]]:
        """Record that the publisher gives up for `reason`. After its commit this changes nothing."""
        if self._committed or self.phase is not Phase.PREPARE:
            return []
        self._publisher_failed = True
        return self._roll_back(reason)

    def overdue(self, reason: str) -> list[Action[Who]]:
        """Record that the deadline of `awaits` has passed; `reason` is the error message for a missing commit."""
        match self.awaits:
            case "commit":
                return self.abort(reason)
            case "others":
                return self._roll_back("; ".join(self._problems()))
        return []

    def leave(self, reason: str) -> list[Action[Who]]:
        """End as soon as possible, for `reason`: only resume the gservers that this update has paused."""
        if self.ended or self._left_early:
            return []
        self._left_early = True
        self.reason = self.reason or ("" if self.done else reason)
        self.phase = Phase.ROLL_BACK
        return self._go_on([action for member in self._members.values() for action in self._resume_only(member)])

    # Transitions

    def _reply_to(self, action: Action[Who]) -> _Member[Who] | None:
        """Return the gserver that `action` was for; None if the update has continued without its outcome."""
        member = self._members[action.who]
        if member.now is not action:
            return None
        member.now = None
        return member

    def _next(self, member: _Member[Who]) -> list[Action[Who]]:
        """Return the next action of `member` in this phase, if any."""
        if self.phase in (Phase.PREPARE, Phase.CHECK) and self._problems():
            return []  # only replies to calls in progress can still add information
        if member.left:
            return [self._ask(member, member.left.pop(0))]
        if self.phase in (Phase.APPLY, Phase.ROLL_BACK) and member.paused:
            member.left = [UpdateStep.CLEAR, UpdateStep.RESUME] if member.mixed else [UpdateStep.RESUME]
            return [self._ask(member, member.left.pop(0))]
        return []

    def _ask(self, member: _Member[Who], step: UpdateStep) -> Action[Who]:
        if step is UpdateStep.PAUSE:
            member.paused = True
        if step is member.plan.mixes:
            member.mixed = True
        member.now = Action(member.who, step)
        return member.now

    def _told(self, member: _Member[Who], what: Serves | None) -> list[Action[Who]]:
        """Record the weights that `member` reports as served; None if it did not reply."""
        member.serves = what
        if what is None:
            member.health = MemberHealth.LOST
        elif self.phase is Phase.APPLY and what == "new":  # only the reply to the swap was lost
            member.swapped, member.mixed, member.problem, member.health = True, False, "", MemberHealth.FINE
        return self._go_on([] if self.phase is Phase.ROLL_BACK else self._next(member))

    def _go_on(self, actions: list[Action[Who]]) -> list[Action[Who]]:
        """Enter the next phase if all gservers have finished this one; return its first actions, or else `actions`."""
        members = self._members.values()
        match self.phase:
            case Phase.PREPARE | Phase.CHECK if self._problems():
                if not self.outstanding:
                    return self._roll_back("; ".join(self._problems()))
            case Phase.PREPARE if self._committed and all(m.through for m in members):
                return self._enter(Phase.CHECK, lambda member: member.plan.check)
            case Phase.CHECK if all(m.through for m in members):
                return self._enter(Phase.APPLY, lambda member: member.plan.apply)
            case Phase.APPLY if all(m.through for m in members):
                return self._applied()
            case Phase.ROLL_BACK if all(m.through for m in members):
                return self._rolled_back()
        return actions

    def _enter(self, phase: Phase, steps: Callable[[_Member[Who]], Iterable[UpdateStep]]) -> list[Action[Who]]:
        self.phase = phase
        for member in self._members.values():
            member.left = list(steps(member))
        return self._go_on([action for member in self._members.values() for action in self._next(member)])

    def _applied(self) -> list[Action[Who]]:
        if not self.done:
            return self._roll_back("; ".join(self._problems()))
        failed = [member.who for member in self._members.values() if not member.swapped]
        self._evicted.update(failed)
        self._blamed.update(failed)
        self.phase = Phase.ENDED
        return []

    def _roll_back(self, reason: str) -> list[Action[Who]]:
        """Keep the old version; first query every gserver for the weights that it serves."""
        self.reason = reason
        self.phase = Phase.ROLL_BACK
        for member in self._members.values():
            member.left = []
        return [self._ask(member, UpdateStep.ASK) for member in self._members.values()]

    def _rolled_back(self) -> list[Action[Who]]:
        """Decide which gservers are to blame once all have reported their weights, resume the paused ones, and end."""
        members = self._members.values()
        if not self._left_early and not self._evicted and not self._blamed:
            health = {member.who: member.health for member in members}
            self._blamed = culprits(health, publisher_failed=self._publisher_failed)
            self._evicted = self._blamed | {m.who for m in members if m.mixed or m.serves != "old"}
        if actions := [action for member in members for action in self._resume_only(member)]:
            return actions
        if self._left_early:
            self._evicted |= {m.who for m in members if m.mixed or (self.done and not m.swapped)}
        self.phase = Phase.ENDED
        return []

    def _resume_only(self, member: _Member[Who]) -> list[Action[Who]]:
        """Drop the remaining steps of `member`; resume it if it is paused."""
        member.now, member.left = None, []
        return self._next(member) if member.paused else []

    def _problems(self) -> list[str]:
        return [member.problem for member in self._members.values() if member.problem]


def culprits(health: Mapping[Who, MemberHealth], *, publisher_failed: bool) -> set[Who]:
    """Return the gservers to leave out of the next attempt.

    A broadcast fails for all ranks when one is gone. Hence a failure counts against a gserver only if none is lost and
    others did not fail in the same way: a failure of all has an external cause.
    """
    lost = {who for who, state in health.items() if state is MemberHealth.LOST}
    if lost or publisher_failed:
        return lost
    for kind in (MemberHealth.REFUSED, MemberHealth.SLOW):
        guilty = {who for who, state in health.items() if state is kind}
        if guilty and len(guilty) < len(health):
            return guilty
    return set()
