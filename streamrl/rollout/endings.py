"""What ends a response though no gserver said so.

A gserver knows what one request asked of it. A stop string that began in an earlier part of the response passes it by;
and one that aborts a request in the step in which its last token is sampled says that it aborted it, as SGLang does.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from streamrl.stop_strings import StopStrings


class Endings:
    """The tokens and strings that end the responses of a run."""

    def __init__(self, *, tokens: Collection[int], strings: StopStrings) -> None:
        self._tokens = tokens
        self._strings = strings

    def overlooked(self, output_ids: Sequence[int], *, since: int, said: bool) -> tuple[int, str | int] | None:
        """After how many tokens the response had ended, and by what; None: it had not, or its gserver said so.

        `since`: how many of `output_ids` came with earlier requests. `said`: the last one ends it, says the gserver.
        """
        length = len(output_ids)
        if since:
            for end in range(since + 1, min(since + self._strings.reach, length)):
                if found := self._strings.at_the_end(output_ids[:end]):
                    return end, found
        if said or not length:
            return None
        if output_ids[-1] in self._tokens:
            return length, output_ids[-1]
        found = self._strings.at_the_end(output_ids)
        return (length, found) if found else None
