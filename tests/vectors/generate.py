"""Dumps what the official implementation computes for three tiny random models, as the files beside this one.

Needs torch 2.13 and transformers 5.24, which the project does not depend on: `python tests/vectors/generate.py`, with
names of models to make only those.
Everything is seeded and runs on the CPU in float32 with eager attention. Traps that the models are built to spring:
all one-dimensional parameters are perturbed (fresh norms are 0, which hides a missing +1), value heads differ from
key heads in number, the head count of model B is no power of two, and its layer kinds do not follow the interval.

Per model: `<name>.safetensors` (weights), `<name>.json` (config.json) and `<name>.npz` (inputs and results):
    tokens         [333] the prompt
    lengths        prefill lengths; last_logits [lengths][vocab]: logits at the last token of each
    all_logits     [333 / 9][vocab] every ninth position of the longest prefill
    conv, ssm      states after it: [delta layers][3][channels], [delta layers][value heads][key dim][value dim]
    starts         prefill lengths from which greedy decoding went on; greedy [starts][64] ids;
                   greedy_logits [starts][8][vocab]: before steps 0, 9, 18, ...
    mrope_tokens   [n], mrope_positions [n][3] with two picture-like grids inside; mrope_logits [n / 5][vocab];
                   mrope_delta; mrope_next [4][vocab]: logits of four more tokens (mrope_more) decoded after it
Model C has a vision tower of odd sizes (heads of 28, 100 columns, a 6 x 6 table) and its own results, of pictures that
tests/tiny_pictures.py makes:
    picture_sizes  [n][3] height, width, seed; tower_<i> [tokens / 7][hidden]: every seventh row of the tower
    prompt_<i>     tokens of a prompt; pictures_<i> [k][4] start, height, width, seed of the pictures in it
    logits_<i>     [tokens / 3][vocab] every third position, then the last; delta_<i>; ids_<i> [64] greedy ids after it;
                   next_<i> [8][vocab] logits before steps 0, 9, 18, ...
Model A is stored in bfloat16 (its values are exact there) in both expert forms: `a.safetensors` fused and with an MTP
layer, `a_per_expert.safetensors` as save_pretrained writes it. Model B is fused; its vectors are float32.
Model C is stored like B.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from tiny_pictures import picture  # noqa: E402

LENGTHS = [1, 2, 3, 4, 5, 17, 31, 63, 64, 65, 100, 127, 128, 129, 191, 192, 193, 255, 256, 257, 320, 333]
STARTS = [1, 5, 64, 200]
STEPS = 64

ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_interleaved": True}
VISION = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 16, "in_channels": 3,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 64,
    "deepstack_visual_indexes": [],
}  # fmt: skip
SIGHT = {**VISION, "depth": 2, "hidden_size": 56, "intermediate_size": 100, "num_position_embeddings": 36}
# One token, less than a panel of patches, asymmetric both ways, more than one chunk of patches.
PICTURES = [(32, 32, 0), (96, 160, 1), (256, 64, 2), (640, 672, 3)]
# Pictures and lengths of text in turn: a picture first, one last, two in one prompt, one longer than a pass of 64, one
# last that begins in one pass and ends in another.
PROMPTS = [
    [(96, 160, 1), 20],
    [7, (160, 64, 4)],
    [5, (64, 96, 5), 9, (128, 32, 6), 30],
    [3, (320, 288, 7), 70, (32, 32, 0), 2],
    [(64, 64, 8), 40, (192, 256, 8)],
]
TEXT = {
    "a": {
        "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "rope_parameters": {**ROPE, "mrope_section": [2, 1, 1]},
    },
    "b": {
        "vocab_size": 384, "hidden_size": 96, "num_hidden_layers": 5, "num_attention_heads": 6,
        "num_key_value_heads": 2, "head_dim": 48, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
        "linear_key_head_dim": 32, "linear_value_head_dim": 48, "linear_conv_kernel_dim": 4, "num_experts": 5,
        "num_experts_per_tok": 3, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 80,
        "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention",
                        "linear_attention"],
        "rope_parameters": {**ROPE, "mrope_section": [2, 2, 2]},
    },
}  # fmt: skip
TEXT["c"] = TEXT["a"]


def tiny_config(name: str) -> Qwen3_5MoeConfig:
    text = {
        **TEXT[name], "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 4096,
        "tie_word_embeddings": False, "attention_bias": False, "eos_token_id": 2, "bos_token_id": 2,
        "mtp_num_hidden_layers": 1,
    }  # fmt: skip
    vision = {**(SIGHT if name == "c" else VISION), "out_hidden_size": text["hidden_size"]}
    vocab = text["vocab_size"]
    config = Qwen3_5MoeConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=False, image_token_id=vocab - 4,
        video_token_id=vocab - 3, vision_start_token_id=vocab - 2, vision_end_token_id=vocab - 1,
    )  # fmt: skip
    config._attn_implementation = "eager"
    return config


def tiny_model(name: str, seed: int) -> Qwen3_5MoeForConditionalGeneration:
    torch.manual_seed(seed)
    model = Qwen3_5MoeForConditionalGeneration(tiny_config(name)).float().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            elif "conv1d" in key:
                parameter.copy_(torch.randn_like(parameter) * 0.4)
            else:
                # Activations of order one, so that gates, decays and routers leave their linear range.
                fan_in = parameter.shape[-1] if parameter.ndim < 4 else parameter[0].numel()
                parameter.copy_(torch.randn_like(parameter) * (1.0 if "embed_tokens" in key else fan_in**-0.5))
            parameter.copy_(parameter.bfloat16().float())
    return model


def forward(model, ids, positions, cache):
    """Logits [n, vocab] of tokens `ids` at `positions` [n, 3] behind what `cache` holds, and the new cache."""
    output = model.model.language_model(
        inputs_embeds=model.get_input_embeddings()(torch.tensor([ids])),
        position_ids=torch.tensor(positions).T[:, None, :],
        cache=cache,
        use_cache=True,
    )
    return model.lm_head(output.last_hidden_state)[0], output.cache


def text_positions(first: int, count: int) -> list[list[int]]:
    return [[p, p, p] for p in range(first, first + count)]


class NearTie(Exception):
    """Greedy ids would depend on rounding: another seed must be taken."""


def greedy(model, prompt):
    logits, cache = forward(model, prompt, text_positions(0, len(prompt)), None)
    return go_on(model, logits, cache, len(prompt))


def go_on(model, logits, cache, following):
    """Greedy ids and some logits after a prompt; `following` is the next token's rotary position."""
    ids, kept = [], []
    for step in range(STEPS):
        top = torch.topk(logits[-1], 2)
        gap = float(top.values[0] - top.values[1]) / float(logits[-1].abs().max())
        if gap < 2e-4:
            raise NearTie(f"step {step}: the best two logits are within {gap:.1e} of the scale")
        if step % 9 == 0:
            kept.append(logits[-1].numpy())
        ids.append(int(top.indices[0]))
        logits, cache = forward(model, [ids[-1]], text_positions(following + step, 1), cache)
    return ids, np.stack(kept)


