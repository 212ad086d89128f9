"""The demo model for training: shape, initial weights, forward pass, checkpoint export.

Parameters live in a plain dict keyed by their Hugging Face tensor names, so an export is a plain
``qwen3_5_moe`` checkpoint. The forward pass is written for packed rows: several documents share a row, and at
every document border the recurrent state, the convolution window, the attention and the positions start afresh.
Everything in :func:`text_hidden` has static shapes and never waits for the device, so that a whole training step
can be captured as one CUDA graph.

This module never generates data and never optimises.
"""

import dataclasses
import json
import math
import typing
from pathlib import Path

import torch
import torch.nn.functional as F

Tensor = torch.Tensor
Params = dict[str, Tensor]

#: Special tokens in the order of the real model's ids 248044..248069; here they are the last ids of the vocabulary.
SPECIALS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>",
    "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>",
    "<think>", "</think>",
)  # fmt: skip
#: Added tokens that stay visible when special tokens are skipped in decoding.
VISIBLE = frozenset({"<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"})

EPS = 1e-6
CHUNK = 64
PATCH = 16
MERGE = 2
LM = "model.language_model."
VISION = "model.visual."


@dataclasses.dataclass(frozen=True)
class Shape:
    """Dimensions of the model; the head dimensions are those of the real one, so the same kernels run."""

    vocab: int = 4096
    hidden: int = 256
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 256
    rope_theta: float = 1e6
    rotary: int = 64
    mrope_section: tuple[int, int, int] = (11, 11, 10)
    key_heads: int = 2
    value_heads: int = 4
    linear_dim: int = 128
    conv: int = 4
    experts: int = 32
    top_k: int = 4
    expert_inner: int = 64
    shared_inner: int = 64
    full_interval: int = 4
    context: int = 8192
    vision_depth: int = 4
    vision_hidden: int = 144
    vision_heads: int = 2
    vision_inner: int = 528
    vision_positions: int = 256

    def is_full(self, layer: int) -> bool:
        """Whether ``layer`` is full attention (every fourth) rather than gated delta net."""
        return layer % self.full_interval == self.full_interval - 1

    def token_id(self, special: str) -> int:
        """The id of a special token."""
        return self.vocab - len(SPECIALS) + SPECIALS.index(special)


PRESETS = {
    "demo": Shape(),
    "tiny": Shape(layers=4, hidden=128, experts=8, top_k=2, vision_depth=2),
}


def hf_config(shape: Shape) -> dict[str, typing.Any]:
    """The checkpoint's ``config.json`` for ``shape``, keys as in the Hugging Face configuration."""
    kinds = ["full_attention" if shape.is_full(i) else "linear_attention" for i in range(shape.layers)]
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "dtype": "bfloat16",
        "image_token_id": shape.token_id("<|image_pad|>"),
        "video_token_id": shape.token_id("<|video_pad|>"),
        "vision_start_token_id": shape.token_id("<|vision_start|>"),
        "vision_end_token_id": shape.token_id("<|vision_end|>"),
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "qwen3_5_moe_text",
            "dtype": "bfloat16",
            "vocab_size": shape.vocab,
            "hidden_size": shape.hidden,
            "num_hidden_layers": shape.layers,
            "layer_types": kinds,
            "full_attention_interval": shape.full_interval,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_output_gate": True,
            "partial_rotary_factor": shape.rotary / shape.head_dim,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": shape.rope_theta,
                "partial_rotary_factor": shape.rotary / shape.head_dim,
                "mrope_interleaved": True,
                "mrope_section": list(shape.mrope_section),
            },
            "linear_conv_kernel_dim": shape.conv,
            "linear_key_head_dim": shape.linear_dim,
            "linear_value_head_dim": shape.linear_dim,
            "linear_num_key_heads": shape.key_heads,
            "linear_num_value_heads": shape.value_heads,
            "mamba_ssm_dtype": "float32",
            "num_experts": shape.experts,
            "num_experts_per_tok": shape.top_k,
            "moe_intermediate_size": shape.expert_inner,
            "shared_expert_intermediate_size": shape.shared_inner,
            "router_aux_loss_coef": 0.01,
            "output_router_logits": False,
            "hidden_act": "silu",
            "rms_norm_eps": EPS,
            "initializer_range": 0.02,
            "max_position_embeddings": shape.context,
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "tie_word_embeddings": False,
            "use_cache": True,
            "bos_token_id": shape.token_id("<|endoftext|>"),
            "eos_token_id": shape.token_id("<|endoftext|>"),
            "pad_token_id": None,
        },
        "vision_config": {
            "model_type": "qwen3_5_moe",
            "dtype": "bfloat16",
            "depth": shape.vision_depth,
            "hidden_size": shape.vision_hidden,
            "num_heads": shape.vision_heads,
            "intermediate_size": shape.vision_inner,
            "out_hidden_size": shape.hidden,
            "num_position_embeddings": shape.vision_positions,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "in_channels": 3,
            "hidden_act": "gelu_pytorch_tanh",
            "initializer_range": 0.02,
            "deepstack_visual_indexes": [],
        },
    }


