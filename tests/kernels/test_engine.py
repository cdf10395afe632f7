"""The engine with the kernels in place, the emulator's or Metal's, held to what the references give.

The drafter is a real one whose proposals a plan replaces: its kernels run, and acceptance is known.
"""

import pickle
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from tests import metal_emulator as emulator
from tests.drafter.toys import toy_network
from tests.kit.families import FAMILIES, family
from tests.kit.models import VOCAB, tiny_target
from tests.kit.planned import PlannedDrafter
from tests.loading.checkpoints import write_draft, write_target
from tests.metal_emulator.support import require

from dflash_mlx import DFlashGenerator, tuning
from dflash_mlx.core import Cut, Proposal, SamplingParams
from dflash_mlx.decoding import Decoder, Meter
from dflash_mlx.drafter import Drafter, DraftNetwork
from dflash_mlx.drafter import kernels as draft_kernels
from dflash_mlx.errors import UsageError
from dflash_mlx.kernels.attention import cached_block_attention
from dflash_mlx.kernels.choice import NO_KERNELS, Choices, Chooser
from dflash_mlx.kernels.verdicts import Machine
from dflash_mlx.policy import WholeBlock
from dflash_mlx.sampling import Sampler
from dflash_mlx.target import MLXTarget, plain_tokens

PROMPT = [5, 9, 100, 7, 3, 20, 4, 88, 61, 2, 14]
BLOCK = 8
PLAN = (2, 7, 0, 4)
GREEDY = SamplingParams(seed=1)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, top_k=40, seed=11)
PENALISED = SamplingParams(repetition_penalty=1.3, seed=5)
HERE = Machine("chip", "system", "mlx")
TARGET_KERNELS = {"block_attention causal", "rows_qmm"}
DRAFT_KERNELS = {"block_attention full", "context_rows"}
WALK = {"greedy_walk_rows", "greedy_walk"}


def emulated():
    require()
    return emulator.factory(mode="fast", seed=0)


def metal():
    return mx.fast.metal_kernel


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(emulated, id="emulator"),
        pytest.param(
            metal,
            id="metal",
            marks=[
                pytest.mark.metal,
                pytest.mark.skipif(not mx.metal.is_available(), reason="needs a Metal device"),
            ],
        ),
    ],
)
def factory(request):
    return request.param()


class Counting:
    """A factory whose launches are counted by kernel, and block attention by what its rows see."""

    def __init__(self, factory):
        self.launches: Counter[str] = Counter()
        self._factory = factory

    def __call__(self, *, name: str, **rest):
        kernel = self._factory(name=name, **rest)
        short = name.rsplit("_", 1)[0].removesuffix("_matrix").removesuffix("_vector")

        def launch(*, template=None, **call):
            mode = dict(template or []).get("MODE")
            self.launches[short if mode is None else f"{short} {('full', 'causal')[mode]}"] += 1
            return kernel(template=template, **call)

        return launch


def spoiling(spoilt: str, factory):
    """A factory whose kernels of one name give something else."""

    def make(*, name: str, **rest):
        kernel = factory(name=name, **rest)
        if not name.startswith(spoilt):
            return kernel
        return lambda **call: [out + mx.array(3, out.dtype) for out in kernel(**call)]

    return make


def quantised(kind: str = "qwen3", **changes) -> MLXTarget:
    target = unquantised(kind, **changes)
    nn.quantize(target.model, group_size=32, bits=4)
    return MLXTarget(target.model, target.config, "tiny-quantised")


def unquantised(kind: str = "qwen3", **changes) -> MLXTarget:
    return tiny_target(kind, **{"head_dim": 64, "num_hidden_layers": 3, **changes})


def network(**changes) -> DraftNetwork:
    shape = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "head_dim": 64,
        "num_attention_heads": 2,  # not the target's: its classes are the drafter's own
        "num_key_value_heads": 1,
        "vocab_size": VOCAB,
        "block_size": BLOCK,
        "num_target_layers": None,
        "dflash_config": {"mask_token_id": VOCAB - 1, "target_layer_ids": [0, 2]},
    }
    return toy_network(**{**shape, **changes})


