"""Every format's network against the plain second reading, and through a file in the format's own names."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from dflash_mlx.drafter import DraftConfig, Drafter, DraftNetwork, load_draft, save_draft
from dflash_mlx.drafter.parts import Ends
from dflash_mlx.errors import CheckpointError, PairError, UnsupportedError
from tests.drafter.toys import (
    HIDDEN,
    MASK,
    VOCAB,
    ToyEnds,
    random_network,
    read_block,
    toy_config,
    toy_features,
)

WORDS = 24  # of a reduced head
SLIDING = ["sliding_attention"] * 2


def dflash2(**changes: Any) -> dict[str, Any]:
    numbers = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 6, "selector_top_k": 5}
    nested = {"mask_token_id": MASK, "target_layer_ids": [1, 3], "block_size": 6, **numbers, **changes}
    own = {"architectures": ["DFlash2DraftModel"], "is_causal": False, "dflash_config": nested}
    return toy_config(**own, layer_types=SLIDING, sliding_window=5)


def speculators(**changes: Any) -> dict[str, Any]:
    inner = toy_config(
        architectures=None, dflash_config=None, block_size=None, num_target_layers=None, layer_types=SLIDING
    )
    own = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "aux_hidden_state_layer_ids": [2, 4],
        "mask_token_id": MASK,
        "block_size": 6,
        "draft_vocab_size": WORDS,
        "transformer_layer_config": inner | {"sliding_window": 5},
    }
    return own | changes


def without_vocabulary() -> dict[str, Any]:
    config = speculators()
    inner = {key: value for key, value in config["transformer_layer_config"].items() if key != "vocab_size"}
    return config | {"transformer_layer_config": inner}


def dspark(**changes: Any) -> dict[str, Any]:
    own = {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": 5,
        "mask_token_id": MASK,
        "target_layer_ids": [1, 3],
        "dflash_config": None,
        "markov_rank": 6,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    return toy_config(**own | changes)


def muse() -> dict[str, Any]:
    own = {"architectures": ["MuseGlimmerAssistantModel"], "model_type": "muse_glimmer_assistant"}
    flat = {"dflash_config": None, "mask_token_id": MASK, "target_layer_ids": [1, 3]}
    return toy_config(**own, **flat, layer_types=SLIDING, sliding_window=5)


def laguna(**changes: Any) -> dict[str, Any]:
    nested = {"mask_token_id": MASK, "target_layer_ids": [1, 3], "block_size": 6, "causal": True}
    own = {"architectures": ["DFlashLagunaForCausalLM"], "model_type": "laguna", "gating": "per-head"}
    own |= {"draft_vocab_size": VOCAB, "dflash_config": nested, "layer_types": SLIDING, "sliding_window": 5}
    return toy_config(**own | changes)


OWN = Ends(embedding_rows=VOCAB, head_rows=VOCAB)
REDUCED = Ends(embedding_rows=VOCAB, head_rows=WORDS, offsets=True)
KINDS = {
    "dflash2": (dflash2(), Ends()),
    "dflash2 with three taps and fewer words": (
        dflash2(conv_kernel_size=3, selector_vocab_size=WORDS),
        Ends(),
    ),
    "speculators with the target's ends": (speculators(draft_vocab_size=VOCAB), Ends()),
    "speculators with fewer words": (speculators(), REDUCED),
    "speculators from the anchor": (
        speculators(sample_from_anchor=True, sliding_window_non_causal=True, block_size=5),
        REDUCED,
    ),
    "speculators dspark": (
        speculators(speculators_model_type="dspark", block_size=5, markov_rank=6)
        | {"enable_confidence_head": True, "confidence_head_with_markov": True},
        REDUCED,
    ),
    "speculators dspark after the anchor": (
        speculators(speculators_model_type="dspark", sample_from_anchor=False, markov_rank=6),
        REDUCED,
    ),
    "dspark with the target's ends": (dspark(), Ends()),
    "dspark with its own ends": (dspark(), OWN),
    "dspark without a Markov head": (dspark(markov_rank=0, confidence_head_with_markov=False), OWN),
    "deepspec": (dspark(markov_rank=0, enable_confidence_head=False, confidence_head_with_markov=None), OWN),
    "muse": (muse(), Ends()),
    "laguna": (laguna(), Ends()),
}


def network_of(kind: str) -> DraftNetwork:
    config, ends = KINDS[kind]
    network = random_network(config, ends=ends)
    if ends.offsets:  # draft id d is token 1.5 d, so that offsets differ and grow
        network.d2t = mx.array([d // 2 for d in range(WORDS)], dtype=mx.int32)
    return network


def stored(network: DraftNetwork, folder: Path, **more: mx.array | None) -> Path:
    """The network in a file with its format's own names; a tensor given as None is left out."""
    weights = dict(tree_flatten(network.parameters()))
    title = network.config.format.title
    if title == "Muse assistant":
        renamed = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
        weights = {renamed.get(key, key): value for key, value in weights.items()}
    if title == "Laguna":
        for layer in range(2):
            at = f"layers.{layer}.self_attn."
            three = [weights.pop(f"{at}{part}_proj.weight") for part in "qkv"]
            weights[f"{at}qkv_proj.weight"] = mx.concatenate(three)
    if "d2t" in weights:
        weights["d2t"] = weights["d2t"].astype(mx.int64)
        ids = (weights["d2t"] + mx.arange(WORDS)).tolist()
        weights["t2d"] = mx.array([token in ids for token in range(VOCAB)])
        weights["verifier_norm.weight"] = mx.ones((HIDDEN,))
    weights = {key: value for key, value in (weights | more).items() if value is not None}
    folder.mkdir(exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    json_to(folder / "config.json", dict(network.config.source))
    return folder


def json_to(path: Path, config: dict[str, Any]) -> None:
    path.write_text(json.dumps(config))


def drafted(network: DraftNetwork, *, count: int = 9, block: int | None = None):
    drafter = Drafter(network, ToyEnds())
    features = toy_features(count)
    drafter.inject(features[: count - 3], count - 3)
    drafter.settle()
    drafter.inject(features[count - 3 :], 3)
    before = drafter.snapshot()
    logits = drafter.logits(7, block or drafter.block_size)
    drafter.restore(before)
    return logits, drafter.propose(7, block or drafter.block_size)


@pytest.mark.parametrize("block", [2, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_a_block_is_what_the_plain_reading_of_its_format_gives(kind, block):
    """With the file's own embedding and head where its format uses them."""
    network = network_of(kind)
    assert network.config.block_size == 6
    logits, proposal = drafted(network, block=block)
    plain = read_block(network, ToyEnds(), toy_features(9), 7, block)
    assert logits.shape == plain.logits.shape == (block - 1, network.config.parts.ends.head_rows or VOCAB)
    assert np.abs(np.array(logits) - plain.logits).max() < 1e-4
    assert proposal.tokens.tolist() == plain.tokens
    assert proposal.tokens.dtype == mx.int32
    assert np.allclose(np.array(proposal.confidences), plain.confidences, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_in_the_names_of_its_format_drafts_the_same_and_so_does_what_is_saved_of_it(kind, tmp_path):
    network = network_of(kind)
    expected, proposal = drafted(network)
    loaded = load_draft(stored(network, tmp_path / "stored"), name="toy")
    assert mx.array_equal(drafted(loaded)[0], expected)
    save_draft(loaded, tmp_path / "saved")
    again, found = drafted(load_draft(tmp_path / "saved", name="toy"))
    assert mx.array_equal(again, expected)
    assert found.tokens.tolist() == proposal.tokens.tolist()
    assert mx.array_equal(found.confidences, proposal.confidences)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_counted_in_closed_form(kind):
    network = network_of(kind)
    counted = sum(
        a.size for _, a in tree_flatten(network.parameters()) if mx.issubdtype(a.dtype, mx.floating)
    )
    assert network.config.num_parameters() == counted


def test_layer_ids_of_speculators_count_from_the_embedding():
    config = DraftConfig.from_dict(speculators(aux_hidden_state_layer_ids=[0, 2, 5]), name="toy")
    assert config.target_layer_ids == (-1, 1, 4)


@pytest.mark.parametrize("non_causal", [False, True])
def test_sliding_layers_of_speculators_are_causal_unless_the_config_says_otherwise(non_causal):
    config = DraftConfig.from_dict(speculators(sliding_window_non_causal=non_causal), name="toy")
    assert [config.causal(layer) for layer in range(2)] == [not non_causal] * 2


def test_k_rows_of_dspark_draft_k_tokens():
    config = DraftConfig.from_dict(dspark(block_size=7), name="toy")
    assert config.block_size == 8  # its anchor and seven drafts


def test_layers_of_dspark_and_muse_see_the_whole_block():
    for config in (dspark(layer_types=SLIDING, sliding_window=5), muse()):
        read = DraftConfig.from_dict(config, name="toy")
        assert (read.causal(0), read.window(0)) == (False, 5)


def test_the_rotation_of_laguna_may_lie_below_its_only_type_of_layer():
    nested = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 123.0},
        "full_attention": {"rope_theta": 5.0},
    }
    config = laguna(rope_theta=None, rope_parameters=nested)
    assert DraftConfig.from_dict(config, name="toy").rope.theta == 123.0


@pytest.mark.parametrize(
    ("config", "error", "says"),
    [
        (dflash2(conv_kernel_size=None), CheckpointError, "no value for conv_kernel_size"),
        (dflash2(selector_top_k=0), CheckpointError, "0 for selector_top_k"),
        (dflash2(conv_group_size=3), CheckpointError, "groups of 3 channels, which do not divide .* 16"),
        (dflash2(markov_rank=4), UnsupportedError, "a DSpark drafter"),
        (speculators(transformer_layer_config=None), CheckpointError, "no transformer_layer_config"),
        (speculators(transformer_layer_config={"model_type": "llama"}), UnsupportedError, "'llama' layers"),
        (
            speculators(transformer_layer_config={"hidden_size": 16}),
            CheckpointError,
            "no value for intermediate_size",
        ),
        (without_vocabulary(), CheckpointError, "no value for vocab_size"),
        (speculators(target_hidden_size=32), UnsupportedError, r"another width \(32\)"),
        (speculators(aux_hidden_state_layer_ids=None), CheckpointError, "no aux_hidden_state_layer_ids"),
        (speculators(aux_hidden_state_layer_ids=[-1, 3]), CheckpointError, "layer id -1 in aux_hidden"),
        (speculators(mask_token_id=None), CheckpointError, "no value for mask_token_id"),
        (speculators(projector_type="domino"), UnsupportedError, "projector_type is 'domino'"),
        (speculators(speculators_model_type="dflash2"), UnsupportedError, "of type 'dflash2'"),
        (speculators(markov_rank=6), UnsupportedError, "a DSpark drafter"),
        (dspark(markov_head_type="gated"), UnsupportedError, "Markov head of type 'gated'"),
        (dspark(markov_rank=0), CheckpointError, "reads its Markov head, but has no markov_rank"),
        (dspark(draft_vocab_size=WORDS), UnsupportedError, r"vocabulary of its own \(24\)"),
        (dspark(sample_from_anchor=False), UnsupportedError, "anchor slot does not predict"),
        (dspark(conv_kernel_size=2), UnsupportedError, "second-generation|convolutions"),
        (dspark(target_layer_ids=[-2, 3]), CheckpointError, "id -2"),
        (laguna(gating="per-element"), UnsupportedError, "gating 'per-element'"),
        (laguna(sliding_windows=[5, 9]), UnsupportedError, r"the windows \[5, 9\]"),
        (laguna(num_experts=8), UnsupportedError, "8 experts"),
        (laguna(draft_vocab_size=WORDS), UnsupportedError, r"vocabulary of its own \(24\)"),
    ],
)
def test_what_a_format_cannot_mean_is_refused_by_name(config, error, says):
    with pytest.raises(error, match=rf"toy.*{says}"):
        DraftConfig.from_dict(config, name="toy")


@pytest.mark.parametrize(
    ("kind", "changed", "says"),
    [
        ("speculators with fewer words", {"d2t": None}, "24 tokens by its config, .* 24 rows and no d2t"),
        ("speculators with fewer words", {"lm_head.weight": None}, "its head has no rows of its own"),
        (
            "speculators with fewer words",
            {"d2t": mx.zeros((7,), mx.int64)},
            r"d2t with shape \[7\], .* 24 rows",
        ),
        ("speculators with fewer words", {"d2t": -mx.arange(WORDS)}, "does not lead to 24 different tokens"),
        (
            "speculators with fewer words",
            {"t2d": mx.ones((VOCAB,), mx.bool_)},
            "does not lead to 24 different",
        ),
        (
            "laguna",
            {"layers.0.self_attn.qkv_proj.weight": mx.zeros((60, HIDDEN))},
            "qkv_proj.weight with 60 rows",
        ),
        ("laguna", {"layers.1.self_attn.g_proj.weight": None}, "lacks the tensor layers.1.self_attn.g_proj"),
        ("laguna", {"aux_hidden_norms.1.weight": None}, "lacks the tensor aux_hidden_norms.1"),
        ("muse", {"fc.weight": mx.zeros((HIDDEN, 32))}, "the tensor fc.weight twice"),
        ("dflash2", {"candidate_selector.successor_codebook": mx.zeros((9, 6))}, r"\[9, 6\], .* \[40, 6\]"),
        ("dspark with its own ends", {"confidence_head.proj.bias": None}, "lacks the tensor confidence_head"),
        (
            "dspark with its own ends",
            {"markov_head.gate": mx.zeros((3,))},
            "holds the tensor markov_head.gate",
        ),
    ],
)
def test_tensors_that_contradict_the_format_are_refused_by_name(kind, changed, says, tmp_path):
    folder = stored(network_of(kind), tmp_path / "toy", **changed)
    with pytest.raises(CheckpointError, match=f"toy .*{says}"):
        load_draft(folder, name="toy")


@pytest.mark.parametrize("kind", ["dflash2", "muse", "laguna"])
def test_an_embedding_is_refused_where_the_format_has_none(kind, tmp_path):
    folder = stored(network_of(kind), tmp_path / "toy", **{"embed_tokens.weight": mx.zeros((VOCAB, HIDDEN))})
    with pytest.raises(UnsupportedError, match=r"toy carries its own embed_tokens\.weight"):
        load_draft(folder, name="toy")


def test_ids_stay_inside_both_vocabularies():
    network = random_network(dspark(vocab_size=VOCAB + 8), ends=Ends(VOCAB + 8, VOCAB + 8))
    network.lm_head.weight[VOCAB:] = (
        10 * network.lm_head.weight[:8]
    )  # what the target has no rows for would win
    logits, proposal = drafted(network)
    assert logits.shape[-1] == VOCAB
    assert max(proposal.tokens.tolist()) < VOCAB
    narrow = random_network(dspark(vocab_size=WORDS, mask_token_id=1), ends=Ends(WORDS, WORDS))
    drafter = Drafter(narrow, ToyEnds())
    last = drafter.propose(WORDS - 1, 6).tokens.tolist()
    assert drafter.propose(VOCAB - 1, 6).tokens.tolist() == last  # an anchor beyond the embedding


def test_a_head_whose_offsets_leave_the_target_s_vocabulary_is_refused():
    network = network_of("speculators with fewer words")
    network.d2t = mx.array([0] * (WORDS - 1) + [VOCAB - WORDS + 1])
    with pytest.raises(PairError, match=f"drafts token {VOCAB}, but toy target has only {VOCAB} tokens"):
        Drafter(network, ToyEnds())


@pytest.mark.parametrize("kind", ["dspark with its own ends", "dspark with the target's ends"])
def test_a_head_of_its_own_is_capped_whatever_the_target_does(kind):
    config, ends = KINDS[kind]
    network = random_network(config | {"final_logit_softcapping": 3.0}, ends=ends)
    own, capping = ToyEnds(), ToyEnds(logit_softcap=3.0)  # the second says that its head caps, and does not
    largest = [mx.abs(Drafter(network, target).logits(1, 6)).max().item() for target in (own, capping)]
    assert largest[0] < 3.0
    assert (largest[1] < 3.0) == (ends == OWN)