def generation_config(shape: Shape) -> dict[str, typing.Any]:
    """The checkpoint's ``generation_config.json``: greedy, because a tiny model is at its best there."""
    return {
        "do_sample": False,
        "temperature": 0.0,
        "top_k": 20,
        "top_p": 1.0,
        "eos_token_id": [shape.token_id("<|im_end|>"), shape.token_id("<|endoftext|>")],
        "pad_token_id": shape.token_id("<|endoftext|>"),
    }


def preprocessor_config() -> dict[str, typing.Any]:
    """The checkpoint's ``preprocessor_config.json``; the area limits are those the tower was trained within."""
    return {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
        "size": {"shortest_edge": 64 * 64, "longest_edge": 256 * 256},
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": MERGE,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }


# ------------------------------------------------------------------------------------------------ initial weights


def _layer_shapes(shape: Shape, prefix: str, full: bool) -> dict[str, tuple[int, ...]]:
    h, d = shape.hidden, shape.head_dim
    out: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (h,), "post_attention_layernorm.weight": (h,)}
    if full:
        out |= {
            "self_attn.q_proj.weight": (shape.heads * d * 2, h),
            "self_attn.k_proj.weight": (shape.kv_heads * d, h),
            "self_attn.v_proj.weight": (shape.kv_heads * d, h),
            "self_attn.o_proj.weight": (h, shape.heads * d),
            "self_attn.q_norm.weight": (d,),
            "self_attn.k_norm.weight": (d,),
        }
    else:
        keys, values = shape.key_heads * shape.linear_dim, shape.value_heads * shape.linear_dim
        out |= {
            "linear_attn.in_proj_qkv.weight": (2 * keys + values, h),
            "linear_attn.in_proj_z.weight": (values, h),
            "linear_attn.in_proj_b.weight": (shape.value_heads, h),
            "linear_attn.in_proj_a.weight": (shape.value_heads, h),
            "linear_attn.conv1d.weight": (2 * keys + values, 1, shape.conv),
            "linear_attn.A_log": (shape.value_heads,),
            "linear_attn.dt_bias": (shape.value_heads,),
            "linear_attn.norm.weight": (shape.linear_dim,),
            "linear_attn.out_proj.weight": (h, values),
        }
    out |= {
        "mlp.gate.weight": (shape.experts, h),
        "mlp.experts.gate_up_proj": (shape.experts, 2 * shape.expert_inner, h),
        "mlp.experts.down_proj": (shape.experts, h, shape.expert_inner),
        "mlp.shared_expert.gate_proj.weight": (shape.shared_inner, h),
        "mlp.shared_expert.up_proj.weight": (shape.shared_inner, h),
        "mlp.shared_expert.down_proj.weight": (h, shape.shared_inner),
        "mlp.shared_expert_gate.weight": (1, h),
    }
    return {prefix + name: dims for name, dims in out.items()}


