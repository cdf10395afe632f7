"""Causes of poor acceptance, each planted and each found: the pair is real, what it accepts is by a rule."""

from contextlib import contextmanager
from dataclasses import replace

import mlx.core as mx
import pytest

from dflash_mlx import DFlashGenerator
from dflash_mlx.bench import diagnosis
from dflash_mlx.bench.conditions import conditions
from dflash_mlx.bench.diagnosis import Acceptance, diagnose, finding, shape, tokens
from dflash_mlx.bench.prompts import Question
from dflash_mlx.bench.subject import Pair
from dflash_mlx.bench.summary import Position
from tests.bench.made import answer
from tests.loading.checkpoints import write_draft, write_target

OPTIONS = {"max_new_tokens": 40, "seed": 7}
QUESTIONS = [Question(kind, f"{kind} {n}") for kind in ("code", "prose") for n in range(3)]
GOOD, POOR = [7, 7, 5, 7, 3, 6] * 2, [1, 0, 2, 1] * 3


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    target = write_target(root / "target", eos_token_id=None, max_position_embeddings=4096)
    with DFlashGenerator(target, write_draft(root / "draft"), mode="on") as made:
        yield made.engine


@pytest.fixture
def planted(monkeypatch, engine):
    """Diagnose a pair that accepts well only where `is_good(engine, prompt, options)`."""

    def run(is_good, *, options=OPTIONS, loading=None, engine=engine, again=None, questions=QUESTIONS):
        class RuledPair:
            def __init__(self, engine):
                self.engine = engine

            def count(self, prompt):
                return len(prompt)

            def trial(self, prompt, *, policy, **options):
                most = policy.plan(depth=0, most=99).verify
                right = GOOD if is_good(self.engine, prompt, options) else POOR
                return answer(1.0, accepted=[min(n, most) for n in right], verified=[most] * len(right))

        monkeypatch.setattr(diagnosis, "Pair", RuledPair)
        return diagnose(
            RuledPair(engine),
            questions,
            options=options,
            loading=loading or {},
            again=again,
            tell=lambda _: None,
        )

    return run


def taps(engine):
    return engine.pair.draft.config.target_layer_ids


def test_a_sound_pair_is_said_to_be_sound(planted):
    found = planted(lambda *_: True)
    assert {f.evidence for f in found.findings} == {"none"}
    assert found.conclusion.startswith("Nothing that was tried would raise acceptance clearly")
    assert found.shape.startswith("Acceptance falls evenly")
    assert [(row.kind, row.answers, row.rounds) for row in found.by_class] == [
        ("code", 3, 36),
        ("prose", 3, 36),
        ("all", 6, 72),
    ]


def test_layer_ids_that_are_off_by_one_are_found(planted, engine):
    """The tiny drafter taps layers 1 and 2; one that was trained on 2 and 3 is right only when they are tapped."""
    assert taps(engine) == (1, 2)
    found = planted(lambda engine, *_: taps(engine) == (2, 3))
    first, *others = found.findings
    assert (first.what, first.instead, first.evidence) == ("layers +1", "2 3", "clear")
    assert {f.evidence for f in others} == {"none"}
    assert found.conclusion.startswith("Likeliest: the drafter's layer ids are off by one")
    assert "set target_layer_ids to 2 3" in found.conclusion
    assert taps(engine) == (1, 2), "the pair itself is left as it was"


def test_layers_beyond_the_target_are_not_tried(engine, planted):
    shallow = replace(engine, pair=replace(engine.pair, draft=_with_taps(engine, (0, 3))))
    tried, untried = conditions(shallow, OPTIONS, {})
    assert not [c for c in tried if c.what.startswith("layers")]
    assert [(u.what, u.why) for u in untried if u.what.startswith("layers")] == [
        ("layers -1", "the target has layers 0 to 3"),
        ("layers +1", "the target has layers 0 to 3"),
    ]


def _with_taps(engine, ids):
    import copy

    network = copy.copy(engine.pair.draft)
    network.config = replace(network.config, target_layer_ids=ids)
    return network


@pytest.mark.parametrize(
    ("given", "is_good", "what", "advice"),
    [
        ({"think": True}, lambda _e, _p, o: not o.get("think"), "thinking", "--no-think"),
        ({}, lambda _e, _p, o: o.get("think"), "thinking", "--think"),
        ({}, lambda _e, _p, o: o.get("raw"), "template", "look at the tokenizer's chat template"),
        ({"raw": True}, lambda _e, _p, o: not o.get("raw"), "template", "leave out --raw"),
        ({"system": "x"}, lambda _e, _p, o: o.get("system") is None, "system message", "shorten"),
        ({"temperature": 0.9}, lambda _e, _p, o: o.get("temperature") == 0, "temperature", "lower --temperature"),
        ({}, lambda e, _p, _o: e.block_size == 4, "block size", "--block-size 4"),
        ({}, lambda _e, p, _o: len(p) > 500, "long prompt", "nothing"),
    ],
)  # fmt: skip
def test_each_planted_fault_is_found_and_ranked_first(planted, given, is_good, what, advice):
    found = planted(is_good, options={**OPTIONS, **given})
    assert (found.findings[0].what, found.findings[0].evidence) == (what, "clear")
    assert found.findings[0].advice.startswith(advice) and advice in found.conclusion
    assert {f.evidence for f in found.findings[1:]} == {"none"}


