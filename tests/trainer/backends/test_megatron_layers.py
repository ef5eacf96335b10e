"""Which modules Megatron's layers are made of, with and without Transformer Engine."""

from __future__ import annotations

import importlib.machinery

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.extensions import transformer_engine_spec_provider
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.transformer.identity_op import IdentityOp

from streamrl.trainer.backends.megatron import network
from streamrl.trainer.backends.megatron.experts import Experts
from streamrl.trainer.backends.megatron.network import TreeAttention, block_modules


@pytest.fixture
def installed(monkeypatch):
    """Transformer Engine can be found, though nothing of it can run here."""
    spec = importlib.machinery.ModuleSpec("transformer_engine", None)
    monkeypatch.setattr(network, "find_spec", lambda name: spec if name == "transformer_engine" else None)
    monkeypatch.setattr(transformer_engine_spec_provider, "is_te_min_version", lambda version: True)


def made_of(stage):
    """The modules of each kind in the first layer, and the norm behind the last."""
    layer = stage.layer_specs[0].submodules
    attention, mlp = layer.self_attention.submodules, layer.mlp.submodules
    return {
        "attention": {attention.core_attention},
        "norms": {layer.input_layernorm, layer.pre_mlp_layernorm, stage.layer_norm},
        "qk norms": {attention.q_layernorm, attention.k_layernorm},
        "columns": {attention.linear_qkv, mlp.linear_fc1},
        "rows": {attention.linear_proj, mlp.linear_fc2},
    }


def expected(provider, *, qk_norm):
    return {
        "attention": {TreeAttention},
        "norms": {provider.layer_norm(rms_norm=True)},
        "qk norms": {provider.layer_norm(rms_norm=True, for_qk=True) if qk_norm else IdentityOp},
        "columns": {provider.column_parallel_linear()},
        "rows": {provider.row_parallel_linear()},
    }


@pytest.mark.parametrize("qk_norm", [False, True])
def test_on_a_gpu_they_are_transformer_engines_where_it_is_installed(installed, qk_norm):
    stage = block_modules([0, 0, 0], qk_norm=qk_norm, device=torch.device("cuda", 0))
    assert len(stage.layer_specs) == 3
    assert made_of(stage) == expected(TESpecProvider(), qk_norm=qk_norm)


@pytest.mark.usefixtures("installed")
def test_on_a_cpu_they_are_megatrons_own_although_it_is_installed():
    stage = block_modules([0], qk_norm=True, device=torch.device("cpu"))
    assert made_of(stage) == expected(LocalSpecProvider(), qk_norm=True)


def test_they_are_megatrons_own_where_it_is_not_installed(monkeypatch):
    monkeypatch.setattr(network, "find_spec", lambda name: None)
    stage = block_modules([0], qk_norm=True, device=torch.device("cuda", 0))
    assert made_of(stage) == expected(LocalSpecProvider(), qk_norm=True)


def test_experts_are_megatrons_own_also_beside_transformer_engines_attention(installed):
    stage = block_modules([4, 0], qk_norm=True, device=torch.device("cuda", 0))
    sparse, dense = (layer.submodules for layer in stage.layer_specs)
    assert sparse.self_attention.submodules.linear_qkv is TESpecProvider().column_parallel_linear()
    assert dense.mlp.submodules.linear_fc1 is TESpecProvider().column_parallel_linear()
    assert sparse.mlp is Experts
