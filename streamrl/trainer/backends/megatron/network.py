"""One pipeline stage of a model, made of Megatron's modules: embedding, layers, head.

Norms and linear layers are Transformer Engine's on a GPU where it is installed, and Megatron's own elsewhere. Its fused
norm-and-linear is not used, so parameters have the same names in both cases. Experts are always Megatron's own
(`experts.py`). Rows of a micro-batch are tries of trajectories, so attention and rotary positions are our own. The head
is computed only for the states that predict.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from megatron.core import tensor_parallel
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import silu

from streamrl.device import to_device
from streamrl.trainer.backends.attention import TreeMask
from streamrl.trainer.backends.base import ModelOutput, ModelSpec
from streamrl.trainer.backends.context import ContextGroup, Share
from streamrl.trainer.backends.distribution import Predictions, in_chunks, token_distribution
from streamrl.trainer.backends.megatron.experts import Experts, facts_of
from streamrl.trainer.backends.megatron.shape import ModelShape
from streamrl.trainer.layout import Layout
from streamrl.trainer.packing import IDLE, MicroBatch

# --- layers ---


def block_modules(experts: Sequence[int], *, qk_norm: bool, device: torch.device) -> Any:
    """Return the modules of one pipeline stage on `device`; `experts`: number of experts of each layer, 0 for a layer
    without.

    `qk_norm`: queries and keys have norms.
    """
    layers = [_layer_modules(count, qk_norm=qk_norm, device=device) for count in experts]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=layers[0].submodules.input_layernorm)


def _layer_modules(experts: int, *, qk_norm: bool, device: torch.device) -> Any:
    layer = get_gpt_layer_local_spec(qk_layernorm=qk_norm, normalization="RMSNorm")
    modules = layer.submodules
    modules.self_attention.submodules.core_attention = TreeAttention
    if transformer_engine_runs_on(device):
        _take_from_transformer_engine(modules, qk_norm=qk_norm)
    if experts:
        modules.mlp = Experts
    return layer


def transformer_engine_runs_on(device: torch.device) -> bool:
    """Return whether layers on `device` are Transformer Engine's."""
    return device.type == "cuda" and find_spec("transformer_engine") is not None


def _take_from_transformer_engine(modules: Any, *, qk_norm: bool) -> None:
    engine = TESpecProvider()
    attention, mlp = modules.self_attention.submodules, modules.mlp.submodules
    modules.input_layernorm = modules.pre_mlp_layernorm = engine.layer_norm(rms_norm=True)
    if qk_norm:
        attention.q_layernorm = attention.k_layernorm = engine.layer_norm(rms_norm=True, for_qk=True)
    attention.linear_qkv = mlp.linear_fc1 = engine.column_parallel_linear()
    attention.linear_proj = mlp.linear_fc2 = engine.row_parallel_linear()


class TreeAttention(torch.nn.Module):
    """Attention with the tree mask of the micro-batch.

    The mask is passed as Megatron's `attention_bias`, which, unlike a mask, need not be a tensor when layers are
    computed again in the backward pass.
    """

    def __init__(self, *, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self._scale = softmax_scale

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: Any, attention_bias: TreeMask, **__: Any
    ) -> Tensor:
        """Return `[length, rows, heads · head_dim]`, from `[length, rows, heads, head_dim]`."""
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        return attention_bias.attend(query, key, value, scale=self._scale).permute(2, 0, 1, 3).flatten(2)


# --- network ---


class Batch(NamedTuple):
    """This rank's part of a micro-batch, on the device."""

    input_ids: Tensor
    """`[rows, length]`."""
    rotation: Tensor
    """`[length, rows, 1, head_dim]` float32: the rotary angles of each token."""
    tree: TreeMask
    share: Share
    predictions: Predictions
    temperature: float
    """Divisor of the logits."""
    facts: Tensor | None
    """The output of `facts_of` for each token; None if the model has no experts."""


def to_batch(
    micro: MicroBatch,
    shape: ModelShape,
    device: torch.device,
    context: ContextGroup,
    *,
    temperature: float,
    replays: bool = False,
) -> Batch:
    """Return this rank's share of `micro` on `device`. With `replays`, tokens are computed by the experts that it
    names."""

    def tensor(array: NDArray[Any]) -> Tensor:
        return to_device(array, device)

    share = context.share(micro)
    own = share.micro
    return Batch(
        input_ids=tensor(own.input_ids),
        rotation=shape.rotation(tensor(own.position_ids)),
        tree=TreeMask(micro, device, context),
        share=share,
        predictions=Predictions.of(own, device),
        temperature=temperature,
        facts=facts_of(share, counted=micro is not IDLE, replayed=replays, device=device) if shape.sparse else None,
    )


