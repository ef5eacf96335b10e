"""What `streamrl check` tries: each thing that would end a run is found, named, and does not hide the others."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from streamrl.config import from_dict
from streamrl.launch import rehearsal
from streamrl.launch.rehearsal import Rehearsal, rehearse

SCRATCH: dict[str, Any] = {
    "model": {"path": "scratch", "scratch": {"alphabet": "0123456789= ", "hidden_size": 32, "layers": 1}},
    "data": {"source": "python", "path": "streamrl.rollout.tasks:copy_digits", "size": 50, "max_prompt_tokens": 16},
    "rollout": {"sampling": {"max_new_tokens": 6}, "reward": {"function": "streamrl.rollout.tasks:copy_reward"}},
    "gserver": {"max_context": 32},
}


def rehearsed(folder: Path, *, gpus: int = 0, **changes: dict[str, Any]) -> Rehearsal:
    """Of the scratch model that copies digits, with `changes` to its sections."""
    sections = {name: {**SCRATCH.get(name, {}), **changes.get(name, {})} for name in {*SCRATCH, *changes}}
    sections["run"] = {"dir": str(folder / "runs"), **changes.get("run", {})}
    return rehearse(from_dict(sections), gpus=[str(index) for index in range(gpus)])


def rows(folder: Path, *given: dict[str, Any]) -> dict[str, Any]:
    file = folder / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in given))
    return {"source": "jsonl", "path": str(file)}


def test_what_works_is_told_with_what_was_seen(tmp_path: Path) -> None:
    found = rehearsed(tmp_path, evaluation={"at_end": True})
    assert found.wrong == []
    said = "\n".join(found.tried)
    for name in ("", "evaluation: "):
        assert f"\n{name}the first 16 of 50 prompts have 5 to 5 tokens" in said
        assert f"\n{name}rows read: 50 of 50" in said
        assert f"\n{name}reward of the row's own answer in 8 rows: 1 to 1" in said
    assert found.warnings == []
    assert "the workflow was loaded and not run" in found.untried[-2]
    assert not (tmp_path / "runs").exists()


HERE = "tests.launch.test_rehearsal"
REWARDS = "tests.launch.bad_rewards"
MEGATRON = {"backend": "megatron", "tensor_parallel": 2}


@pytest.mark.parametrize(
    ("section", "settings", "said"),
    [
        ("rollout", {"reward": {"function": "streamrl.rollout.tasks:nope"}}, "streamrl.rollout.tasks has no nope"),
        ("rollout", {"reward": {"function": "absent:nope"}}, "there is no module absent"),
        (
            "rollout",
            {"reward": {"function": f"{REWARDS}:hang", "timeout_seconds": 0.3}},
            "cannot be scored: .*no answer within rollout.reward.timeout_seconds = 0.3",
        ),
        ("rollout", {"reward": {"function": f"{REWARDS}:fail"}}, "(?s)cannot be scored: .*KeyError: 'solution'"),
        ("rollout", {"workflow": {"name": f"{HERE}:Absent"}}, "has no Absent"),
        ("data", {"path": f"{HERE}:absent"}, "data: data.path = .* has no absent"),
        ("data", {"path": f"{HERE}:rows"}, "data: TypeError: "),
        ("data", {"max_prompt_tokens": 4}, r"each of the first 16 prompts is longer than .* \(5 to 5 tokens\)"),
        ("trainer", {"graph": f"{HERE}:absent"}, "trainer.graph = .* has no absent"),
        ("run", {"dir": f"{__file__}/runs"}, "run.dir: .* cannot be written: Not a directory"),
        ("run", {"device": "cuda"}, 'run.device = "cuda", and this machine has no GPU'),
        ("run", {"host": "203.0.113.7"}, 'run.host = "203.0.113.7": nothing can listen there'),
        ("gserver", {"api_key_env": "NOT_SET_HERE"}, "NOT_SET_HERE"),
        ("critic", {"path": "nowhere"}, "critic.path: .*nowhere.* is no folder"),
        ("gserver", {"engine": "sglang", "sglang": {"python": "nopython"}}, "there is no such program"),
    ],
)
def test_what_would_end_a_run_is_found(tmp_path: Path, section: str, settings: dict[str, Any], said: str) -> None:
    found = rehearsed(tmp_path, **{section: settings})
    (wrong,) = found.wrong
    with pytest.raises(ValueError, match=said):
        raise ValueError(wrong)


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (
            {"tensor_parallel": 3},
            "model: .* cannot be trained as .*heads = 4 is no multiple of tensor = 3",
        ),
        ({"pipeline_parallel": 2}, "model: .* num_hidden_layers = 1 is no multiple of pipeline = 2"),
        ({"context_parallel": 3}, None),  # whatever heads the model has
        ({"backend": "torch", "data_parallel": 2, "roles": {"ref": MEGATRON}}, "trainer.roles.ref: .* tensor = 2"),
    ],
)
def test_a_layout_that_the_model_does_not_fit_is_found(
    tmp_path: Path, layout: dict[str, Any], said: str | None
) -> None:
    pytest.importorskip("megatron.core")
    scratch = {**SCRATCH["model"]["scratch"], "kv_heads": 1} if "roles" in layout else SCRATCH["model"]["scratch"]
    model = {"path": "scratch", "scratch": scratch}
    found = rehearsed(tmp_path, model=model, trainer={"backend": "megatron", **layout}, algorithm={"kl_coef": 0.1})
    if said is None:
        assert found.wrong == []
        return
    (wrong,) = found.wrong
    with pytest.raises(ValueError, match=said):
        raise ValueError(wrong)


def test_rows_without_a_prompt_are_found_wherever_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = {"prompt": "1=", "answer": "1"}, {"question": "1="}
    found = rehearsed(tmp_path, data=rows(tmp_path, *[good] * 40, bad, *[good] * 3))
    (wrong,) = found.wrong
    assert "rows.jsonl, line 41: no column 'prompt' for data.prompt_key; there is question" in wrong
    assert "rows read: 44 of 44" in found.tried
    found = rehearsed(tmp_path, data=rows(tmp_path, good, *[bad] * 7) | {"shuffle": False})
    assert [line.partition("rows.jsonl, ")[2][:7] for line in found.wrong[:-1]] == ["line 2:", "line 3:", "line 4:"]
    assert found.wrong[-1] == "data: 7 of 8 rows cannot be used; the first 3 of them are named"
    monkeypatch.setattr(rehearsal, "ROWS", 30)
    found = rehearsed(tmp_path, data=rows(tmp_path, *[good] * 40))
    assert "the last 10 rows were not read" in found.untried


def test_prompts_without_a_token_are_found_wherever_they_are(tmp_path: Path) -> None:
    good, empty = {"prompt": "1=", "answer": "1"}, {"prompt": "", "answer": "1"}
    found = rehearsed(tmp_path, data=rows(tmp_path, empty, *[good] * 3))
    (wrong,) = found.wrong
    assert "rows.jsonl, line 1: the prompt has no tokens" in wrong
    (wrong,) = rehearsed(tmp_path, data=rows(tmp_path, *[good] * 40, empty) | {"shuffle": False}).wrong
    assert "rows.jsonl, line 41: the prompt has no tokens" in wrong
    no_text = {"chat_template": "{% for m in messages %}{% endfor %}"}
    found = rehearsed(tmp_path, model=no_text, data=rows(tmp_path, good))
    (wrong,) = found.wrong
    assert "line 1: the prompt has no tokens" in wrong


def test_a_character_outside_the_alphabet_is_found_in_any_row(tmp_path: Path) -> None:
    good, bad = {"prompt": "1=", "answer": "1"}, {"prompt": "1 + 2=", "answer": "3"}
    (wrong,) = rehearsed(tmp_path, data=rows(tmp_path, *[good] * 40, bad) | {"shuffle": False}).wrong
    assert "rows.jsonl, line 41: the model's tokenizer has no token for '+' in '1 + 2='" in wrong


def test_a_broken_line_is_named_once(tmp_path: Path) -> None:
    data = rows(tmp_path, *[{"prompt": "1=", "answer": "1"}] * 4)
    file = Path(data["path"])
    file.write_text(f'{file.read_text()}\n{{"prompt": "2=", \n')
    (wrong,) = rehearsed(tmp_path, data=data).wrong
    assert "rows.jsonl, line 6: not a JSON object" in wrong


def scored_by(function: str, **data: Any) -> dict[str, Any]:
    return {"rollout": {"reward": {"function": f"{REWARDS}:{function}"}}, "data": {"shuffle": False, **data}}


def test_rows_that_the_reward_function_fails_on_are_found_wherever_they_are(tmp_path: Path) -> None:
    given = [{"prompt": "1=", "answer": str(index), "level": index} for index in range(40)]
    del given[10]["level"], given[35]["level"]
    (wrong,) = rehearsed(tmp_path, **scored_by("level", **rows(tmp_path, *given))).wrong
    first, *others = wrong.splitlines()
    assert first.startswith("rollout.reward: 2 of 8 rows cannot be scored: row 10, response '10': ")
    assert others[-1] == "row 35, response '35': KeyError: 'level'"
    assert "KeyError: 'level'" in others[-2]


def test_a_slow_reward_function_does_not_hold_up_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "SCORING_SECONDS", 0.0)
    given = [{"prompt": "1=", "answer": str(index)} for index in range(40)]
    found = rehearsed(tmp_path, **scored_by("equal", **rows(tmp_path, *given)))
    assert any(line.startswith("rows from 0 on were not scored") for line in found.untried)


@pytest.mark.parametrize(
    ("function", "answer_type", "warning"),
    [
        ("equal", "text", None),
        ("equal", "as_is", "in 8 of 8 rows .* row 0: its own answer '100' scores 0, the wrong one '105' scores 0"),
        ("boxed", "text", "in 8 of 8 rows .* row 0: its own answer '100' scores -1, the wrong one '105' scores -1"),
    ],
)
def test_a_reward_that_no_answer_raises_is_warned_of(
    tmp_path: Path, function: str, answer_type: str, warning: str | None
) -> None:
    data = rows(tmp_path, *[{"prompt": "1=", "answer": 100 + index} for index in range(40)])
    found = rehearsed(tmp_path, **scored_by(function, answer_type=answer_type, **data))
    assert found.wrong == []
    assert len(found.warnings) == (warning is not None)
    for line in found.warnings:
        with pytest.raises(ValueError, match=str(warning)):
            raise ValueError(line)


def test_rows_without_answers_and_agents_are_not_warned_of(tmp_path: Path) -> None:
    found = rehearsed(tmp_path, **scored_by("boxed", **rows(tmp_path, *[{"prompt": "1="}] * 3)))
    assert (found.wrong, found.warnings) == ([], [])
    assert "reward of a made-up response in 3 rows: -1 to -1" in found.tried
    settings = scored_by("boxed", **rows(tmp_path, *[{"prompt": "1=", "answer": 1}] * 3))
    settings["rollout"]["agent"] = {"remote": True, "scored_by": "reward"}
    found = rehearsed(tmp_path, **settings)
    assert (found.wrong, found.warnings) == ([], [])


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (wrong,) = rehearsed(tmp_path, run={"port": port}).wrong
    assert f"run.port = {port} at 127.0.0.1: nothing can listen there (Address already in use)" in wrong


def test_too_few_gpus(tmp_path: Path) -> None:
    settings = {"engine": "sglang", "sglang": {"tensor_parallel": 2}}
    wrong = rehearsed(tmp_path, gpus=1, gserver=settings).wrong
    assert any("tensor_parallel = 2 needs as many GPUs; this machine has 1" in line for line in wrong)


def test_one_fault_does_not_hide_the_others(tmp_path: Path) -> None:
    reward = {"reward": {"function": "streamrl.rollout.tasks:nope"}}
    found = rehearsed(tmp_path, model={"path": "nowhere", "scratch": None}, rollout=reward, critic={"path": "none"})
    assert ["nowhere" in found.wrong[0], "critic.path" in found.wrong[1]] == [True, True]
    assert any("prompts, without the model's tokenizer" in line for line in found.untried)
    assert any("the reward function, without a prompt" in line for line in found.untried)
