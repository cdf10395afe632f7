"""Same text, whatever the drafter does: the loop on tiny targets with a drafter that is right as planned."""

from collections.abc import Sequence
from functools import cache

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_mlx.core import Cut, Round, SamplingParams
from dflash_mlx.decoding import Decoder, Meter, Policy
from dflash_mlx.errors import NumericalError
from dflash_mlx.policy import Plan, WholeBlock
from dflash_mlx.sampling import Sampler
from dflash_mlx.target import MLXTarget, plain_tokens
from tests.kit.models import CONFIGS, VOCAB, tiny_target
from tests.kit.planned import PlannedDrafter

PROMPT = [5, 9, 100, 7, 3, 20, 4]
BLOCK = 8
GREEDY = SamplingParams(seed=1)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, top_k=40, seed=11)
PENALISED = SamplingParams(
    temperature=0.7, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, min_p=0.02, seed=5
)

target_of = cache(tiny_target)


def plain(
    target: MLXTarget,
    params: SamplingParams,
    count: int,
    prompt: Sequence[int] = PROMPT,
    sampler: Sampler | None = None,
) -> list[int]:
    """mlx-lm's own loop."""
    sampler = sampler or Sampler(params)
    return list(
        plain_tokens(
            target,
            prompt,
            max_new_tokens=count,
            draw=sampler.draw,
            draw_whole=sampler.draw_whole,
            prefill_chunk=4,
        )
    )


@cache
def truth_of(kind: str, params: SamplingParams, count: int) -> list[int]:
    return plain(target_of(kind), params, count)


def decoder(
    target: MLXTarget,
    drafter: PlannedDrafter | None,
    params: SamplingParams,
    budget: int,
    stops: Sequence[int] = (),
    prefill_chunk: int = 4,
    policy: Policy | None = None,
) -> Decoder:
    seen: list[int] = []

    def cut(tokens: Sequence[int]) -> Cut:
        for i, token in enumerate(tokens[: budget - len(seen)]):
            if token in stops:
                seen.extend(tokens[: i + 1])
                return Cut(i + 1, "stop")
        keep = min(len(tokens), budget - len(seen))
        seen.extend(tokens[:keep])
        return Cut(keep, "length" if len(seen) == budget else None)

    return Decoder(
        target=target,
        cache=target.make_cache(),
        drafter=drafter,
        sampler=Sampler(params),
        cut=cut,
        policy=policy or WholeBlock(),
        max_new_tokens=budget,
        block_size=BLOCK,
        prefill_chunk=prefill_chunk,
        meter=Meter(),
        ids=[],
    )


class Scripted:
    """A policy that does what it is told, over and over: a length, a length after a look, or plain steps."""

    def __init__(self, script: Sequence[tuple[str, int]]):
        self.script = list(script)
        self.depths: list[int] = []
        self.looked: list[list[float]] = []
        self.observed: list[tuple[int, int]] = []

    def plan(self, *, depth: int, most: int) -> Plan:
        kind, self._n = self.script[len(self.depths) % len(self.script)]
        self.depths.append(depth)
        if kind == "plain":
            return Plan(0, steps=self._n)
        return Plan(max(self._n, 1), look=kind == "look")

    def choose(self, confidences: Sequence[float]) -> int:
        self.looked.append(list(confidences))
        return self._n

    def observe(self, verified: int, accepted: int) -> None:
        self.observed.append((verified, accepted))


SCRIPTS = st.lists(
    st.tuples(st.just("plain"), st.integers(1, 9))
    | st.tuples(st.just("verify"), st.integers(1, BLOCK))
    | st.tuples(st.just("look"), st.integers(0, BLOCK)),
    min_size=1,
    max_size=8,
)
MIXED = [("verify", 2), ("plain", 3), ("look", 0), ("verify", 7), ("plain", 1), ("look", 4), ("plain", 7)]


def run(decoder: Decoder, prompt: Sequence[int] = PROMPT) -> list[Round]:
    list(decoder.prefill(prompt))
    return list(decoder.rounds())


