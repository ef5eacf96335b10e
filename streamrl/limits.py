"""Times, in seconds, that several modules share. [limits] of the configuration has the times that a run may set."""

CLOSE_SECONDS = 1.0
"""Longest time, when a server closes, for open connections and for requests in progress."""
ANSWER_SECONDS = 5.0
"""Deadline of a request to which a live process replies at once."""
WARNING_SECONDS = 30.0
"""A longer wait is named in the log."""
