"""Where prompts come from.

Invariant: the prompt of a sequence number is a pure function of the data set, `run.seed` and
the number alone, in whichever process and order it is asked for.
"""

from __future__ import annotations

from typing import Any

import msgspec

from streamrl.config import Config, DataConfig
from streamrl.errors import DataError
from streamrl.rollout.chat import ChatTokenizer, Message
from streamrl.rollout.rows import Row, Rows, open_rows
from streamrl.rollout.shuffle import permuted_index
from streamrl.types import Prompt


class PromptSource:
    """The run's endless stream of prompts."""

    def __init__(self, *, rows: Rows, chat: ChatTokenizer, config: DataConfig, seed: int) -> None:
        """Reads row 0, so that a wrong column is found before anything runs."""
        self._rows = rows
        self._chat = chat
        self._config = config
        self._seed = seed
        self._prompt_key = "question" if config.source == "reasoning_gym" else config.prompt_key
        self.messages(rows[0], where=f"{rows.name}, row 0")

    @classmethod
    def open(cls, config: Config, chat: ChatTokenizer) -> PromptSource:
        """The source that `config.data` names; raises `DataError` or `ConfigError`."""
        rows = open_rows(config.data, seed=config.run.seed)
        return cls(rows=rows, chat=chat, config=config.data, seed=config.run.seed)

    def __len__(self) -> int:
        """Prompts in an epoch."""
        return len(self._rows)

    def prompt(self, seq: int) -> Prompt:
        """The prompt of `seq`; raises `DataError` when its row has none."""
        epoch, position = divmod(seq, len(self._rows))
        index = position
        if self._config.shuffle:
            index = permuted_index(position, size=len(self._rows), seed=self._seed, epoch=epoch)
        row = self._rows[index]
        messages = self.messages(row, where=f"{self._rows.name}, row {index}")
        used = {self._prompt_key, self._config.answer_key}
        whole_entry = self._config.source == "reasoning_gym"  # its scorers read question and answer too
        return Prompt(
            seq=seq,
            index=index,
            epoch=epoch,
            messages=messages,
            input_ids=self._chat.render(messages),
            answer=row.get(self._config.answer_key),
            metadata={key: value for key, value in row.items() if whole_entry or key not in used},
        )

    def check(self, index: int) -> None:
        """Raise `DataError` if row `index` has no prompt."""
        self.messages(self._rows[index], where=f"{self._rows.name}, row {index}")

    def messages(self, row: Row, *, where: str) -> list[Message]:
        """The conversation of `row`; raises `DataError` that names `where`."""
        if self._prompt_key not in row:
            raise DataError(f"{where}: no column {self._prompt_key!r} for data.prompt_key; there is {', '.join(row)}")
        content = row[self._prompt_key]
        if isinstance(content, str):
            messages = [{"role": "user", "content": content}]
        else:
            messages = _chat_messages(content, where=f"{where}, column {self._prompt_key!r}")
        if self._config.suffix:
            last = messages[-1]
            messages[-1] = {**last, "content": last["content"] + self._config.suffix}
        if self._config.system_prompt is not None:
            if messages[0]["role"] == "system":
                raise DataError(f"{where}: has a system message of its own; leave data.system_prompt unset")
            messages.insert(0, {"role": "system", "content": self._config.system_prompt})
        return messages


def _chat_messages(content: Any, *, where: str) -> list[Message]:
    try:
        messages = msgspec.convert(content, list[Message])
    except msgspec.ValidationError as error:
        raise DataError(f"{where}: neither a string nor a list of chat messages: {error}") from error
    if not messages:
        raise DataError(f"{where}: an empty conversation")
    for message in messages:
        if not {"role", "content"} <= message.keys():
            raise DataError(f"{where}: a chat message needs role and content; one has {', '.join(message) or 'none'}")
    return messages