def text(rounds: Sequence[Round]) -> list[int]:
    return [token for r in rounds for token in r.tokens]


def planned(truth: Sequence[int], plan: Sequence[int], prompt: Sequence[int] = PROMPT) -> PlannedDrafter:
    return PlannedDrafter([*prompt, *truth], plan, vocab_size=VOCAB, block_size=BLOCK)


def held(target: MLXTarget, decoder: Decoder) -> mx.array:
    """What the target says next from this cache when it is fed the last emitted token."""
    return target.verify(mx.array(decoder.ids[-1:]), decoder.cache, ()).logits


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_drafted_text_is_plain_text_in_every_family(kind: str, params: SamplingParams) -> None:
    target = target_of(kind)
    truth = plain(target, params, 40)
    assert len(set(truth)) > 8, "a text that does not vary tests nothing"
    rounds = run(decoder(target, planned(truth, [0, 3, 7, 7, 1, 5]), params, 40))
    assert text(rounds) == truth
    assert [r.accepted for r in rounds[1:7]] == [0, 3, 7, 7, 1, 5]


@settings(max_examples=25)
@given(
    plan=st.lists(st.integers(0, BLOCK - 1), min_size=1, max_size=12),
    params=st.sampled_from([GREEDY, SAMPLED, PENALISED]),
    budget=st.integers(1, 45),
    chunk=st.integers(1, 9),
)
def test_text_does_not_depend_on_what_is_accepted(
    plan: list[int], params: SamplingParams, budget: int, chunk: int
) -> None:
    target = target_of("qwen3")
    truth = truth_of("qwen3", params, 45)
    rounds = run(decoder(target, planned(truth, plan), params, budget, prefill_chunk=chunk))
    assert text(rounds) == truth[:budget]
    assert rounds[-1].finish_reason == "length"


@settings(max_examples=25)
@given(
    script=SCRIPTS,
    plan=st.lists(st.integers(0, BLOCK - 1), min_size=1, max_size=8),
    params=st.sampled_from([GREEDY, SAMPLED, PENALISED]),
    budget=st.integers(1, 45),
)
def test_text_does_not_depend_on_the_policy(
    script: list[tuple[str, int]], plan: list[int], params: SamplingParams, budget: int
) -> None:
    target = target_of("qwen3")
    truth = truth_of("qwen3", params, 45)
    d = decoder(target, planned(truth, plan), params, budget, policy=Scripted(script))
    assert text(run(d)) == truth[:budget]
    assert d.cache[0].offset == d.drafter.context_length == len(d.ids) - 1


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_policy_that_changes_its_mind_gives_plain_text_in_every_family(
    kind: str, params: SamplingParams
) -> None:
    target = target_of(kind)
    truth = truth_of(kind, params, 40)
    rounds = run(decoder(target, planned(truth, [1, 7, 0, 3]), params, 40, policy=Scripted(MIXED)))
    assert text(rounds) == truth
    assert [r.verified for r in rounds[1:13]] == [2, 0, 0, 0, 0, 7, 0, 4, 0, 0, 0, 0]


def test_a_policy_is_told_what_happened_and_sees_the_confidences_it_asks_for() -> None:
    target = target_of("qwen3")
    policy = Scripted(MIXED)
    truth = truth_of("qwen3", GREEDY, 40)
    rounds = run(decoder(target, planned(truth, [1, 7, 0, 3]), GREEDY, 40, policy=policy))
    assert policy.observed[:4] == [(2, 1), (0, 0), (7, 0), (4, 3)]
    assert policy.looked == [[1.0] * (BLOCK - 1)] * len(policy.looked) and policy.looked
    told = [len(PROMPT) + 1 + len(text(rounds[1:i])) for i in (1, 2, 5, 6, 7, 8)]
    assert policy.depths[:6] == told, "a run of plain steps is not interrupted by questions"
    assert [r.drafted for r in rounds[:9]] == [False, True, False, False, False, True, True, False, True]


