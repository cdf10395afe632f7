"""The published PyTorch implementation's values, on tiny weights; `tests/golden/make_golden.py` made them."""

import json
from pathlib import Path

import mlx.core as mx
import pytest

from dflash_mlx.drafter import Drafter, load_draft
from dflash_mlx.target import MLXTarget, load_target

GOLDEN = Path(__file__).parent.parent / "golden"
NAMES = ("full", "sliding", "yarn", "causal", "dflash2", "muse")


@pytest.fixture(scope="module")
def target() -> MLXTarget:
    return load_target(GOLDEN / "target", dtype=mx.float32, name="tiny target")


def drafter_of(name: str, target: MLXTarget) -> Drafter:
    return Drafter(load_draft(GOLDEN / name, name=name, dtype=mx.float32), target)


def far(ours: mx.array, golden: mx.array) -> float:
    assert ours.shape == golden.shape
    return mx.abs(ours - golden).max().item()


@pytest.mark.parametrize("name", NAMES)
def test_features_are_the_outputs_of_the_tapped_layers_in_the_config_s_order(name, target):
    golden = mx.load(str(GOLDEN / f"{name}.safetensors"))
    taps = drafter_of(name, target).taps
    ours = target.verify(golden["ids"], target.make_cache(), taps).features
    assert far(ours, golden["features"]) < 1e-4


def test_a_tap_of_minus_one_is_what_enters_the_first_layer(target):
    ids = mx.load(str(GOLDEN / "full.safetensors"))["ids"]
    both = target.verify(ids, target.make_cache(), (-1, 2, 0)).features
    expected = [target.embed(ids), target.verify(ids, target.make_cache(), (2, 0)).features]
    assert mx.array_equal(both, mx.concatenate(expected, axis=-1))


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_every_round_are_the_published_ones(name, target):
    golden = mx.load(str(GOLDEN / f"{name}.safetensors"))
    drafter = drafter_of(name, target)
    rounds = [key for key in golden if key.endswith(".span")]
    assert len(rounds) > 5
    for number in range(len(rounds)):
        first, end = golden[f"round{number}.span"].tolist()
        anchor = golden[f"round{number}.anchor"].item()
        before = drafter.snapshot()
        drafter.inject(golden["features"][first:end], end - first)
        logits = drafter.logits(anchor, 8)
        assert far(logits, golden[f"round{number}.logits"]) < 2e-5, number
        drafter.restore(before)
        drafter.inject(golden["features"][first:end], end - first)
        path = golden.get(f"round{number}.tokens", mx.argmax(logits, axis=-1))
        assert drafter.propose(anchor, 8).tokens.tolist() == path.tolist()
        assert drafter.context_length == end


def test_the_selector_s_path_is_not_always_that_of_the_best_logits():
    golden = mx.load(str(GOLDEN / "dflash2.safetensors"))
    rounds = [key.removesuffix(".tokens") for key in golden if key.endswith(".tokens")]
    best = [mx.argmax(golden[f"{key}.logits"], axis=-1).tolist() for key in rounds]
    assert sum(golden[f"{key}.tokens"].tolist() != row for key, row in zip(rounds, best, strict=True)) >= 4


@pytest.mark.parametrize("name", ["full", "sliding", "dflash2"])
def test_a_greedy_generation_has_the_published_ids_and_acceptance(name, target):
    drafter = drafter_of(name, target)
    empty = drafter.snapshot()
    every = json.loads((GOLDEN / f"{name}.json").read_text())
    for golden in every[:1] if name == "dflash2" else every:  # its others accept little and take long
        drafter.restore(empty)
        ids, rounds = generate(target, drafter, golden["prompt"], len(golden["ids"]))
        assert ids == golden["ids"]
        assert rounds == golden["tokens_per_round"]


def speculators_of(name: str, target: MLXTarget, words: list[int]) -> tuple[dict, dict]:
    """A published drafter as vLLM's speculators would store it, with the target's embedding and some of its head."""
    config = json.loads((GOLDEN / name / "config.json").read_text())
    nested = config.pop("dflash_config")
    ids = [layer + 1 for layer in nested["target_layer_ids"]]
    top = {"mask_token_id": 63, "block_size": 8, "draft_vocab_size": len(words)}
    top |= {"speculators_model_type": "dflash", "aux_hidden_state_layer_ids": ids}
    ends = {"embed_tokens.weight": target.model.model.embed_tokens.weight}
    ends["lm_head.weight"] = target.model.lm_head.weight[mx.array(words)]
    if len(words) < 64:
        ends["d2t"] = (mx.array(words) - mx.arange(len(words))).astype(mx.int64)
    return top | {"transformer_layer_config": config}, ends


