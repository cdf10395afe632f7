"""How many tokens of a prompt go into one pass."""

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_mlx.pace import Pace


def paced(most, seconds_per_token, passes=20):
    """Tokens pass by pass on a machine that takes so long for each."""
    pace = Pace(most)
    tokens = []
    for _ in range(passes):
        tokens.append(pace.tokens)
        pace.took(pace.tokens, pace.tokens * seconds_per_token)
    return tokens


def test_a_fast_machine_reads_as_much_as_it_may():
    assert paced(512, 1e-4)[:5] == [64, 128, 256, 512, 512]


@given(st.floats(1e-5, 0.03))
def test_passes_take_half_a_second_at_most_once_that_is_known(seconds_per_token):
    assert all(tokens * seconds_per_token <= 0.5 for tokens in paced(512, seconds_per_token)[1:])


def test_a_slow_machine_falls_at_once_and_stays_useful():
    assert paced(512, 0.02)[:3] == [64, 16, 16] and paced(8, 1.0) == [8] * 20


def test_what_is_done_once_does_not_slow_it_down_for_ever():
    """A first pass that compiles kernels took 2 seconds; the passes after it are short."""
    pace = Pace(512)
    pace.took(64, 2.0)
    assert pace.tokens == 16
    for _ in range(5):
        pace.took(pace.tokens, 0.01)
    assert pace.tokens == 512


def test_the_rest_of_a_prompt_tells_nothing():
    pace = Pace(512)
    pace.took(3, 0.001)
    assert pace.tokens == 64


def test_a_prompt_is_read_at_the_pace_that_its_passes_allow(monkeypatch):
    """A clock by which each token takes a sixteenth of a second: passes over 64 tokens would take four."""
    from dflash_mlx import decoding
    from tests.test_decoding import GREEDY, decoder, target_of

    target, seconds = target_of("qwen3"), [0.0]
    honest = type(target).verify

    def slow(self, ids, *rest):
        seconds[0] += ids.shape[0] / 16
        return honest(self, ids, *rest)

    monkeypatch.setattr(type(target), "verify", slow)
    monkeypatch.setattr(decoding.time, "perf_counter", lambda: seconds[0])
    pace = Pace(512)
    made = decoder(target, None, GREEDY, 1, prefill_chunk=pace)
    assert list(made.read([i % 50 for i in range(100)])) == [64, 80, 96, 100]
    assert len(made.ids) == 100 and pace.tokens == 16


def test_a_pass_is_computed_in_parts_between_which_it_can_be_stopped():
    from tests.test_decoding import GREEDY, decoder, target_of

    target = target_of("qwen3")
    made = decoder(target, None, GREEDY, 1, prefill_chunk=64)
    cache = made.cache
    target.verify(mx.arange(20), cache)
    parts = list(target.settling(cache))
    assert len(parts) == min(8, target.num_layers) and target.num_layers > 1


@pytest.mark.parametrize("part", [0, 1])
def test_a_ctrl_c_between_two_parts_leaves_the_state_before_the_pass(part, monkeypatch):
    from tests.test_decoding import GREEDY, decoder, target_of

    target = target_of("qwen3")
    made = decoder(target, None, GREEDY, 1, prefill_chunk=8)
    honest = type(target).settling

    def interrupted(self, cache):
        for number, _ in enumerate(honest(self, cache)):
            if number == part and len(made.ids) == 8:
                raise KeyboardInterrupt
            yield

    monkeypatch.setattr(type(target), "settling", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(made.read(list(range(20))))
    assert made.ids == list(range(8)) and all(layer.offset == 8 for layer in made.cache)