@dataclass
class Engine:
    """A pair, and how it decodes with the references and with the kernels that were tuned for it."""

    target: MLXTarget
    network: DraftNetwork
    choices: Choices = NO_KERNELS

    def tune(self, factory) -> tuple[str, ...]:
        chooser = Chooser(None, mode="on", factory=factory, machine=HERE)
        self.choices, notes = tuning.tune(self.target, self.network, block_size=BLOCK, chooser=chooser)
        return notes

    def use(self, choices: Choices) -> tuple[str | None, str | None]:
        self.choices = choices
        return self.target.use(choices), draft_kernels.use(self.network, choices, block_size=BLOCK)

    def truth(self, params: SamplingParams, budget: int) -> list[int]:
        """mlx-lm's own loop."""
        sampler = Sampler(params)
        options = {"draw": sampler.draw, "draw_whole": sampler.draw_whole, "prefill_chunk": 4}
        return list(plain_tokens(self.target, PROMPT, max_new_tokens=budget, **options))

    def decode(self, params: SamplingParams, budget: int, truth: Sequence[int]) -> "Run":
        planned = PlannedDrafter([*PROMPT, *truth], PLAN, vocab_size=VOCAB, block_size=BLOCK)
        drafter = Watched(Drafter(self.network, self.target), planned)
        seen: list[int] = []

        def cut(tokens: Sequence[int]) -> Cut:
            keep = min(len(tokens), budget - len(seen))
            seen.extend(tokens[:keep])
            return Cut(keep, "length" if len(seen) == budget else None)

        decoder = Decoder(
            target=self.target,
            cache=self.target.make_cache(),
            drafter=drafter,
            sampler=Sampler(params, choices=self.choices),
            cut=cut,
            policy=WholeBlock(),
            max_new_tokens=budget,
            block_size=BLOCK,
            prefill_chunk=4,
            meter=Meter(),
            ids=[],
        )
        for _ in decoder.prefill(PROMPT):
            pass
        rounds = list(decoder.rounds())
        features = mx.concatenate(planned.features)
        mx.eval(features)
        tokens = [token for round_ in rounds for token in round_.tokens]
        return Run(tokens, [round_.accepted for round_ in rounds[1:]], drafter.drafts, features)


@dataclass
class Watched:
    """A real drafter, whose logits are kept, under a plan that says how many of its tokens are right."""

    real: Drafter
    plan: PlannedDrafter
    drafts: list[mx.array] = field(default_factory=list)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.real.taps

    @property
    def context_length(self) -> int:
        return self.real.context_length

    def inject(self, features: mx.array, keep: int) -> None:
        self.real.inject(features, keep)
        self.plan.inject(features, keep)

    def see(self, text):
        pass

    def settle(self) -> None:
        self.real.settle()

    def propose(self, anchor: int, block_size: int) -> Proposal:
        self.drafts.append(self.real.logits(anchor, block_size))
        mx.eval(self.drafts[-1])
        return self.plan.propose(anchor, block_size)


@dataclass
class Run:
    """What one generation did."""

    tokens: list[int]
    accepted: list[int]
    drafts: list[mx.array]
    features: mx.array


def _taps(*layers: int) -> dict:
    return {"mask_token_id": VOCAB - 1, "target_layer_ids": list(layers)}


def _slow(*values: str) -> list:
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def close(a: mx.array, b: mx.array, bound: float = 1e-3) -> bool:
    return bool((mx.abs(a - b).max() <= bound * mx.abs(a).max()).item())


def check(engine: Engine, factory, params: SamplingParams, *, budget: int = 24) -> set[str]:
    """A generation with the references, then one with the kernels: the kernels that ran in it."""
    truth = engine.truth(params, budget + BLOCK)
    expected = engine.decode(params, budget, truth)
    counting = Counting(factory)
    assert engine.tune(counting) == ()
    counting.launches.clear()
    got = engine.decode(params, budget, truth)
    assert got.tokens == expected.tokens == truth[:budget]
    assert got.accepted == expected.accepted and got.accepted[: len(PLAN)] == list(PLAN)
    assert close(expected.features, got.features)
    assert all(close(a, b) for a, b in zip(expected.drafts, got.drafts, strict=True))
    return set(counting.launches) - {"block_attention_merge"}


def traces(module: nn.Module) -> list[tuple[int, type, list[str]]]:
    """Class, attributes and items of every module."""
    return [(id(m), type(m), [*m.__dict__, *m.keys()]) for _, m in module.named_modules()]


# The same text.


def test_greedy_text_and_drafts_are_those_of_the_references(factory):
    engine = Engine(quantised(num_hidden_layers=2), network(dflash_config=_taps(0, 1)))
    ran = check(engine, factory, GREEDY, budget=18)
    assert ran == TARGET_KERNELS | DRAFT_KERNELS | WALK


@pytest.mark.slow
def test_sampled_text_and_drafts_are_those_of_the_references(factory):
    ran = check(Engine(quantised(), network()), factory, SAMPLED)
    assert ran == TARGET_KERNELS | DRAFT_KERNELS


