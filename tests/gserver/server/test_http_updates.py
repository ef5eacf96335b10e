"""Weight updates over real HTTP and a real process group: staged, complete or not at all, versioned by token."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from safetensors.torch import save_file

from streamrl.checksum import weights_checksum
from tests.gserver.rank0 import Rank0, rank0
from tests.gserver.server import hanging_gserver
from tests.gserver.serving import Client, serving
from tests.gserver.tiny import make_model, prompt, response_logprobs, save, weights_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model(seed=0), tmp_path_factory.mktemp("old"))


@pytest.fixture(scope="module")
def new_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("new") / "new.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in weights_of(make_model(seed=1)).items()}, file)
    return str(file)


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def publisher() -> AsyncIterator[Rank0]:
    async with rank0() as process:
        yield process


async def join(client: Client, publisher: Rank0) -> None:
    port = await publisher.form()
    body = {
        "master_address": "127.0.0.1",
        "master_port": port,
        "rank_offset": 1,
        "world_size": 2,
        "group_name": publisher.group,
        "backend": "gloo",
    }
    await client.post("/init_weights_update_group", body)
    assert await publisher.answer() == "formed"


def announcement(publisher: Rank0, names: list[str], **more: Any) -> dict[str, Any]:
    weights = weights_of(make_model())
    return {
        "names": names,
        "dtypes": ["float32"] * len(names),
        "shapes": [list(weights[name].shape) for name in names],
        "group_name": publisher.group,
        **more,
    }


async def send(client: Client, publisher: Rank0, file: str, names: list[str], **more: Any) -> None:
    publisher.tell("send", file=file, names=names)
    await client.post("/update_weights_from_distributed", announcement(publisher, names, **more))
    assert await publisher.answer() == "sent"


async def test_a_staged_update(folder: Path, new_file: str, publisher: Rank0) -> None:
    names = list(weights_of(make_model()))
    async with serving(folder) as client:
        await join(client, publisher)
        before = await client.post("/weights_checker", {"action": "checksum"})
        assert before["total"] == weights_checksum(weights_of(make_model(seed=0))).total
        assert before["dtype"] == "float32"
        await client.post("/begin_weight_update")
        await send(client, publisher, new_file, names[:5], weight_version="7")
        await send(client, publisher, new_file, names[5:], weight_version="7", flush_cache=False)
        assert await client.post("/weights_checker") == before
        assert (await client.get("/model_info"))["weight_version"] == "default"
        outcome = await client.post("/end_weight_update")
        assert outcome["success"] is True
        assert " s" in outcome["message"]
        after = await client.post("/weights_checker")
        assert after["total"] == weights_checksum(weights_of(make_model(seed=1))).total
        assert (await client.get("/model_info"))["weight_version"] == "7"
        body = {"input_ids": prompt(9), "return_logprob": True}
        answer = await client.post("/generate", body)
        await client.post("/destroy_weights_update_group", {"group_name": publisher.group})
    assert {span["version"] for span in answer["meta_info"]["weight_versions"]} == {"7"}
    assert_logprobs(answer, response_logprobs(make_model(seed=1), prompt(9), answer["output_ids"]))


def assert_logprobs(answer: Any, expected: torch.Tensor) -> None:
    given = torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])
    assert torch.allclose(given, expected, atol=1e-4)


async def test_generation_goes_on_while_weights_arrive(folder: Path, new_file: str, publisher: Rank0) -> None:
    names = list(weights_of(make_model()))
    async with serving(folder) as client:
        await join(client, publisher)
        await client.post("/begin_weight_update")
        receiving = asyncio.create_task(client.post("/update_weights_from_distributed", announcement(publisher, names)))
        for _ in range(3):
            await client.post("/generate", {"input_ids": prompt(9)})
        assert not receiving.done()
        await publisher.ask("send", file=new_file, names=names)
        await receiving
        await client.post("/end_weight_update")
        assert (await client.get("/model_info"))["weight_version"] == "default"
        checksum = await client.post("/weights_checker")
    assert checksum["total"] == weights_checksum(weights_of(make_model(seed=1))).total


async def test_a_partial_update_is_refused_with_the_names(folder: Path, new_file: str, publisher: Rank0) -> None:
    names = list(weights_of(make_model()))
    async with serving(folder) as client:
        await join(client, publisher)
        before = await client.post("/weights_checker")
        await client.post("/begin_weight_update")
        await send(client, publisher, new_file, names[:-1], weight_version="9")
        answer = await client.post("/end_weight_update", status=400)
        assert f"1 of {len(names)}" in answer["error"]["message"]
        assert names[-1] in answer["error"]["message"]
        assert await client.post("/weights_checker") == before
        # What was staged before a new begin does not count.
        await client.post("/begin_weight_update")
        await send(client, publisher, new_file, names[:-1])
        await client.post("/begin_weight_update")
        await send(client, publisher, new_file, names[-1:])
        await client.post("/end_weight_update", status=400)
        assert (await client.get("/model_info"))["weight_version"] == "default"
        await client.post("/generate", {"input_ids": prompt(9)})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"names": ["model.norm.waist"]}, "model.norm.waist is unknown"),
        ({"shapes": [[63]]}, r"model.norm.weight has shape [63] instead of [64]"),
        ({"dtypes": ["bfloat16"]}, "model.norm.weight is bfloat16, served as float32"),
        ({"dtypes": ["int8"]}, "int8"),
        ({"dtypes": []}, "equal length"),
        ({"group_name": "others"}, "no weight group others"),
        ({"load_format": "flattened_bucket"}, "one broadcast for each tensor"),
    ],
)
async def test_tensors_that_do_not_fit_are_refused_before_they_come(
    change: dict[str, Any], said: str, folder: Path, publisher: Rank0
) -> None:
    async with serving(folder) as client:
        await join(client, publisher)
        body = {**announcement(publisher, ["model.norm.weight"]), **change}
        answer = await client.post("/update_weights_from_distributed", body, status=400)
        assert "begin_weight_update" in answer["error"]["message"]
        await client.post("/begin_weight_update")
        answer = await client.post("/update_weights_from_distributed", body, status=400)
        assert said in answer["error"]["message"]
        await client.post("/generate", {"input_ids": prompt(9)})


async def test_a_publisher_that_dies_leaves_the_old_weights(folder: Path, new_file: str, publisher: Rank0) -> None:
    names = list(weights_of(make_model()))
    async with serving(folder) as client, rank0() as mortal:
        await join(client, mortal)
        before = await client.post("/weights_checker")
        await client.post("/begin_weight_update")
        await send(client, mortal, new_file, names[:3])
        body = announcement(mortal, names[3:])
        receiving = asyncio.create_task(client.post("/update_weights_from_distributed", body, status=500))
        await client.post("/generate", {"input_ids": prompt(9)})
        await mortal.kill()
        answer = await receiving
        assert f"broadcast of {names[3]}" in answer["error"]["message"]
        await client.post("/end_weight_update", status=400)
        assert await client.post("/weights_checker") == before
        await client.post("/destroy_weights_update_group", {"group_name": mortal.group})
        await join(client, publisher)
        await client.post("/begin_weight_update")
        await send(client, publisher, new_file, names, weight_version="2")
        await client.post("/end_weight_update")
        assert (await client.get("/model_info"))["weight_version"] == "2"


@pytest.mark.parametrize("sender_dies", [False, True])
async def test_a_hanging_receive_does_not_keep_the_process(sender_dies: bool, folder: Path, new_file: str) -> None:
    """Nor does it break the process's end, when it fails just then."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.gserver.server.hanging_gserver", str(folder)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        assert await asyncio.wait_for(process.stdout.readline(), 180) == b"serving\n"
        async with rank0() as publisher:
            port = await publisher.form()
            process.stdin.write(f"{port} {publisher.group}\n".encode())
            assert await publisher.answer() == "formed"
            assert await publisher.ask("send", file=new_file, names=[hanging_gserver.FIRST]) == "sent"
            assert await asyncio.wait_for(process.stdout.readline(), 180) == b"receiving\n"
            process.terminate()
            async with asyncio.timeout(60):  # the broadcast has 600 s
                while b"a receive in weight group" not in (line := await process.stderr.readline()):
                    assert line, "it ended otherwise"
                if sender_dies:
                    await publisher.kill()
                told = await process.stderr.read()
                await process.wait()
        assert process.returncode == 128 + signal.SIGTERM, told.decode()
        assert sender_dies or b"weight receiver did not end" in told
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
