"""Prompts from data sources.

`PromptSource` is the run's endless stream of prompts: it passes through the data set again and again, each epoch in its
own order. Invariant: the prompt of a sequence number is a pure function of the data set, `run.seed` and the number
alone, in every process and in any order of requests. With `data.sampler` it is one of the data set and the row that the
controller sends with the sequence number.

A data source reports its number of rows and returns one row at a time. A row is a mapping of JSON types. Sources are
read lazily and never change during a run. A new source needs a function like those below, a case in `open_rows`, and
its name in `streamrl.config.fields.DataSource`. A source that only generates rows needs none of that: write a function
and set `data.source = "python"`.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from streamrl import userland
from streamrl.config import Config, DataConfig
from streamrl.config.fields import GENERATED_SOURCES
from streamrl.errors import ConfigError, DataError, UserCodeError, UserCodeTimeout, UserCodeUnusable
from streamrl.hooks import load_object
from streamrl.records.files import decode_line
from streamrl.rollout.agents.runner import environment_of
from streamrl.rollout.chat import ChatTokenizer, Message
from streamrl.types import Prompt

Row = dict[str, Any]
Position = Callable[[int], int]
"""Returns the place of a sequence number among those of its data source, from 0."""
EXCERPT = 60
"""Most characters of a prompt and of an answer in a description."""
DIGEST_ROWS = 64


class PromptSource:
    """The run's endless stream of prompts."""

    def __init__(
        self, *, rows: Rows, chat: ChatTokenizer, config: DataConfig, seed: int, position: Position = lambda seq: seq
    ) -> None:
        """Read row 0, so that a wrong column is found before the run starts; raises `DataError`."""
        self._rows = rows
        self._chat = chat
        self._config = config
        self._seed = seed
        self._position = position
        self._prompt_key = "question" if config.source == "reasoning_gym" else config.prompt_key
        self.messages(rows[0], where=self.place(0))

    @classmethod
    def open(cls, config: Config, chat: ChatTokenizer, *, position: Position = lambda seq: seq) -> PromptSource:
        """Open the source that `config.data` names; raises `DataError` or `ConfigError`."""
        if config.rollout.agent.verifiers:
            data = msgspec.structs.replace(config.data, source="python", prompt_key="prompt", answer_key="answer")
            rows = verifiers_rows(config)
        else:
            data, rows = config.data, open_rows(config.data, seed=config.run.seed)
        return cls(rows=rows, chat=chat, config=data, seed=config.run.seed, position=position)

    def __len__(self) -> int:
        """Return the number of prompts in an epoch."""
        return len(self._rows)

    def place(self, index: int) -> str:
        """Return the file and line of row `index`, or the source and the row's number if it has no lines."""
        return self._rows.place(index)

    def prompt(self, seq: int, *, row: int | None = None) -> Prompt:
        """Return the prompt of `seq`; raises `DataError` if its row has none.

        `row`: the row that `data.sampler` chose; None: it follows from `seq`.
        """
        epoch, position = divmod(self._position(seq), len(self._rows))
        index = position if row is None else row
        if self._config.shuffle and row is None:
            index = permuted_index(position, size=len(self._rows), seed=self._seed, epoch=epoch)
        found = self._rows[index]
        where = self.place(index)
        messages = self.messages(found, where=where)
        answer = found.get(self._config.answer_key)
        used = {self._prompt_key, self._config.answer_key}
        whole_entry = self._config.source == "reasoning_gym"  # its scorers also read question and answer
        return Prompt(
            seq=seq,
            index=index,
            epoch=epoch,
            messages=messages,
            input_ids=self._render(messages, where=where),
            answer=answer if answer is None or self._config.answer_type == "as_is" else answer_text(answer),
            metadata={key: value for key, value in found.items() if whole_entry or key not in used},
        )

    def describe(self, seq: int, *, row: int | None = None) -> str:
        """Return a readable description of `seq`: its row, the end of its last message and the start of its answer."""
        try:
            prompt = self.prompt(seq, row=row)
        except Exception:  # tolerance point: the user's data function may raise anything
            return f"seq {seq}"
        asked = str(prompt.messages[-1]["content"])
        answer = "" if prompt.answer is None else f", answer {str(prompt.answer)[:EXCERPT]!r}"
        return f"row {prompt.index} (seq {seq}): prompt {asked[-EXCERPT:]!r}{answer}"

    def digest(self) -> str:
        """Return the fingerprint of the prompts of rows in files; empty for a source that generates its rows.

        It does not depend on the location of the files. `DIGEST_ROWS` rows are read, spread evenly from the first to
        the last.
        """
        if self._config.source in GENERATED_SOURCES:
            return ""
        digest = hashlib.blake2b(digest_size=8)
        for index in np.unique(np.linspace(0, len(self) - 1, DIGEST_ROWS).astype(int)).tolist():
            try:
                digest.update(msgspec.json.encode((index, self.messages(self._rows[index], where=""))))
            except DataError:  # rejected when its turn comes
                digest.update(b"unreadable")
        return digest.hexdigest()

    def check(self, index: int) -> None:
        """Raise `DataError` if row `index` has no prompt.

        Text is tokenized only if the tokenizer lacks tokens for some characters, or if all messages are empty:
        tokenizing takes many times as long.
        """
        where = self.place(index)
        messages = self.messages(self._rows[index], where=where)
        if self._chat.lacks_characters or not any(message["content"] for message in messages):
            self._render(messages, where=where)

    def _render(self, messages: list[Message], *, where: str) -> list[int]:
        """Return the tokens of a prompt; raises `DataError`, which names `where`, if it has none."""
        try:
            token_ids = self._chat.render(messages)
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
        if not token_ids:
            raise DataError(f"{where}: the prompt has no tokens, so there is nothing that the policy could continue")
        return token_ids

    def messages(self, row: Row, *, where: str) -> list[Message]:
        """Return the conversation in `row`; raises `DataError`, which names `where`, if there is none."""
        if self._prompt_key not in row:
            raise DataError(f"{where}: no column {self._prompt_key!r} for data.prompt_key; there is {', '.join(row)}")
        content = row[self._prompt_key]
        if isinstance(content, str):
            messages: list[Message] = [{"role": "user", "content": content}]
        else:
            messages = _chat_messages(content, where=f"{where}, column {self._prompt_key!r}")
        if self._config.suffix:
            last = messages[-1]
            if not isinstance(last["content"], str):
                kind = type(last["content"]).__name__
                raise DataError(f"{where}: data.suffix needs text to stand behind; the last message has a {kind}")
            messages[-1] = {**last, "content": last["content"] + self._config.suffix}
        if self._config.system_prompt is not None:
            if messages[0]["role"] == "system":
                raise DataError(f"{where}: has a system message of its own; leave data.system_prompt unset")
            messages.insert(0, {"role": "system", "content": self._config.system_prompt})
        return messages