@pytest.mark.slow
def test_greedy_draws_with_a_penalty_do_not_take_the_walk(factory):
    assert not WALK & check(Engine(quantised(), network()), factory, PENALISED)


@pytest.mark.slow
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen2", "granite", "gemma2", "smollm3"])
def test_stock_models_run_their_own_forward_around_the_kernels(factory, kind, params):
    one_head = {"num_attention_heads": 1, "num_key_value_heads": 1} if kind in ("qwen2", "granite") else {}
    ran = check(Engine(unquantised(kind, **one_head), network()), factory, params)
    # Gemma 2 computes its capped scores itself.
    assert ("block_attention causal" in ran) == (kind != "gemma2") and "rows_qmm" not in ran


@pytest.mark.slow
def test_a_tied_head_and_a_quantised_drafter_take_the_product(factory):
    drafting = network()
    nn.quantize(drafting, group_size=32, bits=8)
    engine = Engine(quantised("qwen3-tied"), drafting)
    assert "rows_qmm" in check(engine, factory, GREEDY)
    kinds = {type(layer).__name__ for layer in drafting.modules() if hasattr(type(layer), "stock_class")}
    assert kinds == {"QuantizedLinear"}
    assert hasattr(type(engine.target.model.model.embed_tokens), "stock_class")


@pytest.mark.slow
def test_the_experts_of_a_mixture_take_the_gathered_product(factory):
    """Eight rows of eight experts each are the fewest that mlx-lm sorts."""
    engine = Engine(quantised("qwen3_moe", num_experts=16, num_experts_per_tok=8), network())
    ran = check(engine, factory, GREEDY)
    classes = [name for kernel, name in engine.choices.chosen if kernel == "rows_qmm_gathered"]
    assert classes and all(name.startswith("m6-8 x8 of 16 ") for name in classes)
    assert ran == TARGET_KERNELS | DRAFT_KERNELS | WALK | {"rows_qmm_gathered"}


@pytest.mark.slow
def test_windows_yarn_and_causal_blocks_of_a_drafter(factory):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    drafting = network(
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=9,
        rope_scaling=yarn,
        max_position_embeddings=64,
    )
    ran = check(Engine(unquantised(), drafting), factory, GREEDY, budget=32)
    assert ran == (TARGET_KERNELS - {"rows_qmm"}) | DRAFT_KERNELS | WALK


def hybrid() -> MLXTarget:
    """Attention and delta rules in turn, heads as wide as the kernels want them."""
    return family("qwen3_5", head_dim=64, linear_key_head_dim=32)


