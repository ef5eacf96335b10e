"""The states of one weight update, pure: events in, steps to take out; no I/O and no clock.

    prepare ──────▶ (commit) ──────▶ check ──────▶ take ──────▶ done
       │                │              │             │ nobody swapped
       └────────────────┴──────────────┴─────────────┴──▶ roll back ──▶ rolled back

*Prepare* brings the weights to every gserver, *check* compares them with what was trained, *take* pauses,
swaps and resumes each gserver on its own (one that stages none and reads files does all of it there). Gservers
pass `prepare` and `check` together: nobody goes on before all are through, and before the publisher has committed.

Invariants: until the first swap succeeds every failure rolls back, and gservers that hold unmixed weights go
on at the old version; from then on the update stands, and a gserver that fails is evicted. Whoever was asked
to pause is asked to resume, and one with mixed weights is first asked to end its requests. If every step is
answered, and `overdue` comes when `awaits` asks for it, the update ends.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Generic, Literal, TypeVar

from streamrl.gserver.blame import Seen, culprits

Who = TypeVar("Who", bound=Hashable)


class Stage(Enum):
    """How far an update is; in the order of an update that succeeds."""

    IDLE = "idle"
    FORMING = "forming"
    TRANSFERRING = "transferring"
    WAITING_COMMIT = "waiting_commit"
    CHECKING = "checking"
    PAUSING = "pausing"
    SWAPPING = "swapping"
    RESUMING = "resuming"
    DONE = "done"
    ROLLED_BACK = "rolled_back"


ORDER = {stage: place for place, stage in enumerate(Stage)}


class Step(Enum):
    """What a gserver is asked to do; each is one or more calls with a deadline."""

    JOIN = "join"
    """Meet the others in the weight group."""
    BEGIN = "begin"
    RECEIVE = "receive"
    """Take the new weights: aside if it stages, else straight into those that it serves."""
    VERIFY = "verify"
    """Show that the new weights are those that were trained."""
    PAUSE = "pause"
    MARK = "mark"
    """Call your weights mixed, before they are: whatever is sampled from them can be told apart."""
    SWAP = "swap"
    """Serve the new weights from here on."""
    ASK = "ask"
    """Say which weights you serve."""
    CLEAR = "clear"
    """End your requests, with what they have."""
    RESUME = "resume"


_STAGE_OF = {
    Step.JOIN: Stage.FORMING,
    Step.BEGIN: Stage.TRANSFERRING,
    Step.RECEIVE: Stage.TRANSFERRING,
    Step.VERIFY: Stage.CHECKING,
    Step.SWAP: Stage.SWAPPING,
    Step.CLEAR: Stage.RESUMING,
    Step.RESUME: Stage.RESUMING,
}

Serves = Literal["old", "new", "other"]
"""Which weights a gserver says that it serves."""


@dataclass(frozen=True)
class Plan:
    """The steps of one gserver."""

    prepare: tuple[Step, ...] = ()
    check: tuple[Step, ...] = ()
    take: tuple[Step, ...] = (Step.PAUSE, Step.SWAP)
    mixes: Step | None = None
    """From this step on, until the swap is through, the weights that it serves may be of two versions."""


def plan_for(*, way: Literal["broadcast", "snapshot"], staged: bool, joined: bool, verified: bool) -> Plan:
    """The steps of a gserver that can stage weights, or cannot (real SGLang).

    `joined`: it is in the weight group already. `verified`: what it received is compared.
    """
    join = () if joined or way == "snapshot" else (Step.JOIN,)
    check = (Step.VERIFY,) if verified else ()
    if staged:
        return Plan(prepare=(*join, Step.BEGIN, Step.RECEIVE), check=check)
    if way == "snapshot":  # nothing touches it before its turn has come, when it reads the files
        return Plan(take=(Step.PAUSE, Step.MARK, Step.RECEIVE, *check, Step.SWAP), mixes=Step.MARK)
    steps = (*join, Step.PAUSE, Step.BEGIN, Step.MARK, Step.RECEIVE)
    return Plan(prepare=steps, check=check, take=(Step.SWAP,), mixes=Step.MARK)


@dataclass(frozen=True, eq=False)
class Do(Generic[Who]):
    """Ask `who` to take `step`, and tell how it went: `succeeded`, `failed` or (ASK) `serves`."""

    who: Who
    step: Step


class Phase(Enum):
    """Of the update as a whole."""

    PREPARE = "prepare"
    CHECK = "check"
    TAKE = "take"
    ROLL_BACK = "roll back"
    ENDED = "ended"


class _Member(Generic[Who]):
    def __init__(self, who: Who, plan: Plan) -> None:
        self.who = who
        self.plan = plan
        self.left = list(plan.prepare)
        self.now: Do[Who] | None = None
        self.stage = Stage.FORMING
        self.through = not plan.prepare
        """Whether nothing is left to do in this phase."""
        self.paused = False
        self.mixed = False
        self.swapped = False
        self.seen = Seen.FINE
        self.said = ""
        self.serves: Serves | None = None


class UpdateStates(Generic[Who]):
    """One update over the gservers of `plans`. Every event answers which steps to take next."""

    def __init__(self, plans: Mapping[Who, Plan]) -> None:
        self.phase = Phase.PREPARE
        self.reason = ""
        """Why it was rolled back."""
        self._members = {who: _Member(who, plan) for who, plan in plans.items()}
        self._started = False
        self._committed = False
        self._publisher_failed = False
        self._left_early = False
        self._evicted: set[Who] = set()
        self._blamed: set[Who] = set()

    # What is known

    @property
    def ended(self) -> bool:
        return self.phase is Phase.ENDED

    @property
    def done(self) -> bool:
        """Whether the new weights are served."""
        return any(member.swapped for member in self._members.values())

    @property
    def swapped(self) -> list[Who]:
        return [who for who, member in self._members.items() if member.swapped]

    @property
    def evicted(self) -> frozenset[Who]:
        """Those that do not serve what stands now; complete when the update has ended."""
        return frozenset(self._evicted)

    @property
    def blamed(self) -> frozenset[Who]:
        """Those because of whom something failed: better left out of the next attempt."""
        return frozenset(self._blamed)

    @property
    def lost(self) -> bool:
        """Whether one of them did not answer at all."""
        return any(member.seen is Seen.LOST for member in self._members.values())

    @property
    def outstanding(self) -> list[Do[Who]]:
        """Steps whose answers are awaited; those that were handed out before and are not here do not matter."""
        return [member.now for member in self._members.values() if member.now is not None]

    @property
    def awaits(self) -> Literal["commit", "others", ""]:
        """What `overdue` is about, if the clock should run: the publisher's commit, or how the others fare after
        a first failure."""
        if self.phase is Phase.PREPARE and not self._said() and all(m.through for m in self._members.values()):
            return "commit"
        return "others" if self.phase in (Phase.PREPARE, Phase.CHECK) and self._said() else ""

    @property
    def stage(self) -> Stage:
        """That of the gserver furthest behind."""
        if self.ended:
            return Stage.DONE if self.done else Stage.ROLLED_BACK
        return min((member.stage for member in self._members.values()), key=ORDER.__getitem__)

    def stages(self) -> dict[Who, Stage]:
        return {who: member.stage for who, member in self._members.items()}

    # Events

    def start(self) -> list[Do[Who]]:
        """The first steps."""
        self._started = True
        return self._go_on([step for member in self._members.values() for step in self._next(member)])

    def succeeded(self, do: Do[Who]) -> list[Do[Who]]:
        """The step was taken."""
        member = self._answered(do)
        if member is None:
            return []
        if do.step is Step.SWAP:
            member.swapped, member.mixed = True, False
        if do.step is Step.RESUME:
            member.paused = False
        return self._go_on(self._next(member))

    def failed(self, do: Do[Who], seen: Seen, reason: str) -> list[Do[Who]]:
        """The step was not taken, or nobody knows."""
        member = self._answered(do)
        if member is None:
            return []
        match do.step:
            case Step.ASK:
                return self._heard(member, None)
            case Step.RESUME:
                member.paused = False
            case Step.CLEAR:
                pass  # it is evicted, and resumed all the same
            case _:
                member.seen, member.said, member.left = seen, reason, []
                if self.phase is Phase.TAKE and do.step is Step.SWAP:
                    member.left = [Step.ASK]
        return self._go_on(self._next(member))

    def serves(self, do: Do[Who], what: Serves) -> list[Do[Who]]:
        """The answer to ASK."""
        member = self._answered(do)
        return [] if member is None else self._heard(member, what)

    def commit(self) -> list[Do[Who]]:
        """The publisher has brought everything."""
        self._committed = True
        return self._go_on([]) if self._started else []

    def abort(self, reason: str) -> list[Do[Who]]:
        """The publisher gives up, which it cannot after its commit."""
        if self._committed or self.phase is not Phase.PREPARE:
            return []
        self._publisher_failed = True
        return self._roll_back(reason)

    def overdue(self, reason: str) -> list[Do[Who]]:
        """What `awaits` named did not come; `reason` is for a commit that is missing."""
        match self.awaits:
            case "commit":
                return self.abort(reason)
            case "others":
                return self._roll_back("; ".join(self._said()))
        return []

    def leave(self, reason: str) -> list[Do[Who]]:
        """End as soon as may be: only resume whom this update has paused."""
        if self.ended or self._left_early:
            return []
        self._left_early = True
        self.reason = self.reason or ("" if self.done else reason)
        self.phase = Phase.ROLL_BACK
        return self._go_on([step for member in self._members.values() for step in self._let_go(member)])

    # How they are answered

    def _answered(self, do: Do[Who]) -> _Member[Who] | None:
        """The gserver that took `do`, unless the update has gone on without it."""
        member = self._members[do.who]
        if member.now is not do:
            return None
        member.now = None
        return member

    def _next(self, member: _Member[Who]) -> list[Do[Who]]:
        """The next step of `member` in this phase."""
        if self.phase in (Phase.PREPARE, Phase.CHECK) and self._said():
            return []  # only what is under way may still tell something
        if member.left:
            return [self._ask(member, member.left.pop(0))]
        if self.phase in (Phase.TAKE, Phase.ROLL_BACK) and member.paused:
            member.left = [Step.RESUME]
            return self._next_of_resuming(member)
        member.through = True
        if self.phase is Phase.PREPARE:
            member.stage = Stage.WAITING_COMMIT
        elif self.phase is Phase.TAKE:
            member.stage = Stage.DONE
        return []

    def _next_of_resuming(self, member: _Member[Who]) -> list[Do[Who]]:
        if member.mixed and member.stage is not Stage.RESUMING:
            return [self._ask(member, Step.CLEAR)]
        return [self._ask(member, member.left.pop(0))]

    def _ask(self, member: _Member[Who], step: Step) -> Do[Who]:
        if step is Step.PAUSE:
            member.paused = True
            if self.phase is Phase.TAKE:
                member.stage = Stage.PAUSING
        if step is member.plan.mixes:
            member.mixed = True
        loads = self.phase is Phase.TAKE and step in (Step.RECEIVE, Step.VERIFY)
        member.stage = Stage.SWAPPING if loads else _STAGE_OF.get(step, member.stage)
        member.now = Do(member.who, step)
        return member.now

    def _heard(self, member: _Member[Who], what: Serves | None) -> list[Do[Who]]:
        member.serves = what
        if what is None:
            member.seen = Seen.LOST
        elif self.phase is Phase.TAKE and what == "new":  # only the answer was lost
            member.swapped, member.mixed, member.said, member.seen = True, False, "", Seen.FINE
        if self.phase is Phase.ROLL_BACK:
            member.through = True
            return self._go_on([])
        return self._go_on(self._next(member))

    def _go_on(self, steps: list[Do[Who]]) -> list[Do[Who]]:
        """Change the phase where all are through with it."""
        members = self._members.values()
        match self.phase:
            case Phase.PREPARE | Phase.CHECK if self._said():
                if not self.outstanding:
                    return self._roll_back("; ".join(self._said()))
            case Phase.PREPARE if self._committed and all(m.through for m in members):
                return self._enter(Phase.CHECK, lambda member: member.plan.check)
            case Phase.CHECK if all(m.through for m in members):
                return self._enter(Phase.TAKE, lambda member: member.plan.take)
            case Phase.TAKE if all(m.through for m in members):
                return self._taken()
            case Phase.ROLL_BACK if all(m.through for m in members):
                return self._rolled_back()
        return steps

    def _enter(self, phase: Phase, steps: Callable[[_Member[Who]], Iterable[Step]]) -> list[Do[Who]]:
        self.phase = phase
        for member in self._members.values():
            member.left, member.through = list(steps(member)), False
        return self._go_on([step for member in self._members.values() for step in self._next(member)])

    def _taken(self) -> list[Do[Who]]:
        if not self.done:
            return self._roll_back("; ".join(self._said()))
        failed = [member.who for member in self._members.values() if not member.swapped]
        self._evicted.update(failed)
        self._blamed.update(failed)
        self.phase = Phase.ENDED
        return []

    def _roll_back(self, reason: str) -> list[Do[Who]]:
        """Leave the old version standing; first hear from everyone how they are."""
        self.reason = reason
        self.phase = Phase.ROLL_BACK
        for member in self._members.values():
            member.left, member.through = [], False
        return [self._ask(member, Step.ASK) for member in self._members.values()]

    def _rolled_back(self) -> list[Do[Who]]:
        """All have answered, or all are resumed."""
        members = self._members.values()
        if not self._left_early and not self._evicted and not self._blamed:
            seen = {member.who: member.seen for member in members}
            self._blamed = culprits(seen, publisher_failed=self._publisher_failed)
            self._evicted = self._blamed | {m.who for m in members if m.mixed or m.serves != "old"}
        if steps := [step for member in members for step in self._let_go(member)]:
            return steps
        if self._left_early:
            self._evicted |= {m.who for m in members if m.mixed or (self.done and not m.swapped)}
        self.phase = Phase.ENDED
        return []

    def _let_go(self, member: _Member[Who]) -> list[Do[Who]]:
        """Resume `member` if it is paused; forget whatever else it was to do."""
        member.now, member.left, member.through = None, [], not member.paused
        return self._next(member) if member.paused else []

    def _said(self) -> list[str]:
        return [member.said for member in self._members.values() if member.said]
