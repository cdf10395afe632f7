"""Makes the golden values of this folder with published PyTorch code: package `dflash` 0.1.0, Transformers for Muse.

    python3 -m venv /tmp/goldenv
    /tmp/goldenv/bin/pip install torch==2.13.0 transformers==5.24.0 safetensors numpy
    /tmp/goldenv/bin/pip install --no-deps dflash==0.1.0
    /tmp/goldenv/bin/python tests/golden/make_golden.py

Out, beside this file: `target/` (a tiny random Qwen3, under its Transformers names), one folder for each
drafter in the z-lab v1 format, and for each drafter `<name>.safetensors` with

    ids [T]                    a text
    features [T, F*D]          the target's hidden_states[i + 1] for the drafter's layer ids, side by side
    round<r>.span [2]          the features that enter the context in round r, of which there are several
    round<r>.anchor [1]
    round<r>.logits [B-1, V]   the draft's logits of the slots after the anchor
    round<r>.tokens [B-1]      the path of the candidate selector, where there is one

and for those that generate `<name>.json`: greedy generations of the published loop (prompt, ids, tokens per
round). `ropes.json` holds Transformers' frequencies and amplitudes for some rope parameters. Weights are
rounded to bfloat16, in which they are stored; everything is computed in float32. The drafters that generate are
trained for some seconds on the target's own texts, since a random one has nothing accepted.
"""

import json
import time
from pathlib import Path

import dflash.model as published
import torch
from safetensors.torch import save_file
from torch.nn import functional as F
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel, Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).parent
VOCAB, HIDDEN, TARGET_LAYERS = 64, 32, 6
MASK = 63  # never in a text: prompts avoid it and its head row is pushed down
BLOCK = 8

BASE = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "max_position_embeddings": 512,
    "num_target_layers": TARGET_LAYERS,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
DRAFTERS = {
    "full": {
        "num_hidden_layers": 2,
        "layer_types": ["full_attention"] * 2,
        "rope_theta": 10000.0,
        "block_size": BLOCK,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 2, 3]},
    },
    "sliding": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "sliding_window": 12,
        "use_sliding_window": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [3, 0], "block_size": BLOCK},
    },
    "yarn": {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 10,
        "use_sliding_window": True,
        "is_causal": False,
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
        },
        "dflash_config": {
            "mask_token_id": MASK,
            "target_layer_ids": [1, 3],
            "block_size": BLOCK,
            "final_logit_softcapping": 20.0,
            "output_multiplier": 0.5,
            "input_embedding_scale": 1.5,
        },
    },
    "causal": {
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "full_attention"],
        "is_causal": True,
        "rope_theta": 10000.0,
        "block_size": BLOCK,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [2, 1]},
    },
    "dflash2": {
        "architectures": ["DFlash2DraftModel"],
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "sliding_attention"],
        "sliding_window": 12,
        "use_sliding_window": True,
        "is_causal": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "dflash_config": {
            "mask_token_id": MASK,
            "target_layer_ids": [1, 2, 3],
            "block_size": BLOCK,
            "conv_kernel_size": 2,
            "conv_group_size": 4,
            "selector_rank": 8,
            "selector_top_k": 6,
        },
    },
    "muse": {
        "architectures": ["MuseGlimmerAssistantModel"],
        "model_type": "muse_glimmer_assistant",
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "sliding_attention"],
        "sliding_window": 128,  # longer than the text: stacks differ by one key at its edge
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "block_size": BLOCK,
        "mask_token_id": MASK,
        "target_layer_ids": [1, 3],
    },
}
GENERATING = ("full", "sliding", "dflash2")
ROPES = {  # what Transformers makes of rope parameters: inverse frequencies and amplitude
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1e7,
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
    },
    "yarn with both mscales": {
        "rope_type": "yarn",
        "rope_theta": 5e4,
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "yarn with an amplitude": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
        "attention_factor": 1.25,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
# Tokens that each round adds to the context: a prompt, no token but the anchor, some, a whole block.
SPANS = (9, 1, 4, 8, 8, 2, 5, 8, 3)


def rounded(model: torch.nn.Module) -> torch.nn.Module:
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model.eval()


class MuseAssistant(MuseGlimmerAssistantModel):
    """Transformers' own drafter, called and saved as the others here; it borrows the target's ends."""

    def __init__(self, config: dict) -> None:
        known = MuseGlimmerAssistantConfig(**{**config, "dtype": "float32"}, initializer_range=0.2)
        super().__init__(known)
        self.target_layer_ids = config["target_layer_ids"]
        for key, parameter in self.named_parameters():
            if "norm" in key:
                parameter.data += 0.2 * torch.randn_like(parameter)

    def forward(self, *, target_hidden, noise_embedding, position_ids, past_key_values, use_cache):
        assert past_key_values is None and not use_cache
        return (
            super()
            .forward(
                noise_embeds=noise_embedding, context_hidden_states=target_hidden, position_ids=position_ids
            )
            .last_hidden_state
        )

    def compute_logits(self, hidden, output_head):
        return output_head(hidden)


def make_target() -> Qwen3ForCausalLM:
    torch.manual_seed(7)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=TARGET_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        initializer_range=0.06,
        dtype="float32",
        eos_token_id=0,
        bos_token_id=None,
    )
    target = Qwen3ForCausalLM(config)
    target.lm_head.weight.data *= 16
    target.lm_head.weight.data[MASK] = 0
    return rounded(target)