def tensor_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint with its dimensions, multi-token-prediction layer included."""
    h, v = shape.hidden, shape.vision_hidden
    merged = v * MERGE * MERGE
    out: dict[str, tuple[int, ...]] = {LM + "embed_tokens.weight": (shape.vocab, h)}
    for i in range(shape.layers):
        out |= _layer_shapes(shape, f"{LM}layers.{i}.", shape.is_full(i))
    out |= {LM + "norm.weight": (h,), "lm_head.weight": (shape.vocab, h)}
    out |= {
        VISION + "patch_embed.proj.weight": (v, 3, 2, PATCH, PATCH),
        VISION + "patch_embed.proj.bias": (v,),
        VISION + "pos_embed.weight": (shape.vision_positions, v),
    }
    for i in range(shape.vision_depth):
        block = f"{VISION}blocks.{i}."
        for name, dims in {
            "norm1": (v,),
            "norm2": (v,),
            "attn.qkv": (3 * v, v),
            "attn.proj": (v, v),
            "mlp.linear_fc1": (shape.vision_inner, v),
            "mlp.linear_fc2": (v, shape.vision_inner),
        }.items():
            out |= {f"{block}{name}.weight": dims, f"{block}{name}.bias": dims[:1]}
    for name, dims in {"norm": (v,), "linear_fc1": (merged, merged), "linear_fc2": (h, merged)}.items():
        out |= {f"{VISION}merger.{name}.weight": dims, f"{VISION}merger.{name}.bias": dims[:1]}
    out |= {"mtp.fc.weight": (h, 2 * h)}
    out |= {f"mtp.{name}.weight": (h,) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    return out | _layer_shapes(shape, "mtp.layers.0.", True)


def initial_weights(shape: Shape, seed: int) -> Params:
    """Fresh float32 parameters.

    Two departures from the Hugging Face defaults matter for a small model: the decay of the delta rule starts slow
    (time constants of 10 to 1000 tokens, the Mamba draw), and output projections are scaled by the depth.
    """
    generator = torch.Generator().manual_seed(seed)
    params: Params = {}
    for name, dims in tensor_shapes(shape).items():
        value = torch.empty(dims)
        layer_norm = name.startswith(VISION) and "norm" in name and name.endswith("weight")
        if layer_norm or name.endswith("linear_attn.norm.weight"):
            value.fill_(1.0)
        elif name.endswith("A_log"):
            value.uniform_(1, 16, generator=generator).log_()
        elif name.endswith("dt_bias"):
            value.uniform_(math.log(1e-3), math.log(0.1), generator=generator).exp_()
            value += torch.log(-torch.expm1(-value))
        elif name.endswith("conv1d.weight"):
            value.uniform_(-0.5, 0.5, generator=generator)
        elif len(dims) == 1:
            value.zero_()
        else:
            value.normal_(0, 0.02, generator=generator)
            if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight", "down_proj")):
                value *= 1 / math.sqrt(2 * shape.layers)
        params[name] = value
    return params


# ------------------------------------------------------------------------------------------------ building blocks


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``, in bfloat16 on a GPU (float32 accumulation) and in float32 on the CPU."""
    if x.is_cuda:
        return F.linear(x.bfloat16(), weight.bfloat16(), None if bias is None else bias.bfloat16())
    return F.linear(x, weight, bias)


