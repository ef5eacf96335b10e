"""Every error that streamrl raises on purpose.

    StreamRLError
    ├── ConfigError          a configuration that cannot work; names the key
    ├── DataError            a data set or record that cannot be read, or a row without a required field
    ├── ModelError           a model that cannot be found, loaded or served
    ├── RewardError          a reward function that raised, crashed or returned an invalid reward
    │   └── RewardTimeout    ... or did not return in time
    ├── UserCodeError        a user's function that raised or returned an invalid value
    │   ├── UserCodeUnusable ... or cannot be loaded
    │   ├── UserCodeTimeout  ... or took too long
    │   └── UserProcessDied  ... or whose process ended
    ├── WireError            a message that breaks the wire format
    ├── PeerError            another process replied with an error
    │   ├── GoneBack         ... or the run has gone back to a checkpoint, from which this process has to start again
    │   └── PeerLost         ... or stopped replying
    │       └── NotOfRun     ... or does not belong to this run, which waiting cannot change
    ├── ProcessDied          a process that streamrl started ended early
    ├── RunStopped           a run that was asked to stop ended before its last step
    ├── EssentialFailed      a task or thread that its process cannot run without failed
    ├── DeadlineExceeded     a wait passed its deadline; names the awaited event
    ├── PublicationError     a weight update that failed and was rolled back
    ├── TransferError        arrays that could not be copied between model workers
    └── TrainingError        a training step with invalid numbers

Each message states the problem, its place, and the remedy.
"""

import msgspec

UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors that decoders raise for an unreadable message, including one that is nested too deeply."""


class StreamRLError(Exception):
    """Base of all errors that streamrl raises on purpose."""


class ConfigError(StreamRLError):
    """A configuration that cannot work."""


class DataError(StreamRLError):
    """A data set or a run's record that cannot be read, or a row without a required field."""


class ModelError(StreamRLError):
    """A model that cannot be found, loaded or served."""


class RewardError(StreamRLError):
    """A reward function that raised, crashed or returned an invalid reward."""


class RewardTimeout(RewardError):
    """A reward function that did not return in time."""


class UserCodeError(StreamRLError):
    """A user's function that raised, or returned an invalid value."""


class UserCodeUnusable(UserCodeError):
    """A user's function that cannot be loaded, or that runs in a process that cannot be started."""


class UserCodeTimeout(UserCodeError):
    """A user's function that took too long; the message states what happened to the call."""


class UserProcessDied(UserCodeError):
    """The end of a process during a call of a user's function; the message states how it ended."""

    def __init__(self, message: str, *, calls: int) -> None:
        """`calls`: number of calls that ran in the process; any of them may have ended it."""
        super().__init__(message)
        self.calls = calls


class AgentError(StreamRLError):
    """An agent's episode that failed, never ended, or never sent the policy a request."""


class UnknownFault(AgentError):
    """The end of a process that ran several episodes: one of them ended it, and the others are not at fault."""


class WireError(StreamRLError):
    """A message that breaks the wire format."""


class PeerError(StreamRLError):
    """Another process replied with an error."""

    def __init__(self, message: str, *, status: int = 0, retry_seconds: float = 0.0) -> None:
        """`status`: HTTP status of the reply; 0 if there was none. `retry_seconds`: how long the error may persist; 0:
        unknown."""
        super().__init__(message)
        self.status = status
        self.retry_seconds = retry_seconds


class GoneBack(PeerError):
    """The run has gone back to a checkpoint, and this process has to restart from it."""


class PeerLost(PeerError):
    """Another process stopped replying."""


class NotOfRun(PeerLost):
    """Another server, or one with another secret, listens there: it has no certificate of this run."""


class Refused(StreamRLError):
    """A gserver cannot do this now, or not with these values; its state has not changed."""


class ProcessDied(StreamRLError):
    """A process that streamrl started ended early."""

    def __init__(self, text: str, *, reason: str = "") -> None:
        """`reason`: one line for the run's records; empty: the first line of `text`."""
        super().__init__(text)
        self.reason = reason or text.partition("\n")[0]


class RunStopped(StreamRLError):
    """A run that was asked to stop ended before its last step, with its records and checkpoint in order."""


class EssentialFailed(StreamRLError):
    """A task or thread that its process cannot run without failed."""


class DeadlineExceeded(StreamRLError):
    """A wait passed its deadline."""


class PublicationError(StreamRLError):
    """A weight update that failed and was rolled back."""


class TransferError(StreamRLError):
    """Arrays that could not be copied between model workers."""


class TrainingError(StreamRLError):
    """A training step with invalid numbers."""


def is_expected(error: BaseException) -> bool:
    """Whether streamrl raised `error` on purpose, or all errors of an exception group."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_expected, error.exceptions))
    return isinstance(error, StreamRLError)


def first_error(error: BaseException) -> BaseException:
    """Return the first error in (nested) exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