def answer_text(answer: Any) -> str:
    """Return a reference answer as text: text as it is, any other value as JSON."""
    return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)


def _chat_messages(content: Any, *, where: str) -> list[Message]:
    try:
        messages = msgspec.convert(content, list[Message])
    except msgspec.ValidationError as error:
        raise DataError(f"{where}: neither a string nor a list of chat messages: {error}") from error
    if not messages:
        raise DataError(f"{where}: an empty conversation")
    for index, message in enumerate(messages):
        if not {"role", "content"} <= message.keys():
            raise DataError(f"{where}: a chat message needs role and content; one has {', '.join(message) or 'none'}")
        if isinstance(message["content"], list):  # many chat templates would write the list in Python's notation
            messages[index] = {**message, "content": _text_of(message["content"], where=f"{where}, message {index}")}
    return messages


def _text_of(parts: list[Any], *, where: str) -> str:
    """Return the text of a message's content parts; raises `DataError` for a part that is not text."""
    texts: list[str] = []
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise DataError(f"{where}: its content has a part that is not text: {part!r:.200}")
        texts.append(part["text"])
    return "".join(texts)


# --- the order of rows ---

_FEISTEL_ROUNDS = 6


def permuted_index(position: int, *, size: int, seed: int, epoch: int) -> int:
    """Return the row at `position` (0 ≤ position < size) of a shuffled epoch of `size` rows.

    Each epoch has a permutation, and any process can compute it for one position alone: a Feistel network over the next
    power of four, repeated until the result is below `size` (Black and Rogaway, "Ciphers with Arbitrary Finite
    Domains", 2002). It needs no table and does not depend on library versions, so a resumed run has the same order.
    """
    if not 0 <= position < size:
        raise ValueError(f"position {position} is outside an epoch of {size} rows")
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    index = position
    while True:  # at most 4 passes on average, because the network's domain is below 4 · size
        index = _feistel(index, half_bits=half_bits, key=f"{seed}/{epoch}")
        if index < size:
            return index