def test_what_was_given_for_loading_is_taken_back_and_let_go(planted, engine):
    log = []

    @contextmanager
    def again(changes, whole):
        log.append((dict(changes), whole))
        yield replace(engine, load_peak_gb=-1.0)
        log.append("closed")

    loading = {"draft_bits": 4, "kv_bits": 8, "draft_window": None}
    found = planted(lambda e, *_: e.load_peak_gb == -1.0, loading=loading, again=again)
    assert log == [({"draft_bits": None}, False), "closed", ({"kv_bits": None}, True), "closed"]
    assert [f.what for f in found.findings[:2]] == ["draft bits", "kv bits"]
    assert ("draft window", "not given") in [(u.what, u.why) for u in found.untried]


def test_a_drafter_that_was_not_quantised_after_all_is_not_loaded_again(engine):
    untried = {u.what: u.why for u in conditions(engine, OPTIONS, {"draft_bits": "auto"})[1]}
    assert untried["draft bits"] == "the drafter was left as it is"


def test_float32_is_tried_where_weights_are_coarser(engine):
    model = engine.pair.target.model
    assert ("dtype", "it is float32 already") in [(u.what, u.why) for u in conditions(engine, OPTIONS, {})[1]]

    class Half:
        dtype, num_layers, max_positions = mx.float16, model.num_layers, None

    half = replace(engine, pair=replace(engine.pair, target=replace(engine.pair.target, model=Half())))
    [condition] = [c for c in conditions(half, OPTIONS, {})[0] if c.what == "dtype"]
    assert (condition.now, condition.loading, condition.whole) == ("float16", {"dtype": "float32"}, True)
    assert condition.advice == "--dtype bfloat16"
    small = replace(half, machine=replace(half.machine, memory_gb=half.nbytes / 1e9))
    assert "dtype" in [u.what for u in conditions(small, OPTIONS, {})[1]]


def test_a_condition_that_cannot_run_is_told_and_the_others_go_on(planted, engine):
    from dflash_mlx.errors import UsageError

    @contextmanager
    def again(changes, whole):
        raise UsageError("No room.")
        yield

    found = planted(lambda *_: True, loading={"draft_bits": 4}, again=again)
    assert ("draft bits", "No room.") in [(u.what, u.why) for u in found.untried] and found.findings


def test_few_questions_are_called_thin_evidence(planted):
    found = planted(lambda e, *_: taps(e) == (2, 3), questions=QUESTIONS[:3])
    assert found.findings[0].what == "layers +1" and found.findings[0].evidence == "thin"
    assert found.conclusion.startswith("The evidence is too thin: 3 answers with 36 rounds")


def test_a_gain_for_half_of_the_questions_is_not_clear(planted):
    found = planted(lambda e, p, _o: taps(e) == (2, 3) and p.startswith("code"))
    assert found.findings[0].what == "layers +1" and found.findings[0].evidence == "thin"
    assert found.conclusion.startswith("Nothing is clear; layers +1 may help")


def test_what_long_prompts_cost_is_said(planted):
    found = planted(lambda _e, p, _o: len(p) < 500)
    assert found.conclusion.startswith("Nothing that was tried would raise acceptance clearly")
    assert found.conclusion.endswith("times the tokens a round after 1,024 tokens.")


def test_hardly_anything_accepted_points_at_the_pair(planted):
    found = planted(lambda *_: False)
    poor = replace(found.by_class[-1], tokens_per_round=1.1)
    assert "made for this very target" in diagnosis._conclusion(poor, [])


def test_blocks_are_compared_over_the_same_places(engine):
    """Half a block emits fewer tokens a round even where it is as good."""
    [condition] = [c for c in conditions(engine, OPTIONS, {})[0] if c.what == "block size"]
    whole = answer(1.0, accepted=[7, 7], verified=[7, 7]).stats
    half = answer(1.0, accepted=[3, 3, 3, 3], verified=[3, 3, 3, 3]).stats
    found = finding(condition, [whole], [half])
    assert (found.gain.median, found.tokens_per_round, found.tokens_per_round_instead) == (1.0, 4.0, 4.0)


def test_tokens_of_a_round_over_so_many_places():
    places = [Position(10, 5), Position(5, 5), Position(5, 0)]
    assert [tokens(places, most) for most in (0, 1, 2, 3)] == [1.0, 1.5, 2.0, 2.0]


@pytest.mark.parametrize(
    ("rates", "sentence"),
    [
        ([0.9, 0.85, 0.8, 0.78], "Acceptance falls evenly"),
        ([0.02, 0.5], "Hardly anything is right, even at the first place"),
        ([0.4, 0.9, 0.9], "The first place is worse than those after it"),
        ([0.9, 0.8, 0.4, 0.2], "Later places are much worse"),
    ],
)
def test_the_shape_of_acceptance(rates, sentence):
    places = tuple(Position(100, round(100 * rate)) for rate in rates)
    assert shape(Acceptance("all", 6, 100, 2.0, places)).startswith(sentence)


def test_a_shape_needs_rounds():
    assert shape(Acceptance("all", 6, 9, 2.0, (Position(9, 5),))).startswith("9 rounds are too few")


@pytest.mark.slow
def test_a_real_pair_runs_under_every_condition(engine):
    """Nothing is ruled here: the random drafter accepts next to nothing, whatever is changed."""
    told = []
    questions = [Question("code", f"Say it {n}.") for n in range(2)]
    options = {**OPTIONS, "max_new_tokens": 8, "temperature": 0.7}
    found = diagnose(Pair(engine), questions, options=options, loading={}, again=None, tell=told.append)
    tried = {f.what for f in found.findings}
    assert tried == {
        "thinking",
        "template",
        "temperature",
        "layers -1",
        "layers +1",
        "block size",
        "long prompt",
    }
    assert len(told) == 8 and "Trying layers +1: 2 3 instead of 1 2 ..." in told
    assert 1.0 <= found.by_class[-1].tokens_per_round < 2.0