def test_nothing_is_drafted_in_a_run_of_plain_steps() -> None:
    target = target_of("qwen3")
    truth = truth_of("qwen3", GREEDY, 40)
    drafter = planned(truth, [7])
    d = decoder(target, drafter, GREEDY, 40, policy=Scripted([("plain", 1000)]))
    drafter.propose = None
    rounds = run(d)
    assert text(rounds) == truth and len(rounds) == 40
    assert drafter.context_length == len(d.ids) - 1, "drafting could begin at any token"


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
def test_decoding_without_a_drafter_is_mlx_lm_s_text(params: SamplingParams) -> None:
    target = target_of("qwen3")
    assert text(run(decoder(target, None, params, 30))) == plain(target, params, 30)


@settings(max_examples=15)
@given(plan=st.lists(st.integers(0, BLOCK - 1), min_size=1, max_size=6), stop_at=st.integers(0, 30))
def test_a_stop_id_ends_the_text_wherever_it_falls_in_a_block(plan: list[int], stop_at: int) -> None:
    target = target_of("qwen3")
    truth = truth_of("qwen3", SAMPLED, 40)
    stop = truth[stop_at]
    d = decoder(target, planned(truth, plan), SAMPLED, 40, stops=[stop])
    rounds = run(d)
    assert text(rounds) == truth[: truth.index(stop) + 1]
    assert rounds[-1].finish_reason == "stop"
    assert d.cache[0].offset == d.drafter.context_length == len(d.ids) - 1


@pytest.mark.parametrize("budget", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])
def test_the_budget_is_exact(budget: int) -> None:
    target = target_of("qwen3")
    truth = truth_of("qwen3", GREEDY, 40)
    rounds = run(decoder(target, planned(truth, [BLOCK - 1]), GREEDY, budget))
    assert text(rounds) == truth[:budget]
    left = budget
    for r in rounds:
        assert r.verified <= left - 1, (
            "a row past the budget is work for nothing, and may pass the context limit"
        )
        left -= len(r.tokens)


@pytest.mark.parametrize("way", ["drafted", "plain", "mixed"])
def test_after_every_round_the_cache_holds_the_emitted_tokens_but_the_last(way: str) -> None:
    """Whoever stops and when: what is left behind continues like a cache that was read afresh."""
    target = target_of("qwen3")
    truth = plain(target, SAMPLED, 30)
    for stop_after in range(1, 9):
        drafter = planned(truth, [2, 0, 7, 4]) if way != "plain" else None
        d = decoder(target, drafter, SAMPLED, 30, policy=Scripted(MIXED) if way == "mixed" else None)
        list(d.prefill(PROMPT))
        rounds = d.rounds()
        for _ in range(stop_after):
            next(rounds)
            assert d.cache[0].offset == len(d.ids) - 1
        rounds.close()
        fresh = target.make_cache()
        target.verify(mx.array(d.ids[:-1]), fresh, ())
        expected = target.verify(mx.array(d.ids[-1:]), fresh, ()).logits
        assert mx.allclose(held(target, d), expected, atol=1e-4)


def test_plain_decoding_goes_on_after_somebody_used_its_cache_between_two_tokens() -> None:
    """The pass that runs ahead is undone for the length of a yield."""
    target = target_of("qwen3")
    truth = plain(target, GREEDY, 12)
    d = decoder(target, None, GREEDY, 12)
    list(d.prefill(PROMPT))
    seen = []
    for r in d.rounds():
        seen += r.tokens
        assert [c.offset for c in d.cache] == [len(d.ids) - 1] * 4
    assert seen == truth


