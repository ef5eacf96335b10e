"""Weight updates over real HTTP and a real process group: staged, and complete or not at all."""

from __future__ import annotations

import asyncio
import itertools
import signal
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from streamrl.checksum import weights_checksum
from streamrl.transport.collective import broadcasts, form_group, open_store
from tests.forked import Forked
from tests.gserver.server import hanging_gserver
from tests.gserver.serving import Client, serving
from tests.gserver.tiny import make_model, prompt, response_logprobs, save, weights_of

NAMES = list(weights_of(make_model()))
NUMBERS = itertools.count(1)
PUBLISHER_SECONDS = 180.0
"""For each broadcast to be received."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model(seed=0), tmp_path_factory.mktemp("old"))


@pytest.fixture(scope="module")
def new_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("new") / "new.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in weights_of(make_model(seed=1)).items()}, file)
    return str(file)


def publish(group: str, file: str, names: Sequence[str], answers: Any) -> None:
    """Be rank 0 of a weight group of two: broadcast weights of `file`, and stay until killed."""
    store = open_store("127.0.0.1")
    answers.send(store.port)
    where: dict[str, Any] = {"address": "127.0.0.1", "port": store.port, "backend": "gloo"}
    joined = form_group(**where, rank=0, world_size=2, name=group, timeout=PUBLISHER_SECONDS, store=store)
    weights = load_file(file)
    list(broadcasts([(name, weights[name]) for name in names], joined))
    threading.Event().wait()


@asynccontextmanager
async def publishing(client: Client, file: str, names: Sequence[str]) -> AsyncIterator[str]:
    """A publisher of these weights, and the name of the group that the gserver has formed with it."""
    group = f"weights-{next(NUMBERS)}"
    with await asyncio.to_thread(Forked, publish, [(group, file, names)]) as publisher:
        (port,) = await asyncio.to_thread(publisher.take, 1)
        where = {"master_address": "127.0.0.1", "master_port": port, "backend": "gloo"}
        rank = {"rank_offset": 1, "world_size": 2, "group_name": group}
        await client.post("/init_weights_update_group", where | rank)
        yield group


def announcement(group: str, names: Sequence[str], **more: Any) -> dict[str, Any]:
    weights = weights_of(make_model())
    shapes = [list(weights[name].shape) for name in names]
    return {"names": names, "dtypes": ["float32"] * len(names), "shapes": shapes, "group_name": group, **more}


async def receive(client: Client, group: str, names: Sequence[str], **more: Any) -> None:
    await client.post("/update_weights_from_distributed", announcement(group, names, **more))


async def test_a_staged_update(folder: Path, new_file: str) -> None:
    async with serving(folder) as client, publishing(client, new_file, NAMES) as group:
        before = await client.post("/weights_checker", {"action": "checksum"})
        assert before["total"] == weights_checksum(weights_of(make_model(seed=0))).total
        assert before["dtype"] == "float32"
        await client.post("/begin_weight_update")
        await receive(client, group, NAMES[:5], weight_version="7")
        await receive(client, group, NAMES[5:], weight_version="7", flush_cache=False)
        assert await client.post("/weights_checker") == before
        assert (await client.get("/model_info"))["weight_version"] == "default"
        outcome = await client.post("/end_weight_update")
        assert outcome["success"] is True
        assert " s" in outcome["message"]
        after = await client.post("/weights_checker")
        assert after["total"] == weights_checksum(weights_of(make_model(seed=1))).total
        assert (await client.get("/model_info"))["weight_version"] == "7"
        answer = await client.post("/generate", {"input_ids": prompt(9), "return_logprob": True})
        await client.post("/destroy_weights_update_group", {"group_name": group})
    assert {span["version"] for span in answer["meta_info"]["weight_versions"]} == {"7"}
    given = torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])
    expected = response_logprobs(make_model(seed=1), prompt(9), answer["output_ids"])
    torch.testing.assert_close(given, expected, atol=1e-4, rtol=0)


async def test_a_partial_update_is_refused_with_the_names(folder: Path, new_file: str) -> None:
    *most, last = NAMES
    async with serving(folder) as client, publishing(client, new_file, [*most, *most, last]) as group:
        before = await client.post("/weights_checker")
        await client.post("/begin_weight_update")
        await receive(client, group, most, weight_version="9")
        answer = await client.post("/end_weight_update", status=400)
        assert f"1 of {len(NAMES)}" in answer["error"]["message"]
        assert last in answer["error"]["message"]
        assert await client.post("/weights_checker") == before
        # What was staged before a new begin does not count.
        await client.post("/begin_weight_update")
        await receive(client, group, most)
        await client.post("/begin_weight_update")
        await receive(client, group, [last])
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
    change: dict[str, Any], said: str, folder: Path, new_file: str
) -> None:
    async with serving(folder) as client, publishing(client, new_file, []) as group:
        body = announcement(group, ["model.norm.weight"]) | change
        answer = await client.post("/update_weights_from_distributed", body, status=400)
        assert "begin_weight_update" in answer["error"]["message"]
        await client.post("/begin_weight_update")
        answer = await client.post("/update_weights_from_distributed", body, status=400)
        assert said in answer["error"]["message"]
        await client.post("/generate", {"input_ids": prompt(9)})


async def test_a_publisher_that_dies_leaves_the_old_weights(folder: Path, new_file: str) -> None:
    """Meanwhile generation goes on."""
    async with serving(folder) as client:
        async with publishing(client, new_file, NAMES[:3]) as group:
            before = await client.post("/weights_checker")
            await client.post("/begin_weight_update")
            await receive(client, group, NAMES[:3])
            body = announcement(group, NAMES[3:])
            receiving = asyncio.create_task(client.post("/update_weights_from_distributed", body, status=500))
            await client.post("/generate", {"input_ids": prompt(9)})
            assert not receiving.done()
        answer = await receiving
        assert f"broadcast of {NAMES[3]}" in answer["error"]["message"]
        await client.post("/end_weight_update", status=400)
        assert await client.post("/weights_checker") == before
        await client.post("/destroy_weights_update_group", {"group_name": group})
        async with publishing(client, new_file, NAMES) as group:
            await client.post("/begin_weight_update")
            await receive(client, group, NAMES, weight_version="2")
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
        with ExitStack() as stack:
            sends = ("hanging", new_file, [hanging_gserver.FIRST])
            publisher = stack.enter_context(await asyncio.to_thread(Forked, publish, [sends]))
            (port,) = await asyncio.to_thread(publisher.take, 1)
            process.stdin.write(f"{port} hanging\n".encode())
            assert await asyncio.wait_for(process.stdout.readline(), 180) == b"receiving\n"
            process.terminate()
            async with asyncio.timeout(60):  # the broadcast has 600 s
                while b"a receive in weight group" not in (line := await process.stderr.readline()):
                    assert line, "it ended otherwise"
                if sender_dies:
                    stack.close()
                told = await process.stderr.read()
                await process.wait()
        assert process.returncode == 128 + signal.SIGTERM, told.decode()
        assert sender_dies or b"weight receiver did not end" in told
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
