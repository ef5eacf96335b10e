"""The engines of gservers: one entry for each, with everything that other parts of a run depend on.

docs/engines.md describes how to add one.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

MORE_RANKS = "raise gserver.{}.tensor_parallel instead"
MORE_GSERVERS = "raise gserver.count instead"
NO_REMOTE_CODE = "no remote code is run"


class EngineTraits(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of an engine. An engine with a section of its name in `[gserver]` runs as a separate server."""

    serve: str
    """`module:function`: takes a `GserverLaunch` and returns the context manager that serves its requests."""
    title: str
    """The engine, as people write it."""
    computes: bool = True
    """Whether it has a model."""
    reads_parts: bool = True
    """Whether it reads checkpoints whose tensors are in parts."""
    receives_nccl: bool = True
    """Whether a broadcast over NCCL can reach it."""
    nccl_as_sglang: bool = False
    """Whether its end of NCCL allocates memory as SGLang's processes do."""
    opens_memory: bool = False
    """Whether it serves weights from the trainer's memory on the same host or GPU, without a copy."""
    names_adapters: bool = False
    """Whether each request names its adapter, which is loaded in addition to the model."""
    own_flags: Mapping[str, str] = {}
    """Flags of its server that streamrl sets itself → what determines each."""
    refused_flags: Mapping[str, str] = {}
    """Flags that cannot be set, with or without a value → why."""
    memory_flag: str = ""
    """The flag of its server for its share of a GPU's memory; empty: it takes no fixed share."""


ENGINES: Mapping[str, EngineTraits] = {
    "embedded": EngineTraits(
        serve="streamrl.gserver.embedded.serving:serve", title="the embedded engine", opens_memory=True
    ),
    "sglang": EngineTraits(
        serve="streamrl.gserver.sglang.serving:serve",
        title="SGLang",
        reads_parts=False,
        nccl_as_sglang=True,
        names_adapters=True,
        memory_flag="--mem-fraction-static",
        own_flags={
            "--host": "the address that the controller reaches",
            "--port": "any free port",
            **dict.fromkeys(("--model-path", "--model"), "[model]"),
            "--weight-version": "the policy version",
            **dict.fromkeys(("--api-key", "--admin-api-key"), "keys that are made for the run"),
            "--device": "run.device",
            **dict.fromkeys(("--tensor-parallel-size", "--tp-size", "--tp"), "gserver.sglang.tensor_parallel"),
        },
        refused_flags={
            **dict.fromkeys(("--pipeline-parallel-size", "--pp-size", "--pp"), MORE_RANKS.format("sglang")),
            **dict.fromkeys(("--data-parallel-size", "--dp-size", "--dp"), MORE_GSERVERS),
            "--nnodes": "a server is on one machine; start gservers on the others",
            "--tokenizer-worker-num": "SGLang asks callers for no key then; raise gserver.count instead",
            **dict.fromkeys(
                ("w8a8_int8", "--quantization=w8a8_int8"),
                "serves checkpoints that are int8 already, and rounds nothing that an update brings; take fp8, which "
                "does",
            ),
            "--trust-remote-code": NO_REMOTE_CODE,
        },
    ),
    "vllm": EngineTraits(
        serve="streamrl.gserver.vllm.engine:serve",
        title="vLLM",
        reads_parts=False,
        receives_nccl=False,
        memory_flag="--gpu-memory-utilization",
        own_flags={
            **dict.fromkeys(("--model", "--served-model-name"), "[model]"),
            **dict.fromkeys(("--uds", "--host", "--port", "--api-key"), "a socket that only its gserver reaches"),
            **dict.fromkeys(("--tensor-parallel-size", "-tp"), "gserver.vllm.tensor_parallel"),
            "--logprobs-mode": "the log-probabilities that the loss needs",
        },
        refused_flags={
            **dict.fromkeys(("--pipeline-parallel-size", "-pp"), MORE_RANKS.format("vllm")),
            **dict.fromkeys(("--data-parallel-size", "-dp"), MORE_GSERVERS),
            "--trust-remote-code": NO_REMOTE_CODE,
        },
    ),
    "simulated": EngineTraits(serve="streamrl.gserver.simulated:serve", title="the simulated engine", computes=False),
}