@pytest.mark.parametrize("policy", [None, MIXED], ids=["whole blocks", "mixed"])
@pytest.mark.parametrize("chunk", [1, 3, 6, 100])
def test_the_drafter_gets_the_features_of_exactly_the_committed_tokens(
    chunk: int, policy: list[tuple[str, int]] | None
) -> None:
    """Chunked prefill and partly accepted blocks give the features of one pass over the final text."""
    target = target_of("qwen3")
    truth = plain(target, SAMPLED, 25)
    drafter = planned(truth, [0, 3, 7, 1])
    d = decoder(target, drafter, SAMPLED, 25, prefill_chunk=chunk, policy=policy and Scripted(policy))
    run(d)
    once = target.verify(mx.array(d.ids[:-1]), target.make_cache(), drafter.taps).features
    got = mx.concatenate(drafter.features)
    assert got.shape == once.shape
    assert mx.allclose(got, once, atol=1e-4)


def test_features_are_outputs_of_the_layers_named_in_the_order_named() -> None:
    target = target_of("qwen3")
    ids = mx.array([PROMPT])
    model = target.model.model
    h = model.embed_tokens(ids)
    outputs = []
    for layer in model.layers:
        h = layer(h, "causal", None)
        outputs.append(h[0])
    taps = (3, 0, 2)
    features = target.verify(ids[0], target.make_cache(), taps).features
    assert mx.allclose(features, mx.concatenate([outputs[i] for i in taps], axis=-1), atol=1e-5)


def test_a_prompt_of_one_token_and_prompts_around_the_chunk_size() -> None:
    target = target_of("llama")
    for length in (1, 2, 4, 5, 8, 9):
        prompt = list(range(3, 3 + length))
        truth = plain(target, GREEDY, 12, prompt)
        rounds = run(decoder(target, planned(truth, [3, 7], prompt), GREEDY, 12), prompt)
        assert text(rounds) == truth


def test_a_cut_whose_shortlist_is_short_is_decided_in_full() -> None:
    """A flat row over a vocabulary larger than the shortlist: drafted, plain and mlx-lm's loop agree."""
    target = tiny_target("qwen3", vocab_size=2048, tie_word_embeddings=True)
    params = SamplingParams(temperature=60.0, top_p=0.97, seed=2)
    sampler = Sampler(params)
    logits = target.verify(mx.array(PROMPT), target.make_cache(), ()).logits
    assert -1 in sampler.draw(logits, 1).tolist()
    truth = plain(target, params, 20)
    assert text(run(decoder(target, None, params, 20))) == truth
    drafter = PlannedDrafter([*PROMPT, *truth], [2, 0, 7], vocab_size=2048, block_size=BLOCK)
    assert text(run(decoder(target, drafter, params, 20))) == truth


def test_a_processor_of_the_caller_s_bans_an_id_at_every_position() -> None:
    target = target_of("qwen3")
    banned = max(set(plain(target, GREEDY, 30)), key=plain(target, GREEDY, 30).count)
    histories: list[list[int]] = []

    def ban(tokens: mx.array, logits: mx.array) -> mx.array:
        histories.append(tokens.tolist())
        logits[:, banned] = -mx.inf
        return logits

    sampler = Sampler(GREEDY, [ban])
    truth = plain(target, GREEDY, 30, sampler=sampler)
    histories.clear()
    d = decoder(target, planned(truth, [0, 5, 7]), GREEDY, 30)
    d.sampler = sampler
    assert text(run(d)) == truth
    assert banned not in truth
    assert histories[0] == PROMPT, "the first call sees the whole prompt"
    whole = [*PROMPT, *truth]
    right = [h for h in histories if h == whole[: len(h)]]
    assert {len(h) for h in right} >= set(range(len(PROMPT), len(whole))), (
        "each row sees the tokens before it"
    )


class Broken(Exception):
    pass


