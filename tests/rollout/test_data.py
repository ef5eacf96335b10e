"""Prompts as a pure function of their sequence number; data sources, and what is wrong with them in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.config import Config, from_dict
from streamrl.errors import ConfigError, DataError
from streamrl.rollout.chat import ChatTokenizer
from streamrl.rollout.data import PromptSource, permuted_index
from tests.rollout.characters import make_chat


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


@pytest.mark.parametrize(("seed", "epoch", "order"), [(0, 0, "7421908356"), (1, 0, "1690538742"), (0, 1, "9021658347")])
def test_the_order_is_the_same_in_every_process_and_version(seed: int, epoch: int, order: str) -> None:
    """A resumed run depends on it: a change here trains on some prompts twice."""
    assert "".join(str(permuted_index(i, size=10, seed=seed, epoch=epoch)) for i in range(10)) == order


def test_a_chosen_row_is_taken_as_it_is(chat: ChatTokenizer) -> None:
    source = opened(chat, source="python", path="tests.rollout.user_code:row", size=17)
    assert [source.prompt(seq, row=4).index for seq in range(3)] == [4, 4, 4]


@settings(deadline=None)
@given(seqs=st.lists(st.integers(0, 500), min_size=1, max_size=30))
def test_a_prompt_is_a_pure_function_of_its_seq(chat: ChatTokenizer, seqs: list[int]) -> None:
    asked_in_any_order = opened(chat, source="python", path="tests.rollout.user_code:row", size=17)
    for seq in seqs:
        alone = opened(chat, source="python", path="tests.rollout.user_code:row", size=17)
        assert asked_in_any_order.prompt(seq) == alone.prompt(seq)


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


def test_python_source(chat: ChatTokenizer) -> None:
    source = opened(
        chat, source="python", path="tests.rollout.user_code:row", size=5, shuffle=False, args={"word": "x"}
    )
    prompt = source.prompt(6)
    assert prompt.messages == [{"role": "user", "content": "x 1 of 7"}]
    assert (prompt.index, prompt.epoch, prompt.answer, prompt.metadata) == (1, 1, "1", {"level": 1})
    assert chat.decode(prompt.input_ids) == "user\nx 1 of 7\nassistant\n"


def test_jsonl(chat: ChatTokenizer, tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"prompt": "a", "answer": 1}, "", {"prompt": "b", "more": [2]})
    source = opened(chat, source="jsonl", path=str(path), shuffle=False, system_prompt="Be brief.", suffix="!")
    assert len(source) == 2
    first, second = source.prompt(0), source.prompt(1)
    assert first.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a!"}]
    assert (first.answer, first.metadata) == ("1", {})
    assert (second.answer, second.metadata) == (None, {"more": [2]})


def test_conversations_as_prompts(chat: ChatTokenizer, tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}, {"role": "user", "content": "?"}]
    source = opened(chat, source="jsonl", path=str(jsonl(tmp_path, {"talk": talk})), prompt_key="talk", suffix="!")
    assert source.prompt(0).messages == [*talk[:2], {"role": "user", "content": "?!"}]


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


@pytest.mark.parametrize(("row", "says"), [({"prompt": 3}, "neither a string"), ("{oops", "not a JSON object")])
def test_every_error_of_a_file_with_lines_names_the_line(
    chat: ChatTokenizer, tmp_path: Path, row: Any, says: str
) -> None:
    path = jsonl(tmp_path, "", {"prompt": "a"}, "", row)
    source = opened(chat, source="jsonl", path=str(path), shuffle=False)
    assert source.place(0) == f"{path}, line 2"
    with pytest.raises(DataError, match=rf"data\.jsonl, line 4\b.*{says}"):
        source.prompt(1)


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


def test_a_template_that_refuses_says_so() -> None:
    chat = make_chat("{{ raise_exception('only users here') }}")
    with pytest.raises(DataError, match=r"conversation of user.*only users here"):
        chat.render([{"role": "user", "content": "a"}])