def _feistel(value: int, *, half_bits: int, key: str) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for number in range(_FEISTEL_ROUNDS):
        digest = hashlib.blake2b(f"{key}/{number}/{right}".encode(), digest_size=8).digest()
        left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
    return left << half_bits | right


# --- data sources ---


class Rows:
    """The rows of a data source."""

    def __init__(self, name: str, size: int, read: Callable[[int], Any]) -> None:
        """`name`: of the source, for error messages. `read` returns the mapping of a row; may raise `DataError`."""
        self.name = name
        self._size = size
        self._read = read

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Row:
        """Return row `index` in JSON types; raises `DataError` if it cannot be read."""
        return json_types(self._read(index), where=self.place(index))

    def place(self, index: int) -> str:
        """Return the location of row `index`, for error messages."""
        return f"{self.name}, row {index}"


class JsonlRows(Rows):
    """A file with one JSON object in each line; empty lines are skipped."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = _existing_file(path)
        if path.stat().st_size == 0:
            raise DataError(f"{path} is empty")
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._decoder = msgspec.json.Decoder(Row)
        self._starts, self._numbers = self._index()

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Row:
        start = int(self._starts[index])
        line = self._bytes[start : self._line_end(start)]
        return decode_line(line, self._decoder, what="a JSON object", file=self._path, number=int(self._numbers[index]))

    def place(self, index: int) -> str:
        return f"{self.name}, line {self._numbers[index]}"

    def _index(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the start in bytes and the number, from 1, of each line that is not empty."""
        starts: list[int] = []
        numbers: list[int] = []
        start, number = 0, 1
        while start < len(self._bytes):
            end = self._line_end(start)
            if self._bytes[start:end].strip():
                starts.append(start)
                numbers.append(number)
            start, number = end + 1, number + 1
        return np.array(starts, dtype=np.int64), np.array(numbers, dtype=np.int64)

    def _line_end(self, start: int) -> int:
        end = self._bytes.find(b"\n", start)
        return len(self._bytes) if end < 0 else end


def parquet_rows(path: Path) -> Rows:
    """Return the rows of a Parquet file, which is mapped into memory as Arrow columns."""
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(_existing_file(path), memory_map=True)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}") from error
    return Rows(str(path), table.num_rows, lambda index: table.slice(index, 1).to_pylist()[0])


def hf_disk_rows(path: Path) -> Rows:
    """Return the rows of a folder that `datasets.Dataset.save_to_disk` wrote."""
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ConfigError(
            'data.source = "hf_disk" needs the datasets package: pip install "streamrl[datasets]"'
        ) from error
    if not path.is_dir():
        raise DataError(f"data.path = {str(path)!r}: there is no such folder")
    try:
        loaded = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not a folder that datasets.save_to_disk wrote: {error}") from error
    if isinstance(loaded, datasets.DatasetDict):
        raise DataError(f"{path} holds the splits {', '.join(loaded)}: set data.path to one of their folders")
    return Rows(str(path), len(loaded), loaded.__getitem__)