def rmsnorm(x: Tensor, weight: Tensor) -> Tensor:
    """Root-mean-square norm with the family's (1 + w) gain, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * (1 + weight)


def rope_tables(shape: Shape, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [N, rotary/2] of interleaved multi-axis rotary positions; ``positions`` is int [3, N]."""
    half = shape.rotary // 2
    index = torch.arange(half, device=positions.device)
    frequency = shape.rope_theta ** (-index.float() / half)
    section = shape.mrope_section
    axis = ((index % 3 == 1) & (index < 3 * section[1])).long()
    axis = axis + 2 * ((index % 3 == 2) & (index < 3 * section[2])).long()
    angle = positions.float()[axis].T * frequency
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding on the first dimensions of ``x`` [N, heads, D]; pairs are (j, j + rotary/2)."""
    half = cos.shape[-1]
    c, s = cos[:, None], sin[:, None]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * c - b * s, b * c + a * s, rest], -1)


class _UnitLowerInverse(torch.autograd.Function):
    """(I + L)^-1 for strictly lower L [..., 64, 64], with matrix products only.

    Inside 16 x 16 blocks the Neumann series ends after 16 terms (three doublings); the blocks are then merged.
    Doubling over all 64 rows would overflow float32 for repeated keys. The gradient is -X^T G X^T.
    """

    @staticmethod
    def forward(ctx: typing.Any, lower: Tensor) -> Tensor:
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            out = _UnitLowerInverse.merge(lower)
        finally:
            torch.set_float32_matmul_precision(precision)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def merge(lower: Tensor) -> Tensor:
        """The inverse, block by block."""
        size, step = lower.shape[-1], 16
        count = size // step
        eye = torch.eye(step, device=lower.device, dtype=lower.dtype)
        part = lower.unflatten(-1, (count, step)).unflatten(-3, (count, step)).transpose(-3, -2)
        diagonal = torch.stack([part[..., i, i, :, :] for i in range(count)], -3)
        power = -diagonal
        inverse = eye + power
        for _ in range(3):
            power = power @ power
            inverse = inverse + inverse @ power
        blocks: dict[tuple[int, int], Tensor] = {(i, i): inverse[..., i, :, :] for i in range(count)}
        for distance in range(1, count):
            for i in range(distance, count):
                j = i - distance
                total = part[..., i, j, :, :] @ blocks[j, j]
                for m in range(j + 1, i):
                    total = total + part[..., i, m, :, :] @ blocks[m, j]
                blocks[i, j] = -(blocks[i, i] @ total)
        zero = torch.zeros_like(blocks[0, 0])
        rows = [torch.cat([blocks.get((i, j), zero) for j in range(count)], -1) for i in range(count)]
        return torch.cat(rows, -2)

    @staticmethod
    def backward(ctx: typing.Any, *grads: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        transposed: Tensor = inverse.mT
        return -(transposed @ grads[0] @ transposed)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Gated delta rule over rows, in chunks of 64 tokens, in float32.

    q, k [B, T, heads, D] (normalised, q scaled), v [B, T, heads, D], g (log decay) and beta [B, T, heads];
    T is a multiple of 64. Returns [B, T, heads, D]. A very negative g empties the state before its token.
    """
    batch, length, heads, dim = v.shape
    count = length // CHUNK
    q, k, v = (x.unflatten(1, (count, CHUNK)).permute(0, 3, 1, 2, 4) for x in (q, k, v))
    g, beta = (x.unflatten(1, (count, CHUNK)).permute(0, 3, 1, 2) for x in (g, beta))
    total = g.cumsum(-1)
    upper = torch.ones(CHUNK, CHUNK, device=q.device, dtype=torch.bool).triu(1)
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(upper, -math.inf).exp()
    weighted = k * beta[..., None]
    inverse = _UnitLowerInverse.apply((weighted @ k.mT * decay).tril(-1))
    scores = q @ k.mT * decay
    grown = total.exp()[..., None]
    values = inverse @ (v * beta[..., None])
    keys = inverse @ (weighted * grown)
    q = q * grown
    k = (k * (total[..., -1:] - total).exp()[..., None]).mT
    last = total[..., -1].exp()[..., None, None]
    state = torch.zeros(batch, heads, dim, dim, device=q.device)
    outs = []
    for i in range(count):
        fresh = values[:, :, i] - keys[:, :, i] @ state
        outs.append(q[:, :, i] @ state + scores[:, :, i] @ fresh)
        state = state * last[:, :, i] + k[:, :, i] @ fresh
    return torch.stack(outs, 2).permute(0, 2, 3, 1, 4).reshape(batch, length, heads, dim)