def save_model(folder: Path, config: dict, model: torch.nn.Module) -> None:
    folder.mkdir(exist_ok=True)
    weights = {
        key.replace("_codebook.weight", "_codebook"): value.detach().bfloat16().contiguous()
        for key, value in model.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def make_drafter(name: str) -> published.DFlashDraftModel | MuseAssistant:
    torch.manual_seed(11)
    if name == "muse":
        return rounded(MuseAssistant({**BASE, **DRAFTERS[name]}))
    config = Qwen3Config(**{**BASE, **DRAFTERS[name], "dtype": "float32"}, initializer_range=0.2)
    draft = getattr(published, DRAFTERS[name].get("architectures", BASE["architectures"])[0])(config)
    for key, parameter in draft.named_parameters():
        if key.endswith(("norm.weight", ".bias")):  # ones and zeros would hide a norm or a bias left out
            parameter.data += 0.2 * torch.randn_like(parameter)
        if key.endswith("base_kernel"):  # published as the identity, which would hide its second tap
            parameter.data = 0.2 * torch.randn_like(parameter)
            parameter.data[:, 0] += 1
        if "codebook" in key:
            parameter.data = 2 * torch.randn_like(parameter)
    return rounded(draft)


@torch.no_grad()
def texts_of(target: Qwen3ForCausalLM, count: int, length: int) -> torch.Tensor:
    torch.manual_seed(3)
    prompts = torch.randint(1, MASK, (count, 6))
    return target.generate(
        prompts, max_new_tokens=length - 6, do_sample=False, eos_token_id=None, pad_token_id=0
    )


@torch.no_grad()
def features_of(target: Qwen3ForCausalLM, ids: torch.Tensor, layers: list[int]) -> torch.Tensor:
    states = target(ids, output_hidden_states=True).hidden_states
    return published.extract_context_feature(states, layers)


def draft_logits(draft, target, cache, features, first: int, anchor: torch.Tensor) -> torch.Tensor:
    return draft.compute_logits(
        draft_rows(draft, target, cache, features, first, anchor), published._output_head(target)
    )


def draft_rows(draft, target, cache, features, first: int, anchor: torch.Tensor) -> torch.Tensor:
    """One call of the published draft: features of positions first..., the anchor right after them."""
    block = torch.full((anchor.shape[0], BLOCK), MASK)
    block[:, 0] = anchor
    scale = float(published._draft_value(draft.config, "input_embedding_scale", 1.0))
    start = first + features.shape[1]
    hidden = draft(
        target_hidden=features,
        noise_embedding=published._raw_input_embeddings(target, block, scale),
        position_ids=torch.arange(first, start + BLOCK)[None],
        past_key_values=cache,
        use_cache=cache is not None,
    )
    if cache is not None:
        published._crop_to(cache, start)
    return hidden[:, 1:]


def train(draft, target, texts: torch.Tensor, steps: int) -> None:
    torch.manual_seed(5)
    features = features_of(target, texts, draft.target_layer_ids)
    optimiser = torch.optim.AdamW(draft.parameters(), lr=4e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    weight = torch.exp(-torch.arange(BLOCK - 1) / 4.0)
    for _ in range(steps):
        anchor = int(torch.randint(1, texts.shape[1] - BLOCK, ()))
        rows = torch.randint(0, texts.shape[0], (32,))
        logits = draft_logits(draft, target, None, features[rows, :anchor], 0, texts[rows, anchor])
        labels = texts[rows, anchor + 1 : anchor + BLOCK]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
        optimiser.zero_grad()
        (loss * weight).mean().backward()
        optimiser.step()
        schedule.step()
    print("  last loss by slot", [round(value, 2) for value in loss.mean(0).tolist()])


@torch.no_grad()
def rounds_of(draft, target, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    features = features_of(target, ids, draft.target_layer_ids)
    golden = {"ids": ids[0].int(), "features": features[0]}
    cache = None if isinstance(draft, MuseAssistant) else published._make_cache(draft.config)
    first = 0
    for number, count in enumerate(SPANS):
        end = first + count
        start = 0 if cache is None else first  # without a cache all features are given anew
        rows = draft_rows(draft, target, cache, features[:, start:end], start, ids[:, end])
        logits = draft.compute_logits(rows, published._output_head(target))
        whole = draft_logits(draft, target, None, features[:, :end], 0, ids[:, end])
        assert torch.allclose(logits, whole, atol=1e-4), (number, (logits - whole).abs().max())
        golden[f"round{number}.span"] = torch.tensor([first, end], dtype=torch.int32)
        golden[f"round{number}.anchor"] = ids[0, end : end + 1].int()
        golden[f"round{number}.logits"] = logits[0]
        if isinstance(draft, published.DFlash2DraftModel):
            path, _, _ = draft.propose(rows, ids[:, end], published._output_head(target), 0.0)
            golden[f"round{number}.tokens"] = path[0].int()
        first = end
    return {key: value.contiguous() for key, value in golden.items()}


def generations_of(draft, target, prompts: torch.Tensor) -> list[dict]:
    found = []
    for prompt in prompts:
        result = published.dflash_generate(draft, target, prompt[None], 80, None, return_stats=True)
        ids = result.output_ids[0].tolist()
        plain = target.generate(
            prompt[None], max_new_tokens=80, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert ids == plain[0].tolist()
        best = target(plain).logits[0, len(prompt) - 1 : -1].topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > 1e-3  # no tie that another order of sums could swap
        found.append(
            {
                "prompt": prompt.tolist(),
                "ids": ids[len(prompt) :],
                "tokens_per_round": result.acceptance_lengths,
            }
        )
        print("  tokens per round", result.acceptance_lengths)
    return found


def rotations() -> dict[str, dict]:
    made = {}
    for name, parameters in ROPES.items():
        config = Qwen3Config(head_dim=64, max_position_embeddings=262144, rope_parameters=parameters)
        rope = published.Qwen3RotaryEmbedding(config)
        frequencies = [float(f"{value:.8g}") for value in rope.inv_freq.tolist()]
        made[name] = {"parameters": parameters, "inv_freq": frequencies, "amplitude": rope.attention_scaling}
    return made


def main() -> None:
    torch.set_num_threads(1)
    published._cuda_time = time.perf_counter  # the published loop asks a GPU for the time
    (HERE / "ropes.json").write_text(json.dumps(rotations(), indent=1) + "\n")
    target = make_target()
    config = target.config.to_dict()
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    kept += ("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "attention_bias")
    config = {key: config[key] for key in kept}
    config |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rope_theta": 10000.0}
    config |= {"tie_word_embeddings": False, "eos_token_id": 0, "torch_dtype": "bfloat16"}
    save_model(HERE / "target", config, target)
    texts = texts_of(target, 256, 80)
    prompts = torch.randint(1, MASK, (3, 13), generator=torch.Generator().manual_seed(17))
    for name in DRAFTERS:
        print(name)
        draft = make_drafter(name)
        if name in GENERATING:
            train(draft, target, texts, 500)
            rounded(draft)
        save_model(HERE / name, {**BASE, **DRAFTERS[name]}, draft)
        save_file(rounds_of(draft, target, texts[:1, : sum(SPANS) + 1]), HERE / f"{name}.safetensors")
        if name in GENERATING:
            found = generations_of(draft, target, prompts)
            lines = ",\n".join(json.dumps(one) for one in found)
            (HERE / f"{name}.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