def python_rows(spec: str, *, size: int, seed: int, args: dict[str, Any]) -> Rows:
    """Return the rows of the user's function `function(index, seed, **args)`, which returns one row."""
    function: Callable[..., Any] = load_object(spec, key="data.path")

    def read(index: int) -> Row:
        row = function(index, seed, **args)
        if not isinstance(row, dict):
            raise DataError(f"{spec} returned a {type(row).__name__} for row {index}; it must return a dict")
        return row

    return Rows(spec, size, read)


def verifiers_rows(config: Config) -> Rows:
    """Return the tasks of a verifiers taskset, listed in the interpreter that has the package."""
    agent, data, seconds = config.rollout.agent, config.data, config.limits.start_seconds
    name = f"the taskset {agent.verifiers}"
    environment = {name: value for name, value in agent.args.items() if name != "sampling"}
    setup = userland.SetupMessage(
        loader="streamrl.rollout.agents.verifiers:serve_listing",
        settings={"taskset": agent.verifiers, "args": data.args, "environment": environment},
    )
    try:
        tasks: list[Row] = userland.call_once(
            setup, (data.size,), timeout=seconds, environment=environment_of(config), python=agent.python
        )
    except UserCodeTimeout as error:
        raise DataError(f"{name} has not listed its tasks within limits.start_seconds = {seconds:g}") from error
    except UserCodeUnusable as error:
        raise ConfigError(str(error)) from error
    except UserCodeError as error:
        raise ConfigError(f"rollout.agent.verifiers = {agent.verifiers!r} cannot list its tasks:\n{error}") from error
    if not tasks:
        raise DataError(f"{name} has no tasks")
    return Rows(name, len(tasks), tasks.__getitem__)


def open_rows(config: DataConfig, *, seed: int) -> Rows:
    """Open the data source that `config` names; raises `DataError` or `ConfigError` if it is unreadable or empty."""
    match config.source:
        case "jsonl":
            rows: Rows = JsonlRows(Path(config.path).expanduser())
        case "parquet":
            rows = parquet_rows(Path(config.path).expanduser())
        case "hf_disk":
            rows = hf_disk_rows(Path(config.path).expanduser())
        case "reasoning_gym":
            entries = create_reasoning_gym(config.path, size=config.size, seed=seed, args=config.args)
            rows = Rows(f"reasoning-gym task {config.path}", len(entries), lambda index: dict(entries[index]))
        case "python":
            rows = python_rows(config.path, size=config.size, seed=seed, args=config.args)
    if len(rows) == 0:
        raise DataError(f"{rows.name} has no rows")
    return rows


def create_reasoning_gym(task: str, *, size: int, seed: int, args: dict[str, Any]) -> Any:
    """Return the reasoning-gym data set of `task`; equal arguments give equal entries in every process.

    Raises `ConfigError` for an unknown task, or for arguments that do not fit it.
    """
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        raise ConfigError('reasoning-gym is not installed: pip install "streamrl[rewards]"') from error
    if task not in DATASETS:
        from difflib import get_close_matches

        near = get_close_matches(task, DATASETS, n=3) or sorted(DATASETS)[:10]
        raise ConfigError(f"data.path = {task!r}: reasoning-gym has no such task; near: {', '.join(near)}")
    try:
        return reasoning_gym.create_dataset(task, size=size, seed=seed, **args)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"data.args do not fit the reasoning-gym task {task}: {error}") from error


def json_types(row: Row, *, where: str) -> Row:
    """Return `row` in JSON types: tuples become lists, dates strings, NumPy values plain ones.

    Raises `DataError`, which names `where`, for a value that has no JSON type.
    """
    try:
        return msgspec.json.decode(_json.encode(row), type=Row)
    except (TypeError, NotImplementedError, ValueError, OverflowError) as error:
        raise DataError(f"{where}: holds a value that is no JSON type: {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise NotImplementedError(f"a {type(value).__name__}")  # the way to refuse a value in a hook of msgspec


_json = msgspec.json.Encoder(enc_hook=_plain)


def _existing_file(path: Path) -> Path:
    if not path.is_file():
        raise DataError(f"data.path = {str(path)!r}: there is no such file (working directory: {Path.cwd()})")
    return path