def muse_of(name: str, target: MLXTarget) -> tuple[dict, dict]:
    config = json.loads((GOLDEN / name / "config.json").read_text())
    del config["is_causal"]
    return config | {
        "architectures": ["MuseGlimmerAssistantModel"],
        "model_type": "muse_glimmer_assistant",
    }, {}


def dspark_of(name: str, target: MLXTarget) -> tuple[dict, dict]:
    config = json.loads((GOLDEN / name / "config.json").read_text())
    flat = config.pop("dflash_config") | {"markov_rank": 0, "enable_confidence_head": False}
    return config | flat | {"architectures": ["Qwen3DSparkModel"], "block_size": 8}, {}


def laid_out(folder: Path, name: str, config: dict, ends: dict, **renamed: str) -> Path:
    weights = {
        renamed.get(key, key): value
        for key, value in mx.load(str(GOLDEN / name / "model.safetensors")).items()
    }
    mx.save_safetensors(str(folder / "model.safetensors"), weights | ends)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


MUSE_NAMES = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
SOME_WORDS = [word for word in range(64) if word % 3]


@pytest.mark.parametrize(
    ("name", "layout", "words"),
    [
        ("full", speculators_of, None),
        ("sliding", speculators_of, None),
        ("sliding", speculators_of, SOME_WORDS),
        ("yarn", muse_of, None),
        ("full", dspark_of, None),
    ],
)
def test_a_published_drafter_in_another_layout_gives_the_published_logits(
    name, layout, words, target, tmp_path
):
    more = (words or list(range(64)),) if layout is speculators_of else ()
    config, ends = layout(name, target, *more)
    folder = laid_out(tmp_path, name, config, ends, **(MUSE_NAMES if layout is muse_of else {}))
    drafter = Drafter(load_draft(folder, name=name, dtype=mx.float32), target)
    golden = mx.load(str(GOLDEN / f"{name}.safetensors"))
    for number in range(4):
        first, end = golden[f"round{number}.span"].tolist()
        anchor = golden[f"round{number}.anchor"].item()
        before = drafter.snapshot()
        drafter.inject(golden["features"][first:end], end - first)
        logits = drafter.logits(anchor, drafter.block_size)
        published = golden[f"round{number}.logits"]
        if words:
            published = published[:, mx.array(words)]
        if layout is dspark_of:
            assert drafter.block_size == 9 and logits.shape[0] == 8  # the anchor's slot predicts too
            logits = logits[1:]
        assert far(logits, published) < 2e-5
        drafter.restore(before)
        drafter.inject(golden["features"][first:end], end - first)
        best = mx.argmax(published, axis=-1)
        tokens = drafter.propose(anchor, drafter.block_size).tokens[-len(best) :]
        assert tokens.tolist() == (mx.array(words)[best] if words else best).tolist()


@pytest.mark.parametrize("words", [list(range(64)), SOME_WORDS])
def test_a_generation_through_speculators_has_the_published_ids(words, target, tmp_path):
    folder = laid_out(tmp_path, "full", *speculators_of("full", target, words))
    drafter = Drafter(load_draft(folder, name="full", dtype=mx.float32), target)
    golden = json.loads((GOLDEN / "full.json").read_text())[0]
    ids, rounds = generate(target, drafter, golden["prompt"], len(golden["ids"]))
    assert ids == golden["ids"]
    assert len(words) < 64 or rounds == golden["tokens_per_round"]
    assert len(rounds) < len(ids)  # some was accepted


def generate(target, drafter, prompt, count):
    """The method with nothing around it: greedy, whole blocks, the last ones cut to the budget."""
    cache = target.make_cache()
    whole = target.verify(mx.array(prompt), cache, drafter.taps)
    drafter.inject(whole.features, len(prompt))
    ids, rounds = [mx.argmax(whole.logits[-1]).item()], []
    while len(ids) < count:
        block = min(drafter.block_size, count - len(ids) + 1)
        drafted = drafter.propose(ids[-1], block).tokens.tolist() if block > 1 else []
        seen = target.verify(mx.array([ids[-1], *drafted]), cache, drafter.taps)
        drawn = mx.argmax(seen.logits, axis=-1).tolist()
        accepted = next((i for i, token in enumerate(drafted) if token != drawn[i]), len(drafted))
        produced = min(accepted + 1, count - len(ids))
        ids += drawn[:produced]
        rounds.append(produced)
        target.commit(cache, seen.tape, produced)
        drafter.inject(seen.features, produced)
    return ids, rounds