def picture_positions() -> tuple[list[list[int]], int]:
    """Text, a 3 x 5 grid, text, a 2 x 2 grid, text; and the position that follows."""
    positions, at = [], 0
    for kind, size in (("text", 7), ("grid", (3, 5)), ("text", 60), ("grid", (2, 2)), ("text", 9)):
        if kind == "text":
            positions += text_positions(at, size)
            at += size
        else:
            rows, cols = size
            positions += [[at, at + r, at + c] for r in range(rows) for c in range(cols)]
            at += max(rows, cols)
    return positions, at


def states(cache, config):
    kinds = config.text_config.layer_types
    layers = [cache.layers[i] for i, kind in enumerate(kinds) if kind == "linear_attention"]
    conv = np.stack([layer.conv_states[0][0, :, -3:].T.numpy() for layer in layers])
    ssm = np.stack([layer.recurrent_states[0][0].numpy() for layer in layers])
    return conv, ssm


def dump(name: str, seed: int) -> None:
    model = tiny_model(name, seed)
    vocab = model.config.text_config.vocab_size
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocab - 8, max(LENGTHS)).tolist()
    last = [forward(model, tokens[:n], text_positions(0, n), None)[0][-1].numpy() for n in LENGTHS]
    logits, cache = forward(model, tokens, text_positions(0, len(tokens)), None)
    conv, ssm = states(cache, model.config)
    continued = [greedy(model, tokens[:n]) for n in STARTS]
    positions, following = picture_positions()
    mrope_tokens = rng.integers(0, vocab - 8, len(positions)).tolist()
    mrope_logits, cache = forward(model, mrope_tokens, positions, None)
    more, nexts = rng.integers(0, vocab - 8, 4).tolist(), []
    for i, token in enumerate(more):
        row, cache = forward(model, [token], text_positions(following + i, 1), cache)
        nexts.append(row[0].numpy())
    np.savez(
        HERE / f"{name}.npz",
        tokens=np.array(tokens, np.int32), lengths=np.array(LENGTHS, np.int32), last_logits=np.stack(last),
        all_logits=logits[::9].numpy(), conv=conv, ssm=ssm, starts=np.array(STARTS, np.int32),
        greedy=np.array([ids for ids, _ in continued], np.int32),
        greedy_logits=np.stack([kept for _, kept in continued]),
        mrope_tokens=np.array(mrope_tokens, np.int32), mrope_positions=np.array(positions, np.int32),
        mrope_logits=mrope_logits[::5].numpy(), mrope_delta=np.int32(following - len(positions)),
        mrope_more=np.array(more, np.int32), mrope_next=np.stack(nexts),
    )  # fmt: skip
    save_model(name, model)