@pytest.mark.parametrize("drafted", [True, False], ids=["drafted", "plain"])
@pytest.mark.parametrize("fails_in", ["cut", "processor", "forward"])
def test_a_round_that_fails_or_is_interrupted_has_not_happened(
    drafted: bool, fails_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caches hold what was emitted before, so another decoder goes on from there to the same text."""
    target = target_of("qwen3")
    truth = plain(target, GREEDY, 20)
    d = decoder(target, planned(truth, [2, 0, 4]) if drafted else None, GREEDY, 20)
    armed = False

    def break_here() -> None:
        if armed:
            raise Broken

    def watch(tokens: mx.array, logits: mx.array) -> mx.array:
        break_here()
        return logits

    norm, stock_norm = type(target.model.model.norm), type(target.model.model.norm).__call__

    def broken_norm(self: object, x: mx.array) -> mx.array:
        if self is target.model.model.layers[2].input_layernorm:
            break_here()
        return stock_norm(self, x)

    cut = d.cut
    if fails_in == "cut":
        d.cut = lambda tokens: break_here() or cut(tokens)
    elif fails_in == "processor":
        d.sampler = Sampler(GREEDY, [watch])
    else:
        monkeypatch.setattr(norm, "__call__", broken_norm)
    list(d.prefill(PROMPT))
    rounds = d.rounds()
    emitted = [*next(rounds).tokens, *next(rounds).tokens, *next(rounds).tokens]
    armed = True
    with pytest.raises(Broken):
        list(rounds)
    armed = False
    assert d.ids == [*PROMPT, *emitted] == [*PROMPT, *truth][: len(d.ids)]
    assert {c.offset for c in d.cache} == {len(d.ids) - 1}
    rest = len(truth) - len(emitted)
    after = decoder(target, None, GREEDY, rest)
    after.cache, after.ids = d.cache, list(d.ids)
    assert text(list(after.rounds())) == truth[len(emitted) :]


def test_a_second_run_from_a_snapshot_gives_the_same_text() -> None:
    target = target_of("qwen3")
    truth = plain(target, GREEDY, 20)
    d = decoder(target, None, GREEDY, 20)
    list(d.prefill(PROMPT))
    saved = target.snapshot(d.cache)
    first = text(list(d.rounds()))
    target.restore(d.cache, saved)
    again = decoder(target, planned(truth, [3]), GREEDY, 20)
    again.cache, again.ids = d.cache, list(PROMPT)
    again.drafter.context_length = len(PROMPT) - 1
    assert text(list(again.rounds())) == first == truth


def test_logits_that_are_no_numbers_end_the_generation_aloud() -> None:
    """An overflow in float16 would otherwise go on as garbage."""
    target = tiny_target("llama", seed=4)
    truth = plain(target, GREEDY, 20)
    for drafter in (planned(truth, [2]), None):
        d = decoder(target, drafter, GREEDY, 20)
        list(d.prefill(PROMPT))
        rounds = d.rounds()
        next(rounds)
        weight = target.model.model.norm.weight
        target.model.model.norm.weight = weight * mx.nan
        with pytest.raises(NumericalError, match="no numbers after"):
            list(rounds)
        with pytest.raises(NumericalError, match="no numbers"):
            plain(target, GREEDY, 5)
        target.model.model.norm.weight = weight


def test_plain_steps_never_wait_for_the_pass_that_runs_ahead(monkeypatch):
    """Waiting for it before the one behind it is built costs 4 % where plain decoding is all there is."""
    made = decoder(target_of("qwen3"), None, GREEDY, 8)
    list(made.prefill([3, 1, 4, 1, 5]))
    rounds = made.rounds()
    next(rounds)
    waits, honest = [], mx.eval
    monkeypatch.setattr(mx, "eval", lambda *arrays: (waits.append(arrays), honest(*arrays)))
    assert len(list(rounds)) == 7
    assert not waits


def test_a_pass_that_runs_ahead_is_done_when_the_reader_leaves(monkeypatch):
    made = decoder(target_of("qwen3"), None, GREEDY, 8)
    list(made.prefill([3, 1, 4, 1, 5]))
    rounds = made.rounds()
    for _ in range(3):
        next(rounds)
    waits, honest = [], mx.eval
    monkeypatch.setattr(mx, "eval", lambda *arrays: (waits.append(arrays), honest(*arrays)))
    rounds.close()
    assert waits
