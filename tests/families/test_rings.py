"""Rings of their own: kept first rows, steps past the wrap, two passes in flight, plain decoding that goes back."""

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import RotatingKVCache

from dflash_mlx.errors import UnsupportedError
from dflash_mlx.sampling import UNDECIDED, Sampler
from dflash_mlx.target import MLXTarget, plain_tokens
from dflash_mlx.target import caches as target_caches
from tests.families.support import (
    PROMPT,
    SAMPLED,
    decoder,
    distance,
    family_of,
    first_fast,
    read,
    stepped,
    tokens_of,
    truth_of,
)
from tests.kit.families import WINDOW, family
from tests.kit.models import VOCAB

IDS = [(37 * j * j + 11 * j + 5) % VOCAB for j in range(60)]
RINGED = first_fast("gpt_oss", "gemma3_text", "gemma4")


def kept_rows() -> MLXTarget:
    """As mlx-lm's `max_kv_size` makes them: the first four rows stay for ever."""
    target = family("qwen3")
    kind = type(
        "Kept", (type(target.model),), {"make_cache": lambda self: [RotatingKVCache(12, 4) for _ in range(4)]}
    )
    target.model.__class__ = kind
    return MLXTarget(target.model, target.config, "kept")


@pytest.mark.parametrize("rows", [1, 2, 5, 16])
def test_a_ring_that_keeps_its_first_rows_forgets_what_was_rejected(rows: int) -> None:
    """Against the same passes of right tokens alone: what such a ring holds depends on how it was filled."""
    target = kept_rows()
    for history in (3, 12, 30):
        for keep in sorted({0, 1, rows // 2, rows - 1, rows}):
            held = read(target, IDS[:history])
            tape = target.verify(
                mx.array([*IDS[history : history + keep], *[1] * (rows - keep)]), held, ()
            ).tape
            for wrong in (0, rows, keep):
                target.commit(held, tape, wrong)
            expected = read(target, IDS[:history], IDS[history : history + keep])
            assert {layer.offset for layer in held} == {history + keep}
            for size in (1, 1, 3):
                following = mx.array(IDS[history + keep :][:size])
                got, awaited = (target.verify(following, cache, ()).logits for cache in (held, expected))
                assert mx.allclose(got, awaited, atol=1e-4), f"{keep} of {rows} rows after {history}"


@pytest.mark.parametrize("name", RINGED)
def test_steps_taken_back_at_every_place_of_the_ring(name: str) -> None:
    """A step writes over the oldest row where it stands; taken back, it is as if it had not been."""
    target = family_of(name)
    held, beside = read(target, PROMPT[:4]), stepped(target, PROMPT[:4])
    for token in IDS[: 2 * WINDOW + 3]:
        tape = target.verify(mx.array([9]), held, ()).tape
        target.commit(held, tape, 0)
        assert distance(held, beside) < 1e-5
        mx.eval(target.verify(mx.array([token]), held, ()).logits)
        stepped(target, [token], beside)


@pytest.mark.parametrize("name", RINGED)
@pytest.mark.parametrize("both", [False, True], ids=["the first at once", "one after the other"])
def test_two_steps_in_flight_taken_back_at_every_place_of_the_ring(name: str, both: bool) -> None:
    """The second one overwrites a row that is in the window again once the first is taken back too."""
    target = family_of(name)
    held, beside = read(target, PROMPT[:4]), stepped(target, PROMPT[:4])
    for token in IDS[: 2 * WINDOW + 3]:
        tapes = [target.verify(mx.array([wrong]), held, ()).tape for wrong in (9, 8)]
        if both:
            target.commit(held, tapes[1], 0)
        target.commit(held, tapes[0], 0)
        assert distance(held, beside) < 1e-5
        mx.eval(target.verify(mx.array([token]), held, ()).logits)
        stepped(target, [token], beside)


@pytest.mark.parametrize("name", first_fast("gpt_oss", "qwen3_5"))
@pytest.mark.parametrize("at", [3, 17, 18])
def test_plain_decoding_that_is_interrupted_leaves_a_cache_to_go_on_from(name: str, at: int) -> None:
    """Ctrl-C falls into the wait for a token while the next pass runs ahead."""
    truth = truth_of(name, SAMPLED, 40)
    made = decoder(family_of(name), None, SAMPLED, 40)
    list(made.prefill(PROMPT))
    got: list[int] = []
    usual = made.cut

    def cut(tokens: Any) -> Any:
        if len(got) == at:
            raise KeyboardInterrupt
        return usual(tokens)

    made.cut = cut
    with pytest.raises(KeyboardInterrupt):
        for one in made.rounds():
            got += one.tokens
    assert got == truth[:at] and target_caches.length(made.cache) == len(PROMPT) + at - 1
    again = decoder(family_of(name), None, SAMPLED, 40 - at, held=made.cache)
    again.ids = list(made.ids)
    assert got + tokens_of(list(again.rounds())) == truth


@pytest.mark.parametrize("name", first_fast("gpt_oss", "qwen3_5", "falcon_h1", "gemma4"))
def test_plain_decoding_decides_in_full_where_a_draw_cannot(name: str) -> None:
    """The step that ran ahead on no token is taken back, in rings and recurrent states too."""
    target, truth = family_of(name), truth_of(name, SAMPLED, 40)
    sampler, undecided = Sampler(SAMPLED), [21, 22, 30, 39, 40, 55, 60]

    def draw(logits: mx.array, position: int, history: mx.array) -> mx.array:
        drawn = sampler.draw(logits, position, history)
        return mx.array([UNDECIDED]) if position in undecided else drawn

    whole: list[int] = []

    def draw_whole(logits: mx.array, position: int, history: mx.array) -> mx.array:
        whole.append(position)
        return sampler.draw_whole(logits, position, history)

    tokens = plain_tokens(
        target, PROMPT, max_new_tokens=40, draw=draw, draw_whole=draw_whole, prefill_chunk=5
    )
    assert list(tokens) == truth and whole == undecided


def test_a_ring_of_another_layout_is_refused_aloud(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a new mlx-lm wrote the rows of a pass to the front."""
    stock = RotatingKVCache.update_and_fetch

    def to_the_front(self: Any, keys: mx.array, values: mx.array) -> Any:
        rows = stock(self, keys, values)
        self._idx = 0
        return rows

    monkeypatch.setattr(RotatingKVCache, "update_and_fetch", to_the_front)
    with pytest.raises(UnsupportedError, match="'gpt_oss' model does not keep its caches in the way"):
        family("gpt_oss")