def see(model, pictures):
    """Inputs of the tower for pictures (height, width, seed), as the official preprocessor makes them."""
    processor = Qwen2VLImageProcessorPil(
        do_resize=False, image_mean=[0.5] * 3, image_std=[0.5] * 3, patch_size=16, merge_size=2
    )
    inputs = processor([picture(*size) for size in pictures], return_tensors="pt", input_data_format="channels_last")
    return inputs["pixel_values"].float(), inputs["image_grid_thw"]


def dump_pictures(seed: int) -> None:
    name = "c"
    model = tiny_model(name, seed)
    vocab, pad = model.config.text_config.vocab_size, model.config.image_token_id
    rng = np.random.default_rng(seed)
    saved = {"picture_sizes": np.array(PICTURES, np.int32)}
    for i, size in enumerate(PICTURES):
        saved[f"tower_{i}"] = model.model.visual(*see(model, [size])).pooler_output[::7].numpy()
    for i, parts in enumerate(PROMPTS):
        ids, pictures = [], []
        for part in parts:
            if isinstance(part, int):
                ids += rng.integers(0, vocab - 8, part).tolist()
            else:
                pictures.append((len(ids), *part))
                ids += [pad] * (part[0] * part[1] // 1024)
        pixels, grids = see(model, [size[1:] for size in pictures])
        model.model.rope_deltas = None
        tokens = torch.tensor([ids])
        output = model(
            input_ids=tokens, pixel_values=pixels, image_grid_thw=grids,
            mm_token_type_ids=(tokens == pad).int(), use_cache=True,
        )  # fmt: skip
        delta = int(model.model.rope_deltas)
        logits = output.logits[0]
        greedy_ids, kept = go_on(model, logits, output.past_key_values, len(ids) + delta)
        saved |= {
            f"prompt_{i}": np.array(ids, np.int32), f"pictures_{i}": np.array(pictures, np.int32),
            f"logits_{i}": torch.cat([logits[::3], logits[-1:]]).numpy(), f"delta_{i}": np.int32(delta),
            f"ids_{i}": np.array(greedy_ids, np.int32), f"next_{i}": kept,
        }  # fmt: skip
    np.savez(HERE / f"{name}.npz", **saved)
    save_model(name, model)


def save_model(name: str, model) -> None:
    config = json.loads(model.config.to_json_string(use_diff=False))
    (HERE / f"{name}.json").write_text(json.dumps(config, indent=1) + "\n")
    weights = {key: value.detach().contiguous() for key, value in model.state_dict().items()}
    if name == "a":
        weights = {key: value.bfloat16() for key, value in {**weights, **mtp_weights(weights)}.items()}
        with tempfile.TemporaryDirectory() as folder:
            model.bfloat16().save_pretrained(folder)
            save_file(load_file(f"{folder}/model.safetensors"), HERE / "a_per_expert.safetensors")
    else:
        weights = {key: value.bfloat16() if value.ndim > 1 else value for key, value in weights.items()}
    save_file(weights, HERE / f"{name}.safetensors")


def mtp_weights(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A random multi-token-prediction layer: transformers has none, published checkpoints do."""
    full = "model.language_model.layers.3."
    hidden = weights["lm_head.weight"].shape[1]
    shapes = {f"mtp.layers.0.{key.removeprefix(full)}": v.shape for key, v in weights.items() if key.startswith(full)}
    shapes["mtp.fc.weight"] = torch.Size([hidden, 2 * hidden])
    for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        shapes[f"mtp.{norm}.weight"] = torch.Size([hidden])
    return {key: torch.randn(shape) * shape[-1] ** -0.5 for key, shape in shapes.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.no_grad():
        for model_name, first_seed in (("a", 100), ("b", 200), ("c", 300)):
            if model_name not in (sys.argv[1:] or "abc"):
                continue
            for seed in range(first_seed, first_seed + 100):
                try:
                    dump_pictures(seed) if model_name == "c" else dump(model_name, seed)
                    break
                except NearTie as error:
                    print(f"model {model_name}, seed {seed}: {error}")