def transformer_config(shape: ModelShape, spec: ModelSpec, layout: Layout) -> Any:
    """Return Megatron's configuration of the model."""
    moe = shape.moe
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.intermediate_size,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        layernorm_epsilon=shape.rms_norm_eps,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        context_parallel_size=layout.context,
        variable_seq_lengths=layout.pipeline > 1,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=1,
        num_moe_experts=None if moe is None else moe.experts,
        moe_ffn_hidden_size=None if moe is None else moe.intermediate_size,
        moe_router_topk=2 if moe is None else moe.top_k,
        moe_router_pre_softmax=moe is not None and not moe.normalised,
        moe_router_load_balancing_type="none",  # the router adds it
        moe_router_dtype="fp32",
        moe_token_dispatcher_type="alltoall",  # the default refuses variable lengths, even without experts
        bf16=spec.dtype == torch.bfloat16,
        params_dtype=spec.dtype,
        pipeline_dtype=spec.dtype,
        use_cpu_initialization=True,
        perform_initialization=False,
        persist_layer_norm=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        calculate_per_token_loss=True,  # else Megatron divides the loss and averages over data-parallel ranks
        recompute_granularity="full" if spec.gradient_checkpointing else None,
        recompute_method="uniform" if spec.gradient_checkpointing else None,
        recompute_num_layers=1 if spec.gradient_checkpointing else None,
    )


class Network(LanguageModule):  # type: ignore[misc]
    """The pipeline stage of this rank; its weights are not initialized."""

    def __init__(
        self, config: Any, shape: ModelShape, spec: ModelSpec, context: ContextGroup, *, first: bool, last: bool
    ) -> None:
        groups = ProcessGroupCollection.use_mpu_process_groups()
        super().__init__(config=config, pg_collection=groups)
        padded = -(-shape.vocab_size // config.tensor_model_parallel_size) * config.tensor_model_parallel_size
        self.pre_process = first
        self.post_process = last
        self.share_embeddings_and_output_weights = shape.tied and spec.head == "tokens"
        self.model_type = ModelType.encoder_or_decoder
        self._spec = spec
        self._context = context
        if first:
            self.embedding = LanguageModelEmbedding(
                config, padded, max_sequence_length=0, position_embedding_type="rope", tp_group=groups.tp
            )
        modules = block_modules(
            shape.experts_of_stage(groups.pp.rank(), stages=groups.pp.size()), qk_norm=shape.qk_norm, device=spec.device
        )
        self.decoder = TransformerBlock(config, modules, pre_process=first, post_process=last, pg_collection=groups)
        if last and spec.head == "scalar":
            self.score = torch.nn.Linear(shape.hidden_size, 1, bias=False, dtype=spec.dtype)
        elif last:
            self.output_layer = tensor_parallel.ColumnParallelLinear(
                shape.hidden_size,
                padded,
                config=config,
                init_method=config.init_method,
                bias=False,
                skip_weight_param_allocation=first and shape.tied,
                tp_group=groups.tp,
            )
            self._first_id = groups.tp.rank() * (padded // groups.tp.size())
            self._ids = min(padded // groups.tp.size(), shape.vocab_size - self._first_id)
        if spec.head == "tokens" and (first or last):
            self.setup_embeddings_and_output_layer()

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Store the previous stage's output; called by Megatron's schedules."""
        self.decoder.set_input_tensor(input_tensor[0])

    def forward(self, batch: Batch) -> Tensor | ModelOutput:
        """Return `[length, rows, hidden]` for the next stage; on the last stage, the model's output."""
        embedded = self.embedding(batch.input_ids, None) if self.pre_process else None
        hidden = self.decoder(
            hidden_states=embedded,
            attention_mask=None,
            rotary_pos_emb=batch.rotation,
            attention_bias=batch.tree,
            padding_mask=batch.facts,
        )
        self.decoder.set_input_tensor(None)  # else it is kept between steps, and while the model is offloaded
        if not self.post_process:
            assert isinstance(hidden, Tensor)
            return hidden
        found = self._outputs(hidden[batch.predictions.columns, batch.predictions.rows], batch)
        return ModelOutput(*(self._context.gather(own, batch.share) for own in found))

    def _outputs(self, states: Tensor, batch: Batch) -> ModelOutput:
        """Return the output for this rank's predictions, from `states` `[states, hidden]`."""
        of_state = batch.predictions.of_state
        if len(states) == 0:
            nothing = states.sum(-1).float()
            return ModelOutput(values=nothing, entropy=torch.zeros_like(nothing))
        if self._spec.head == "scalar":
            values = self.score(states)[:, 0].float().index_select(0, of_state)
            return ModelOutput(values=values, entropy=torch.zeros_like(values))
        predict = partial(self._predict, temperature=batch.temperature)
        return ModelOutput(*in_chunks(predict, states, batch.predictions))

    def _predict(self, states: Tensor, of_state: Tensor, ids: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities of the tokens `ids`, and entropies; see `token_distribution`."""
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits, _ = self.output_layer(states, weight=weight)
        return token_distribution(
            logits,
            of_state,
            ids,
            first=self._first_id,
            count=self._ids,
            temperature=temperature,
            entropy_gradient=self._spec.entropy_gradient,
            group=self.tp_group,
        )
