"""Prompts as a pure function of their sequence number; data sources, and what is wrong with them in words."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.config import Config, from_dict
from streamrl.config.sections import as_evaluated
from streamrl.errors import ConfigError, DataError
from streamrl.models import _symbol_tokenizer
from streamrl.rollout.chat import ChatTokenizer
from streamrl.rollout.data import JsonlRows, PromptSource, permuted_index
from tests.rollout.characters import PLAIN_TEMPLATE, make_chat, make_tokenizer
from tests.rollout.user_code import CodePoints


@pytest.fixture(scope="module")
def chat() -> ChatTokenizer:
    return make_chat()


def configure(seed: int = 7, **data: Any) -> Config:
    return from_dict({"run": {"seed": seed}, "data": data})


def opened(chat: ChatTokenizer, seed: int = 7, **data: Any) -> PromptSource:
    return PromptSource.open(configure(seed, **data), chat)


def jsonl(folder: Path, *rows: Any) -> Path:
    path = folder / "data.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_prompts_in_a_file_have_a_fingerprint_that_follows_the_file(chat: ChatTokenizer, tmp_path: Path) -> None:
    def digest(rows: list[dict[str, Any]], name: str = "here", **data: Any) -> str:
        (tmp_path / name).mkdir(exist_ok=True)
        return opened(chat, source="jsonl", path=str(jsonl(tmp_path / name, *rows)), **data).digest()

    rows = [{"prompt": f"{number}=", "answer": "1"} for number in range(1000)]
    base = digest(rows)
    assert base
    assert digest(rows, "elsewhere") == base
    assert digest([row | {"answer": "2"} for row in rows]) == base  # sequence numbers mean the same prompts
    assert digest(rows[::-1]) != base
    assert digest([*rows[:-1], {"prompt": "5="}]) != base
    assert digest([rows[0], {"answer": "no prompt"}]) == digest([rows[0], {"answer": "no prompt"}], "elsewhere")
    assert opened(chat, source="python", path="tests.rollout.user_code:row", size=20).digest() == ""


@settings(deadline=None)
@given(size=st.integers(1, 300), seed=st.integers(0, 2**40), epoch=st.integers(0, 100))
def test_each_epoch_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    order = [permuted_index(i, size=size, seed=seed, epoch=epoch) for i in range(size)]
    assert sorted(order) == list(range(size))


def test_epochs_and_seeds_differ_and_rows_are_spread() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return [permuted_index(i, size=1000, seed=seed, epoch=epoch) for i in range(1000)]

    base = order(0, 0)
    assert base != order(0, 1)
    assert base != order(1, 0)
    assert 350 < sum(base[:500]) / 500 < 650  # the first half is drawn from all over


def test_permutation_is_fixed_for_good() -> None:
    """A resumed run of a later version must see the same order."""
    assert [permuted_index(i, size=10, seed=1, epoch=2) for i in range(10)] == [3, 2, 5, 4, 0, 9, 6, 8, 7, 1]


@settings(deadline=None)
@given(seqs=st.lists(st.integers(0, 500), min_size=1, max_size=30))
def test_a_prompt_is_a_pure_function_of_its_seq(chat: ChatTokenizer, seqs: list[int]) -> None:
    asked_in_any_order = opened(chat, source="python", path="tests.rollout.user_code:row", size=17)
    for seq in seqs:
        alone = opened(chat, source="python", path="tests.rollout.user_code:row", size=17)
        assert asked_in_any_order.prompt(seq) == alone.prompt(seq)


def test_prompts_do_not_depend_on_the_process() -> None:
    data = {"source": "reasoning_gym", "path": "chain_sum", "size": 50}
    script = (
        "import json, msgspec; from streamrl.config import from_dict; from streamrl.rollout.data import PromptSource;"
        "from streamrl.rollout.chat import ChatTokenizer; from tests.rollout.user_code import CodePoints;"
        f"config = from_dict({{'run': {{'seed': 7}}, 'data': {data}}});"
        "source = PromptSource.open(config, ChatTokenizer(CodePoints()));"
        "print(msgspec.json.encode([source.prompt(s) for s in (60, 3, 0)]).decode())"
    )
    there = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    source = opened(ChatTokenizer(CodePoints()), **data)
    assert json.loads(there) == msgspec.to_builtins([source.prompt(seq) for seq in (60, 3, 0)])


def test_epochs_pass_through_every_row(chat: ChatTokenizer) -> None:
    source = opened(chat, source="python", path="tests.rollout.user_code:row", size=9)
    prompts = [source.prompt(seq) for seq in range(27)]
    for epoch in range(3):
        assert sorted(p.index for p in prompts[epoch * 9 : epoch * 9 + 9]) == list(range(9))
        assert {p.epoch for p in prompts[epoch * 9 : epoch * 9 + 9]} == {epoch}


ANSWERS = ["521", "", 521, -0.5, True, None, ["a", 1], {"x": "ä"}]
ANSWER_TEXTS = ["521", "", "521", "-0.5", "true", None, '["a", 1]', '{"x": "ä"}']


def answered(index: int, seed: int) -> dict[str, Any]:
    return {"prompt": "?", "answer": ANSWERS[index]}


def same(found: list[Any], wanted: list[Any]) -> bool:
    """Equal, types included: 1 and True are not."""
    return [(type(value), value) for value in found] == [(type(value), value) for value in wanted]


def test_answers_are_text_whatever_the_row_has(chat: ChatTokenizer, tmp_path: Path) -> None:
    rows = jsonl(tmp_path, *[answered(index, 0) for index in range(len(ANSWERS))])
    for data in (
        {"source": "jsonl", "path": str(rows)},
        {"source": "python", "path": "tests.rollout.test_data:answered", "size": len(ANSWERS)},
    ):
        source = opened(chat, shuffle=False, **data)
        assert same([source.prompt(seq).answer for seq in range(len(ANSWERS))], ANSWER_TEXTS)
        source = opened(chat, shuffle=False, answer_type="as_is", **data)
        assert same([source.prompt(seq).answer for seq in range(len(ANSWERS))], ANSWERS)


@pytest.mark.parametrize(("kind", "wanted"), [("text", ["521", "7"]), ("as_is", [521, 7])])
def test_answers_of_tables_are_text(chat: ChatTokenizer, tmp_path: Path, kind: str, wanted: list[Any]) -> None:
    datasets = pytest.importorskip("datasets")
    columns = {"prompt": ["a", "b"], "answer": [521, 7]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "rows.parquet")
    datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "rows")
    for source, path in (("parquet", "rows.parquet"), ("hf_disk", "rows")):
        found = opened(chat, source=source, path=str(tmp_path / path), shuffle=False, answer_type=kind)
        assert same([found.prompt(seq).answer for seq in range(2)], wanted)


def test_held_out_answers_may_have_another_type() -> None:
    config = from_dict({"data": {"answer_type": "as_is"}, "evaluation": {"data": {"answer_type": "text"}}})
    assert as_evaluated(config).data.answer_type == "text"
    assert as_evaluated(from_dict({"data": {"answer_type": "as_is"}})).data.answer_type == "as_is"


def test_a_row_in_short(chat: ChatTokenizer, tmp_path: Path) -> None:
    rows = [{"prompt": "q" * 100 + "?", "answer": 7}, {"prompt": "a"}, {"other": 1}]
    source = opened(chat, source="jsonl", path=str(jsonl(tmp_path, *rows)), shuffle=False)
    assert source.describe(3) == f"row 0 (seq 3): prompt '{'q' * 59}?', answer '7'"
    assert source.describe(1) == "row 1 (seq 1): prompt 'a'"
    assert source.describe(2) == "seq 2"


def test_python_source(chat: ChatTokenizer) -> None:
    source = opened(
        chat, source="python", path="tests.rollout.user_code:row", size=5, shuffle=False, args={"word": "x"}
    )
    prompt = source.prompt(6)
    assert prompt.messages == [{"role": "user", "content": "x 1 of 7"}]
    assert (prompt.index, prompt.epoch, prompt.answer, prompt.metadata) == (1, 1, "1", {"level": 1})
    assert chat.decode(prompt.input_ids) == "user\nx 1 of 7\nassistant\n"


def test_reasoning_gym_brings_the_whole_entry(chat: ChatTokenizer) -> None:
    prompt = opened(chat, source="reasoning_gym", path="chain_sum", size=20).prompt(3)
    assert prompt.messages[0]["content"] == prompt.metadata["question"]
    assert prompt.answer == prompt.metadata["answer"]
    assert prompt.metadata["metadata"]["source_dataset"] == "chain_sum"


def test_jsonl(chat: ChatTokenizer, tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"prompt": "a", "answer": 1}, "", {"prompt": "b", "more": [2]})
    source = opened(chat, source="jsonl", path=str(path), shuffle=False, system_prompt="Be brief.", suffix="!")
    assert len(source) == 2
    first, second = source.prompt(0), source.prompt(1)
    assert first.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a!"}]
    assert (first.answer, first.metadata) == ("1", {})
    assert (second.answer, second.metadata) == (None, {"more": [2]})


def test_jsonl_without_final_newline_and_with_windows_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"prompt": "a"}\r\n\r\n{"prompt": "b"}')
    rows = JsonlRows(path)
    assert [rows[i]["prompt"] for i in range(len(rows))] == ["a", "b"]


def test_conversations_as_prompts(chat: ChatTokenizer, tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}, {"role": "user", "content": "?"}]
    source = opened(chat, source="jsonl", path=str(jsonl(tmp_path, {"talk": talk})), prompt_key="talk", suffix="!")
    assert source.prompt(0).messages == [*talk[:2], {"role": "user", "content": "?!"}]


def test_text_in_parts_is_text(chat: ChatTokenizer, tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "1+1"}, {"type": "text", "text": "?", "image_url": None}]
    rows = [{"prompt": [{"role": "user", "content": parts}]}, {"prompt": [{"role": "user", "content": "1+1?"}]}]
    path = str(jsonl(tmp_path, *rows))
    in_parts, whole = (opened(chat, source="jsonl", path=path, shuffle=False).prompt(seq) for seq in (0, 1))
    assert (in_parts.messages, in_parts.input_ids) == (whole.messages, whole.input_ids)


def test_parquet_and_hf_disk(chat: ChatTokenizer, tmp_path: Path) -> None:
    columns = {
        "prompt": [[{"role": "user", "content": f"q{i}"}] for i in range(5)],
        "answer": [str(i) for i in range(5)],
        "level": list(range(5)),
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "x.parquet")
    parquet = opened(chat, source="parquet", path=str(tmp_path / "x.parquet"))
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "hf")
    hf_disk = opened(chat, source="hf_disk", path=str(tmp_path / "hf"))
    for seq in range(12):
        prompt = parquet.prompt(seq)
        assert prompt.messages == [{"role": "user", "content": f"q{prompt.index}"}]
        assert (prompt.answer, prompt.metadata) == (str(prompt.index), {"level": prompt.index})
        assert hf_disk.prompt(seq) == prompt


def test_hf_disk_with_splits_names_them(chat: ChatTokenizer, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    part = datasets.Dataset.from_dict({"prompt": ["a"]})
    datasets.DatasetDict({"train": part, "test": part}).save_to_disk(tmp_path / "hf")
    with pytest.raises(DataError, match="train, test"):
        opened(chat, source="hf_disk", path=str(tmp_path / "hf"))


def test_hf_disk_without_the_package(chat: ChatTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match="pip install"):
        opened(chat, source="hf_disk", path=str(tmp_path))


@pytest.mark.parametrize(
    ("rows", "data", "message"),
    [
        ([], {}, "empty"),
        (["", " "], {}, "no rows"),
        ([{"question": "a", "answer": "b"}], {}, "no column 'prompt'.*question, answer"),
        (["{oops"], {}, "line 1: not a JSON object"),
        (["[1, 2]"], {}, "line 1: not a JSON object"),
        ([{"prompt": 3}], {}, "neither a string nor a list of chat messages"),
        ([{"prompt": []}], {}, "empty conversation"),
        ([{"prompt": [{"role": "user"}]}], {}, "needs role and content"),
        ([{"prompt": [{"role": "user", "content": None}]}], {"suffix": "!"}, "data.suffix needs text.*NoneType"),
        ([{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}], {}, "message 0: .* not text: .*image"),
        ([{"prompt": [{"role": "system", "content": "s"}]}], {"system_prompt": "t"}, "system message of its own"),
    ],
)
def test_jsonl_errors(chat: ChatTokenizer, tmp_path: Path, rows: list[Any], data: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        opened(chat, source="jsonl", path=str(jsonl(tmp_path, *rows)), **data)


def test_a_bad_line_is_named_when_it_is_read(chat: ChatTokenizer, tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"prompt": "a"}, "", "{'prompt'}", {"prompt": "b"})
    source = opened(chat, source="jsonl", path=str(path), shuffle=False)
    with pytest.raises(DataError, match=r"data\.jsonl, line 3: not a JSON object"):
        source.prompt(1)
    assert source.prompt(2).messages[0]["content"] == "b"


def test_a_prompt_without_tokens_is_named(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"prompt": "a"}, {"prompt": ""})
    source = opened(make_chat(PLAIN_TEMPLATE), source="jsonl", path=str(path), shuffle=False)
    for look in (source.prompt, source.check):
        look(0)
        with pytest.raises(DataError, match=r"data\.jsonl, line 2: the prompt has no tokens"):
            look(1)


def test_a_character_without_a_token_is_named_with_its_line(tmp_path: Path) -> None:
    symbols = [*"0123456789=", "<add>"]
    chat = ChatTokenizer(_symbol_tokenizer(symbols, max_length=64))
    path = jsonl(tmp_path, {"prompt": "12="}, "", {"prompt": "3<add>4a=?"}, {"prompt": "<add>1="})
    source = opened(chat, source="jsonl", path=str(path), shuffle=False)
    for look in (source.prompt, source.check):
        look(2)
        with pytest.raises(DataError, match=r"data\.jsonl, line 3: .* no token for 'a' in '3<add>4a=\?'.*scratch"):
            look(1)


@pytest.mark.parametrize(("row", "says"), [({"prompt": 3}, "neither a string"), ("{oops", "not a JSON object")])
def test_every_error_of_a_file_with_lines_names_the_line(
    chat: ChatTokenizer, tmp_path: Path, row: Any, says: str
) -> None:
    path = jsonl(tmp_path, "", {"prompt": "a"}, "", row)
    source = opened(chat, source="jsonl", path=str(path), shuffle=False)
    assert source.place(0) == f"{path}, line 2"
    with pytest.raises(DataError, match=rf"data\.jsonl, line 4\b.*{says}"):
        source.prompt(1)


@pytest.mark.parametrize("source", ["jsonl", "parquet", "hf_disk"])
def test_missing_files(chat: ChatTokenizer, tmp_path: Path, source: str) -> None:
    with pytest.raises(DataError, match="there is no such"):
        opened(chat, source=source, path=str(tmp_path / "nowhere"))


@pytest.mark.parametrize("source", ["parquet", "hf_disk"])
def test_files_of_another_kind(chat: ChatTokenizer, tmp_path: Path, source: str) -> None:
    path = tmp_path if source == "hf_disk" else jsonl(tmp_path, {"prompt": "a"})
    with pytest.raises(DataError, match=str(path)):
        opened(chat, source=source, path=str(path))


@pytest.mark.parametrize(
    ("path", "args", "message"),
    [
        ("chain_sums", {}, "near: chain_sum"),
        ("chain_sum", {"min_termss": 2}, "do not fit.*min_termss"),
        ("chain_sum", {"min_terms": -2}, "do not fit"),
    ],
)
def test_reasoning_gym_errors(chat: ChatTokenizer, path: str, args: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        opened(chat, source="reasoning_gym", path=path, args=args)


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("user_code", ConfigError, "module:name"),
        ("tests.rollout.nothing:row", ConfigError, "no module tests.rollout.nothing"),
        ("tests.rollout.user_code:rows", ConfigError, "has no rows; it has .*row"),
        ("tests.rollout.user_code:no_row", DataError, "must return a dict"),
    ],
)
def test_python_errors(chat: ChatTokenizer, path: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        opened(chat, source="python", path=path)


def test_a_tokenizer_without_chat_template_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.chat_template"):
        make_chat(None)
    chat = ChatTokenizer(make_tokenizer(None), chat_template=PLAIN_TEMPLATE)
    assert chat.decode(chat.render([{"role": "user", "content": "12="}])) == "12="


def test_a_template_that_refuses_says_so() -> None:
    chat = make_chat("{{ raise_exception('only users here') }}")
    with pytest.raises(DataError, match=r"conversation of user.*only users here"):
        chat.render([{"role": "user", "content": "a"}])


def test_a_template_that_fails_says_so(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": content}]} for content in ("a", 7)]
    chat = make_chat("{{ 'asked: ' + messages[0]['content'] }}")
    source = opened(chat, source="jsonl", path=str(jsonl(tmp_path, *rows)), shuffle=False)
    assert chat.decode(source.prompt(0).input_ids) == "asked: a"
    with pytest.raises(DataError, match=r"refuses a conversation of user: .*int"):
        source.prompt(1)


def test_a_file_in_the_users_home(chat: ChatTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jsonl(tmp_path, {"prompt": "a"})
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(opened(chat, source="jsonl", path="~/data.jsonl")) == 1
