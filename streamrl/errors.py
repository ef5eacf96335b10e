"""Every error that streamrl raises on purpose.

    StreamRLError
    ├── ConfigError          a configuration that cannot work; names the key
    ├── DataError            a data set or record that cannot be read, or a row without what is needed
    ├── ModelError           a model that cannot be found, loaded or served
    ├── RewardError          a reward function that raised, crashed or answered nonsense
    │   └── RewardTimeout    ... or did not answer in time
    ├── UserCodeError        a user's function that raised or returned something else than it should
    │   ├── UserCodeUnusable ... or cannot be loaded
    │   ├── UserCodeTimeout  ... or took too long
    │   └── UserProcessDied  ... or whose process ended
    ├── WireError            a message that breaks the wire format
    ├── PeerError            another process answered with an error
    │   ├── GoneBack         ... or the run has gone back to a checkpoint, from which this process has to start again
    │   └── PeerLost         ... or stopped answering
    │       └── NotOfRun     ... or is none of this run's, which no waiting changes
    ├── ProcessDied          a process that streamrl started ended before its time
    ├── RunStopped           a run that was asked to stop ended before its last step
    ├── EssentialFailed      a task or thread that its process cannot do without failed
    ├── DeadlineExceeded     a wait passed its deadline; names what was awaited
    ├── PublicationError     a weight update that failed and was rolled back
    ├── TransferError        arrays that could not be brought from model worker to model worker
    └── TrainingError        a training step whose numbers make no sense

The message of each says what was wrong, where, and what to do next.
"""

import msgspec

UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What decoders raise for a message that they cannot read, one that is nested too deeply included."""


class StreamRLError(Exception):
    """Base of all errors that streamrl raises on purpose."""


class ConfigError(StreamRLError):
    """A configuration that cannot work."""


class DataError(StreamRLError):
    """A data set or a run's record that cannot be read, or a row without what is needed."""


class ModelError(StreamRLError):
    """A model that cannot be found, loaded or served."""


class RewardError(StreamRLError):
    """A reward function that raised, crashed or answered nonsense."""


class RewardTimeout(RewardError):
    """A reward function that did not answer in time."""


class UserCodeError(StreamRLError):
    """A function of the user's that raised, or returned something else than it should."""


class UserCodeUnusable(UserCodeError):
    """A function of the user's that cannot be loaded, or whose process cannot be started."""


class UserCodeTimeout(UserCodeError):
    """A function of the user's that took too long; the message states what happened to the call."""


class UserProcessDied(UserCodeError):
    """The end of a process during a call of a user's function; the message states how it ended."""

    def __init__(self, message: str, *, calls: int) -> None:
        """`calls`: calls that ran in it, each of which may have ended it."""
        super().__init__(message)
        self.calls = calls


class AgentError(StreamRLError):
    """An agent's episode that failed, never ended, or never asked the policy for anything."""


class UnknownFault(AgentError):
    """The end of a process in which several episodes ran: whichever of them ended it, the others did nothing wrong."""


class WireError(StreamRLError):
    """A message that breaks the wire format."""


class PeerError(StreamRLError):
    """Another process answered with an error."""

    def __init__(self, message: str, *, status: int = 0, retry_seconds: float = 0.0) -> None:
        """`status`: HTTP status of the answer; 0 if there was none. `retry_seconds`: how long it may take until the
        answer is another one; 0: unknown."""
        super().__init__(message)
        self.status = status
        self.retry_seconds = retry_seconds


class GoneBack(PeerError):
    """The run has gone back to a checkpoint, and this process has to begin from there, too."""


class PeerLost(PeerError):
    """Another process stopped answering."""


class NotOfRun(PeerLost):
    """Another server answers there, or one with another secret: it has no certificate of the run's."""


class Refused(StreamRLError):
    """A gserver cannot do this now, or not with these values; nothing has changed there."""


class ProcessDied(StreamRLError):
    """A process that streamrl started ended before its time."""

    def __init__(self, text: str, *, reason: str = "") -> None:
        """`reason`: the same in one line, for a run's records; empty: the first line of `text`."""
        super().__init__(text)
        self.reason = reason or text.partition("\n")[0]


class RunStopped(StreamRLError):
    """A run that was asked to stop ended before its last step, with its records and checkpoint in order."""


class EssentialFailed(StreamRLError):
    """A task or thread that its process cannot do without failed."""


class DeadlineExceeded(StreamRLError):
    """A wait passed its deadline."""


class PublicationError(StreamRLError):
    """A weight update that failed and was rolled back."""


class TransferError(StreamRLError):
    """Arrays that could not be brought from model worker to model worker."""


class TrainingError(StreamRLError):
    """A training step whose numbers make no sense."""


def first_error(error: BaseException) -> BaseException:
    """Return what went wrong first in (nested) groups of tasks."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
