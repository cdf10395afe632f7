"""A real network with a `draft_window`, over every family and with quantised keys: the text of plain decoding.

Its proposals come from features that the target gave, through a context that has lost its middle; a planned
drafter beside it overrules what is proposed, so that full, partial and no acceptance all happen.
"""

from collections.abc import Sequence

import mlx.core as mx
import pytest

from dflash_mlx.core import Proposal, SamplingParams
from dflash_mlx.drafter import DraftConfig, Drafter, DraftNetwork
from dflash_mlx.target import MLXTarget
from tests.families.support import (
    BLOCK,
    GREEDY,
    PROMPT,
    SAMPLED,
    decoder,
    family_of,
    first_fast,
    plain,
    run,
    tokens_of,
    truth_of,
)
from tests.families.test_kv_bits import REFUSED, wide
from tests.kit.families import FAMILIES, family
from tests.kit.models import VOCAB

WINDOW = 12  # of a prompt of 21 tokens and a text several times as long
TAPS = (0, 2)


class Overruled(Drafter):
    """Drafts as it does, and proposes the truth for `plan[i]` tokens of round i, then wrong ones."""

    def __init__(self, network: DraftNetwork, target: MLXTarget, truth: Sequence[int], plan: Sequence[int]):
        super().__init__(network, target)
        self._truth, self._plan, self._round = [*PROMPT, *truth], plan, 0
        self.drafts: list[mx.array] = []

    def propose(self, anchor: int, block_size: int) -> Proposal:
        place = self.context_length + 1
        drafted = self.logits(anchor, block_size)
        mx.eval(drafted)
        self.drafts.append(drafted)
        right, self._round = self._plan[self._round % len(self._plan)], self._round + 1
        true = (self._truth[place : place + block_size - 1] + [0] * block_size)[: block_size - 1]
        wrong = [(token + 1) % VOCAB for token in true]
        return Proposal(mx.array([*true[:right], *wrong[right:]]), mx.ones(block_size - 1))


def network_for(target: MLXTarget, draft_window: int | None) -> DraftNetwork:
    """One full and one sliding layer, made for this target."""
    config = {
        "architectures": ["DFlashDraftModel"],
        "hidden_size": target.hidden_size,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "rope_theta": 10000.0,
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 20,
        "block_size": BLOCK,
        "num_target_layers": target.num_layers,
        "dflash_config": {"mask_token_id": VOCAB - 1, "target_layer_ids": list(TAPS)},
    }
    mx.random.seed(4)
    network = DraftNetwork(
        DraftConfig.from_dict(config, name="drafter").with_draft_window(draft_window), name="d"
    )
    mx.eval(network.parameters())
    return network


def drafted(
    target: MLXTarget,
    truth: list[int],
    plan: list[int],
    params: SamplingParams,
    window: int | None,
    chunk: int,
) -> tuple[list[int], Overruled]:
    drafter = Overruled(network_for(target, window), target, truth, plan)
    made = decoder(target, drafter, params, len(truth), prefill_chunk=chunk)
    return tokens_of(run(made)), drafter


def assert_one_text(target: MLXTarget, truth: list[int], plan: list[int], params: SamplingParams) -> None:
    text, narrow = drafted(target, truth, plan, params, WINDOW, chunk=5)
    assert text == truth
    assert all(layer.visible <= WINDOW for layer in narrow._context.layers)
    assert narrow.context_length > 2 * WINDOW
    text, whole = drafted(target, truth, plan, params, None, chunk=64)
    assert text == truth
    assert len(whole.drafts) == len(narrow.drafts)
    assert not mx.allclose(mx.concatenate(whole.drafts), mx.concatenate(narrow.drafts)), "the window was felt"


@pytest.mark.parametrize("name", first_fast("qwen3_5", "gpt_oss"))
def test_a_drafter_with_a_window_gives_plain_text(name: str) -> None:
    assert_one_text(family_of(name), truth_of(name, SAMPLED, 40), [2, 7, 7, 0], SAMPLED)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan", [[0], [3], [7], [1, 7, 0, 5, 7, 7, 4, 6]], ids=["none", "part", "all", "mixed"]
)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", FAMILIES)
def test_in_every_family(name: str, params: SamplingParams, plan: list[int]) -> None:
    assert_one_text(family_of(name), truth_of(name, params, 60), plan, params)


def test_58_a_drafter_that_rounds_otherwise_changes_no_text() -> None:
    """What a drafter's rounding moves are proposals, and they decide nothing."""
    target, truth = family_of("qwen3"), truth_of("qwen3", SAMPLED, 40)
    drafts = []
    for dtype in (mx.float32, mx.bfloat16):
        network = network_for(target, None)
        network.set_dtype(dtype)
        drafter = Overruled(network, target, truth, [3, 7, 0])
        assert tokens_of(run(decoder(target, drafter, SAMPLED, len(truth)))) == truth
        drafts.append(mx.concatenate(drafter.drafts).astype(mx.float32))
    assert not mx.allclose(*drafts, rtol=1e-6)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", first_fast(*(name for name in FAMILIES if name not in REFUSED)))
def test_and_with_quantised_keys(name: str, bits: int) -> None:
    """`kv_bits` and `draft_window` together; plain decoding with the same `kv_bits`."""
    target = family(name, kv_bits=bits, **wide(name))
    assert_one_text(target, plain(target, SAMPLED, 40), [3, 7, 7, 0], SAMPLED)