@dataclasses.dataclass
class Layout:
    """Where the documents of a packed batch lie; tensors shared by all layers.

    ``first`` bool [N]: token starts a document; ``same[s]`` float [N, 1]: token s back is in the same document;
    ``mask`` bool [B, 1, T, T]: attention allowed; ``cos``/``sin`` [N, rotary/2].
    """

    rows: int
    first: Tensor
    same: list[Tensor]
    mask: Tensor
    cos: Tensor
    sin: Tensor


def make_layout(shape: Shape, documents: Tensor, positions: Tensor) -> Layout:
    """``documents`` int [B, T] is distinct for each document of the batch; ``positions`` int [3, B*T]."""
    flat = documents.flatten()
    same = [F.pad(flat, (s, 0), value=-1)[: flat.numel()] == flat for s in range(1, shape.conv)]
    mask = (documents[:, :, None] == documents[:, None, :]).tril()[:, None]
    cos, sin = rope_tables(shape, positions)
    return Layout(documents.shape[0], ~same[0], [s[:, None].float() for s in same], mask, cos, sin)


def gated_delta_net(shape: Shape, p: Params, prefix: str, x: Tensor, at: Layout) -> Tensor:
    """The gated delta net mixer on normalised input ``x`` [N, hidden]."""
    d, kh, vh = shape.linear_dim, shape.key_heads, shape.value_heads
    qkv = linear(x, p[prefix + "in_proj_qkv.weight"])
    z = linear(x, p[prefix + "in_proj_z.weight"])
    beta = F.linear(x, p[prefix + "in_proj_b.weight"]).sigmoid()
    a = F.linear(x, p[prefix + "in_proj_a.weight"])
    taps = p[prefix + "conv1d.weight"][:, 0]
    mixed = qkv * taps[:, -1]
    for back, same in enumerate(at.same, 1):
        mixed = mixed + F.pad(qkv, (0, 0, back, 0))[: qkv.shape[0]] * (same * taps[:, -1 - back])
    mixed = F.silu(mixed.float())
    q, k, v = mixed.split([kh * d, kh * d, vh * d], -1)
    q, k = (t.unflatten(-1, (kh, d)) for t in (q, k))
    q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + EPS) * d**-0.5
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + EPS)
    q, k = (t.repeat_interleave(vh // kh, 1).unflatten(0, (at.rows, -1)) for t in (q, k))
    g = -p[prefix + "A_log"].exp() * F.softplus(a + p[prefix + "dt_bias"])
    g = torch.where(at.first[:, None], g - 100.0, g)
    out = delta_rule(
        q, k, v.unflatten(-1, (vh, d)).unflatten(0, (at.rows, -1)), *(t.unflatten(0, (at.rows, -1)) for t in (g, beta))
    ).flatten(0, 1)
    out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + EPS) * p[prefix + "norm.weight"]
    out = out * F.silu(z.float().unflatten(-1, (vh, d)))
    return linear(out.flatten(1), p[prefix + "out_proj.weight"])


def gated_attention(shape: Shape, p: Params, prefix: str, x: Tensor, at: Layout) -> Tensor:
    """The full-attention mixer with output gate on normalised input ``x`` [N, hidden]."""
    d, heads, kv = shape.head_dim, shape.heads, shape.kv_heads
    query, gate = linear(x, p[prefix + "q_proj.weight"]).unflatten(-1, (heads, 2 * d)).split(d, -1)
    key = linear(x, p[prefix + "k_proj.weight"]).unflatten(-1, (kv, d))
    value = linear(x, p[prefix + "v_proj.weight"]).unflatten(-1, (kv, d))
    query = rotate(rmsnorm(query, p[prefix + "q_norm.weight"]), at.cos, at.sin) * d**-0.5
    key = rotate(rmsnorm(key, p[prefix + "k_norm.weight"]), at.cos, at.sin)
    query, key = query.to(value.dtype), key.to(value.dtype)
    key, value = (t.repeat_interleave(heads // kv, 1) for t in (key, value))
    query, key, value = (t.unflatten(0, (at.rows, -1)).transpose(1, 2) for t in (query, key, value))
    weights = (query @ key.mT).masked_fill(~at.mask, -math.inf).softmax(-1)
    out = (weights @ value).transpose(1, 2).flatten(0, 1)
    return linear((out * gate.sigmoid()).flatten(1), p[prefix + "o_proj.weight"])


class _Dispatch(torch.autograd.Function):
    """Rows of ``x`` [N, d] copied to their experts: ``x[order // k]``; the gradient is a gather and a sum over k."""

    @staticmethod
    def forward(ctx: typing.Any, x: Tensor, order: Tensor, place: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(place)
        ctx.k = k
        return x.index_select(0, order // k)

    @staticmethod
    def backward(ctx: typing.Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (place,) = ctx.saved_tensors
        back = grads[0].index_select(0, place).unflatten(0, (-1, ctx.k))
        return back.sum(1, dtype=torch.float32).to(back.dtype), None, None, None


class _Collect(torch.autograd.Function):
    """The inverse permutation of the rows of ``x``: ``x[place]``; the gradient is ``g[order]``."""

    @staticmethod
    def forward(ctx: typing.Any, x: Tensor, order: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return x.index_select(0, place)

    @staticmethod
    def backward(ctx: typing.Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return grads[0].index_select(0, order), None, None


def sparse_moe(shape: Shape, p: Params, prefix: str, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Routed and shared experts on normalised input ``x`` [N, hidden].

    Returns output, load-balance loss (1 when even), router z loss and the share of each expert [experts].
    """
    logits = F.linear(x, p[prefix + "gate.weight"])
    probability = logits.softmax(-1)
    weight, chosen = probability.topk(shape.top_k, -1)
    weight = weight / weight.sum(-1, keepdim=True)
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    counts = torch.zeros(shape.experts, device=x.device, dtype=torch.int32)
    counts = counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    place = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=x.device))
    up_weight, down_weight = p[prefix + "experts.gate_up_proj"], p[prefix + "experts.down_proj"]
    if x.is_cuda:
        sent = _Dispatch.apply(x.bfloat16(), order, place, shape.top_k)
        ends = counts.cumsum(0, dtype=torch.int32)
        gate, up = F.grouped_mm(sent, up_weight.bfloat16().mT, offs=ends).chunk(2, -1)
        made = F.grouped_mm(F.silu(gate) * up, down_weight.bfloat16().mT, offs=ends)
    else:
        sent = _Dispatch.apply(x, order, place, shape.top_k)
        parts = []
        for e, rows in enumerate(sent.split(counts.tolist())):
            gate, up = F.linear(rows, up_weight[e]).chunk(2, -1)
            parts.append(F.linear(F.silu(gate) * up, down_weight[e]))
        made = torch.cat(parts)
    made = _Collect.apply(made, order, place)
    out = (made.unflatten(0, (-1, shape.top_k)).float() * weight[..., None]).sum(1)
    shared = prefix + "shared_expert."
    inner = F.silu(linear(x, p[shared + "gate_proj.weight"])) * linear(x, p[shared + "up_proj.weight"])
    open_by = F.linear(x, p[prefix + "shared_expert_gate.weight"]).sigmoid()
    out = out + open_by * linear(inner, p[shared + "down_proj.weight"])
    share = counts.float() / flat.numel()
    balance = shape.experts * (share * probability.mean(0)).sum()
    return out, balance, logits.logsumexp(-1).square().mean(), share


def decoder_layer(
    shape: Shape, p: Params, prefix: str, x: Tensor, at: Layout, full: bool
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """One layer on ``x`` [N, hidden]: returns the new ``x`` and the router's (balance, z, share)."""
    h = rmsnorm(x, p[prefix + "input_layernorm.weight"])
    if full:
        x = x + gated_attention(shape, p, prefix + "self_attn.", h, at)
    else:
        x = x + gated_delta_net(shape, p, prefix + "linear_attn.", h, at)
    out, *router = sparse_moe(shape, p, prefix + "mlp.", rmsnorm(x, p[prefix + "post_attention_layernorm.weight"]))
    return x + out, (router[0], router[1], router[2])


def text_hidden(
    shape: Shape, p: Params, ids: Tensor, at: Layout, image_rows: Tensor, image_at: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states after the final norm [N, hidden], balance loss, z loss, expert shares [layers, experts].

    ``ids`` [B, T]; ``image_rows`` [R, hidden] replace the embeddings at the flat positions ``image_at`` [R];
    a position of N means that the row is unused.
    """
    x = p[LM + "embed_tokens.weight"].index_select(0, ids.flatten())
    x = torch.cat([x, torch.zeros_like(x[:1])]).index_copy(0, image_at, image_rows)[:-1]
    routers = []
    for i in range(shape.layers):
        x, router = decoder_layer(shape, p, f"{LM}layers.{i}.", x, at, shape.is_full(i))
        routers.append(router)
    balance, z, share = (torch.stack(column) for column in zip(*routers, strict=True))
    return rmsnorm(x, p[LM + "norm.weight"]), balance.mean(), z.mean(), share


def logits(p: Params, hidden: Tensor) -> Tensor:
    """Scores [n, vocab] in float32 of final hidden states [n, hidden]."""
    return linear(hidden, p["lm_head.weight"]).float()


def mtp_hidden(shape: Shape, p: Params, hidden: Tensor, following: Tensor, at: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """Output [N, hidden] of the multi-token-prediction layer, balance and z loss; logits of slot t predict token t + 2.

    ``hidden`` [N, hidden] is the trunk after its final norm, ``following`` [N] the id of token t + 1. Slot t keeps
    the rotary position of token t.
    """
    embedded = p[LM + "embed_tokens.weight"].index_select(0, following)
    embedded = rmsnorm(embedded, p["mtp.pre_fc_norm_embedding.weight"])
    x = linear(torch.cat([embedded, rmsnorm(hidden, p["mtp.pre_fc_norm_hidden.weight"])], -1), p["mtp.fc.weight"])
    x, (balance, z, _) = decoder_layer(shape, p, "mtp.layers.0.", x.float(), at, True)
    return rmsnorm(x, p["mtp.norm.weight"]), balance, z


# ------------------------------------------------------------------------------------------------ vision tower


def to_patches(pictures: Tensor) -> Tensor:
    """uint8 pictures [P, H, W, 3] -> float patches [P, patches, 1536] in merge-block order, values in -1..1."""
    x = pictures.permute(0, 3, 1, 2).float() / 127.5 - 1
    count, channels, height, width = x.shape
    x = x.reshape(count, channels, height // 32, 2, PATCH, width // 32, 2, PATCH)
    x = x.permute(0, 2, 5, 3, 6, 1, 4, 7)[..., None, :, :].expand(-1, -1, -1, -1, -1, -1, 2, -1, -1)
    return x.reshape(count, (height // PATCH) * (width // PATCH), -1)


def _block_order(rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    index = torch.arange(rows * columns, device=device).view(rows // 2, 2, columns // 2, 2)
    flat = index.transpose(1, 2).reshape(-1)
    return flat // columns, flat % columns


def _sampled_positions(table: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    side = math.isqrt(table.shape[0])
    r = rows.float() * (side - 1) / rows.max()
    c = columns.float() * (side - 1) / columns.max()
    r0, c0 = r.floor().long(), c.floor().long()
    r1, c1 = (r0 + 1).clamp(max=side - 1), (c0 + 1).clamp(max=side - 1)
    fr, fc = (r - r0)[:, None], (c - c0)[:, None]
    top = table[r0 * side + c0] * (1 - fc) + table[r0 * side + c1] * fc
    bottom = table[r1 * side + c0] * (1 - fc) + table[r1 * side + c1] * fc
    return top * (1 - fr) + bottom * fr


def vision_tower(shape: Shape, p: Params, pictures: Tensor) -> Tensor:
    """Embedding rows [P * H/32 * W/32, hidden] of equally large uint8 pictures [P, H, W, 3]."""
    count, height, width, _ = pictures.shape
    rows, columns = _block_order(height // PATCH, width // PATCH, pictures.device)
    dim = shape.vision_hidden // shape.vision_heads
    x = linear(
        to_patches(pictures),
        p[VISION + "patch_embed.proj.weight"].flatten(1),
        p[VISION + "patch_embed.proj.bias"],
    )
    x = x.float() + _sampled_positions(p[VISION + "pos_embed.weight"], rows, columns)
    frequency = 10000.0 ** (-torch.arange(dim // 4, device=x.device).float() / (dim // 4))
    angle = torch.cat([rows[:, None] * frequency, columns[:, None] * frequency], -1)
    cos, sin = angle.cos(), angle.sin()

    def norm(t: Tensor, name: str) -> Tensor:
        return F.layer_norm(t.float(), t.shape[-1:], p[name + ".weight"], p[name + ".bias"], EPS)

    def dense(t: Tensor, name: str) -> Tensor:
        return linear(t, p[name + ".weight"], p[name + ".bias"])

    for i in range(shape.vision_depth):
        block = f"{VISION}blocks.{i}."
        qkv = dense(norm(x, block + "norm1"), block + "attn.qkv").unflatten(-1, (3, shape.vision_heads, dim))
        q, k, v = qkv.unbind(2)
        q, k = (rotate(t.flatten(0, 1).float(), cos.repeat(count, 1), sin.repeat(count, 1)) for t in (q, k))
        q, k = (t.unflatten(0, (count, -1)).transpose(1, 2).to(v.dtype) for t in (q * dim**-0.5, k))
        mixed = ((q @ k.mT).softmax(-1) @ v.transpose(1, 2)).transpose(1, 2).flatten(2)
        x = x + dense(mixed, block + "attn.proj")
        inner = F.gelu(dense(norm(x, block + "norm2"), block + "mlp.linear_fc1"), approximate="tanh")
        x = x + dense(inner, block + "mlp.linear_fc2")
    merged = norm(x, VISION + "merger.norm").reshape(-1, shape.vision_hidden * MERGE * MERGE)
    inner = F.gelu(dense(merged, VISION + "merger.linear_fc1"))
    return dense(inner, VISION + "merger.linear_fc2").float()


# ------------------------------------------------------------------------------------------------ checkpoint files


def save_checkpoint(
    shape: Shape, params: Params, directory: Path, texts: dict[str, str], shard_bytes: int = 14_000_000
) -> None:
    """Write a bfloat16 Hugging Face checkpoint in shards of at most ``shard_bytes``.

    ``texts`` holds further files to write beside it by name (tokenizer.json, chat_template.jinja).
    """
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    room = shard_bytes
    for name, value in params.items():
        stored = value.detach().to("cpu", torch.bfloat16).contiguous()
        if stored.nbytes > room and shards[-1]:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = stored
        room -= stored.nbytes
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, directory / file, metadata={"format": "pt"})
        where |= dict.fromkeys(shard, file)
    total = sum(value.numel() * 2 for value in params.values())
    files: dict[str, typing.Any] = {
        "model.safetensors.index.json": {"metadata": {"total_size": total}, "weight_map": where},
        "config.json": hf_config(shape),
        "generation_config.json": generation_config(shape),
        "preprocessor_config.json": preprocessor_config(),
    }
    for file, content in files.items():
        (directory / file).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    for file, text in texts.items():
        (directory / file).write_text(text, encoding="utf-8")


def load_checkpoint(directory: Path) -> Params:
    """The float32 parameters of a checkpoint written by :func:`save_checkpoint`."""
    from safetensors.torch import load_file

    params: Params = {}
    for path in sorted(directory.glob("model-*.safetensors")):
        params |= {name: value.float() for name, value in load_file(path).items()}
    return params