def test_a_delta_rule_is_run_again_by_its_kernel(factory):
    """Two of three rounds keep a part of their rows; the text and what is tapped are those of mlx-lm's recurrence."""
    engine = Engine(hybrid(), network(num_hidden_layers=1, dflash_config=_taps(0, 1)))
    ran = check(engine, factory, SAMPLED, budget=18)
    assert {"delta_replay", "block_attention causal"} <= ran
    classes = {name for kernel, name in engine.choices.chosen if kernel == "delta_replay"}
    assert {name.split()[0] for name in classes} == {"t2-2", "t3-4", "t5-8"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear", "olmo_hybrid"])
def test_every_family_of_delta_rules_takes_it(factory, name):
    """Qwen's gates are one number a head, Kimi's one a value; OLMo's beta goes up to two."""
    widths = {
        "kimi_linear": {
            "linear_attn_config": {**FAMILIES["kimi_linear"]["linear_attn_config"], "head_dim": 32}
        },
        "qwen3_next": {"linear_key_head_dim": 32},
        "olmo_hybrid": {"linear_key_head_dim": 32},
    }
    engine = Engine(family(name, **widths[name]), network(num_hidden_layers=1, dflash_config=_taps(0, 1)))
    assert "delta_replay" in check(engine, factory, GREEDY)


def test_two_threads_share_a_target_with_kernels(factory):
    engine = Engine(unquantised(num_hidden_layers=2), network(dflash_config=_taps(0, 1)))
    truths = {params: engine.truth(params, 30) for params in (GREEDY, SAMPLED)}
    assert engine.tune(factory) == ()
    got: dict[SamplingParams, list[int]] = {}

    def answer(params: SamplingParams) -> None:
        got[params] = engine.decode(params, 16, truths[params]).tokens

    threads = [threading.Thread(target=answer, args=[params]) for params in truths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {params: truth[:16] for params, truth in truths.items()}


# Nothing is left behind.


def test_the_model_keeps_its_tree_its_names_and_its_classes(factory):
    engine = Engine(quantised(num_hidden_layers=2), network(dflash_config=_taps(0, 1)))
    bystander = quantised(num_hidden_layers=1)
    stock, stranger = traces(engine.target.model), traces(bystander.model)
    names = [name for name, _ in tree_flatten(engine.target.model.parameters())]
    calls = {kind: kind.__call__ for _, kind, _ in stock}
    drawing = repr(engine.target.model)
    assert engine.tune(factory) == ()
    given = traces(engine.target.model)
    assert [name for name, _ in tree_flatten(engine.target.model.parameters())] == names
    assert repr(engine.target.model) == drawing
    assert [(i, kept) for i, _, kept in given] == [(i, kept) for i, _, kept in stock]
    changed = {old for (_, old, _), (_, new, _) in zip(stock, given, strict=True) if old is not new}
    assert {kind.__name__ for kind in changed} == {"Attention", "QuantizedLinear", "QuantizedEmbedding"}
    assert traces(bystander.model) == stranger and all(kind.__call__ is call for kind, call in calls.items())
    engine.target.verify(mx.arange(4), engine.target.make_cache(), range(2))
    assert traces(engine.target.model) == given, "taps put back the classes that they found"
    copy = pickle.loads(pickle.dumps(engine.target.model.layers[0].self_attn.q_proj))
    assert (
        type(copy) is nn.QuantizedLinear
        and copy.keys() == engine.target.model.layers[0].self_attn.q_proj.keys()
    )
    engine.use(NO_KERNELS)
    assert traces(engine.target.model) == stock and engine.target.choices is NO_KERNELS
    assert engine.network.choices is NO_KERNELS


@pytest.mark.slow
def test_a_second_drafter_leaves_the_kernels_of_a_shared_target_alone(factory):
    target = unquantised(num_hidden_layers=2)
    first, second = (Engine(target, network(dflash_config=_taps(0, 1))) for _ in range(2))
    assert first.tune(factory) == ()
    given = traces(target.model)
    assert second.tune(factory) == ()
    assert traces(target.model) == given and target.choices is first.choices


@pytest.mark.slow
def test_trials_are_said_and_kept_for_the_next_run(factory, tmp_path):
    def tune():
        target, draft = unquantised(num_hidden_layers=1), network(num_hidden_layers=1, dflash_config=_taps(0))
        chooser = Chooser(tmp_path / "kernels.json", mode="on", factory=factory, machine=HERE)
        return tuning.tune(target, draft, block_size=BLOCK, chooser=chooser)

    first, second = tune(), tune()
    assert len(first.notes) == 1 and f"in {tmp_path / 'kernels.json'}" in first.notes[0]
    assert second.notes == () and second.choices == first.choices


# Wrong ones are refused.


@pytest.mark.parametrize("spoilt", ["rows_qmm", *_slow("block_attention", "context_rows", "greedy_walk")])
def test_a_wrong_kernel_is_refused_aloud(factory, spoilt):
    engine = Engine(quantised(num_hidden_layers=1), network(num_hidden_layers=1, dflash_config=_taps(0)))
    notes = engine.tune(spoiling(spoilt, factory))
    assert notes and all(f"The kernel {spoilt} gives a wrong result" in note for note in notes)
    assert spoilt not in str(engine.choices) and str(engine.choices) != "stock"


def test_a_wrong_replay_is_refused_aloud_and_none_is_run(factory):
    engine = Engine(hybrid(), network(num_hidden_layers=1, dflash_config=_taps(0)))
    notes = engine.tune(spoiling("delta_replay", factory))
    assert any("The kernel delta_replay gives a wrong result" in note for note in notes)
    assert "delta_replay" not in str(engine.choices)


@pytest.mark.slow
def test_a_replay_in_a_wrong_place_is_seen_by_what_follows_it(factory):
    engine = Engine(hybrid(), network(num_hidden_layers=1, dflash_config=_taps(0)))
    assert engine.tune(factory) == ()
    alone = frozenset(choice for choice in engine.choices.chosen if choice[0] == "delta_replay")
    said, _ = engine.use(Choices(alone, spoiling("delta_replay", factory)))
    assert said is not None and "differs with the Metal kernels (off by" in said
    assert engine.target.choices is NO_KERNELS


@pytest.mark.parametrize("spoilt", ["block_attention", *_slow("rows_qmm")])
def test_a_forward_that_differs_is_refused_aloud(factory, spoilt):
    """Whatever the kernels did alone: they may have been put in a wrong place."""
    engine = Engine(quantised(num_hidden_layers=1), network(num_hidden_layers=1, dflash_config=_taps(0)))
    stock = traces(engine.target.model), traces(engine.network)
    assert engine.tune(factory) == ()
    wrong = Choices(engine.choices.chosen, spoiling(spoilt, factory))
    of_target, of_draft = engine.use(wrong)
    assert of_target is not None and "differs with the Metal kernels (off by" in of_target
    assert (of_draft is not None) == (spoilt == "block_attention")
    assert engine.target.choices is NO_KERNELS
    draft_kernels.restore(engine.network)
    assert (traces(engine.target.model), traces(engine.network)) == stock


@pytest.mark.slow
@pytest.mark.parametrize("half", ["target", "drafter"])
def test_one_half_that_is_refused_leaves_both_stock(factory, monkeypatch, half):
    engine = Engine(quantised(num_hidden_layers=1), network(num_hidden_layers=1, dflash_config=_taps(0)))
    stock = traces(engine.target.model), traces(engine.network)
    if half == "target":
        monkeypatch.setattr("dflash_mlx.target.kernels._attend_with", lambda _: lambda q, *_1, **_2: q + 1)
    else:
        monkeypatch.setattr("dflash_mlx.drafter.network.cached_block_attention", _off_with_kernels)
    notes = engine.tune(factory)
    said = {"target": "The forward of tiny-quantised differs", "drafter": "Drafts of toy differ"}
    assert len(notes) == 1 and said[half] in notes[0]
    assert engine.choices is engine.target.choices is engine.network.choices is NO_KERNELS
    assert (traces(engine.target.model), traces(engine.network)) == stock


@pytest.mark.slow
def test_a_second_drafter_that_is_refused_leaves_a_shared_target_alone(factory, monkeypatch):
    target = unquantised(num_hidden_layers=2)
    first, second = (Engine(target, network(dflash_config=_taps(0, 1))) for _ in range(2))
    assert first.tune(factory) == ()
    given = traces(target.model)
    monkeypatch.setattr("dflash_mlx.drafter.network.cached_block_attention", _off_with_kernels)
    assert "Drafts of toy differ" in second.tune(factory)[0] and second.choices is NO_KERNELS
    assert traces(target.model) == given and target.choices is first.choices


def _off_with_kernels(queries, keys, values, *, choices, **options):
    return queries if choices.chosen else cached_block_attention(queries, keys, values, **options)


# The generator.


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    return write_target(root / "target", eos_token_id=None), write_draft(root / "draft")


def test_the_generator_tunes_its_pair_and_says_what_runs(factory, folders, monkeypatch):
    with DFlashGenerator(*folders) as stock:
        expected = stock.generate("Say it.", max_new_tokens=20)
    counting = Counting(factory)
    monkeypatch.setattr(tuning, "chooser", lambda: Chooser(None, mode="on", factory=counting, machine=HERE))
    with DFlashGenerator(*folders) as made:
        counting.launches.clear()
        got = made.generate("Say it.", max_new_tokens=20)
    assert got.token_ids == expected.token_ids
    assert got.stats.kernels == "context_rows, greedy_walk", "its heads are too small for block attention"
    assert set(counting.launches) == {"context_rows"} | WALK
    assert set(got.stats.notes) == set(expected.stats.notes)


@pytest.mark.skipif(mx.metal.is_available(), reason="for machines without Metal")
def test_without_metal_the_stock_operations_run(folders, monkeypatch):
    monkeypatch.setenv("DFLASH_KERNELS", "on")
    with DFlashGenerator(*folders) as made:
        result = made.generate("Say it.", max_new_tokens=4)
        assert made.target.model.choices is NO_KERNELS
    assert result.stats.kernels == "quick exponentials"
    assert any("there is no Metal device here" in note for note in result.stats.notes)


@pytest.mark.skipif(mx.metal.is_available(), reason="for machines without Metal")
def test_on_a_cpu_a_generator_uses_quick_exponentials_unless_kernels_are_refused(folders, monkeypatch):
    for mode, expected in (("auto", "quick exponentials"), ("off", "stock")):
        monkeypatch.setenv("DFLASH_KERNELS", mode)
        with DFlashGenerator(folders[0], mode="off") as runner:
            assert runner.generate("Say it.", max_new_tokens=3, temperature=0.0).stats.kernels == expected
            assert runner.target.model.is_quick == (mode == "auto")


def test_a_setting_that_means_nothing_is_refused_before_anything_is_loaded(monkeypatch):
    monkeypatch.setenv("DFLASH_KERNELS", "fast")
    with pytest.raises(UsageError, match="DFLASH_KERNELS is 'fast'"):
        DFlashGenerator("/nowhere/at/all")
