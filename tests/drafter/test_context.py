"""The injected-context cache against lists; snapshots, windows and what they cost."""

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_mlx.drafter import Drafter
from dflash_mlx.drafter.context import Context, LayerContext
from dflash_mlx.drafter.sight import Sight, sight
from tests.drafter.toys import ToyEnds, toy_features, toy_network


def rows(numbers: list[int]) -> mx.array:
    """[1, 1, S, 2], told apart by their numbers."""
    return mx.array(numbers, dtype=mx.float32).reshape(1, 1, -1, 1) * mx.array([1.0, -1.0])


def extend(layer: LayerContext, numbers: list[int], keep: int) -> list[int]:
    keys, values = layer.extend(rows(numbers), rows([n + 1000 for n in numbers]), keep=keep)
    found = [int(n) for n in keys[0, 0, :, 0].tolist()]
    assert [int(n) - 1000 for n in values[0, 0, :, 0].tolist()] == found
    return found


steps = st.lists(
    st.one_of(
        st.tuples(st.just("extend"), st.integers(0, 40), st.integers(0, 8)),
        st.tuples(st.just("snapshot"), st.just(0), st.just(0)),
        st.tuples(st.just("restore"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("forget"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("rewind"), st.integers(0, 30), st.just(0)),
    ),
    max_size=30,
)


def in_sight(kept: list[int], sight: Sight) -> list[int]:
    if sight.most is None or len(kept) <= sight.most:
        return kept
    return kept[: sight.sinks] + kept[-(sight.most - sight.sinks) :]


sights = st.sampled_from(
    [
        sight(None, None),
        *(sight(w, None) for w in (2, 5, 17, 200)),
        *(sight(None, n) for n in (2, 5, 17, 200)),
    ]
)


@settings(max_examples=150)
@given(steps=steps, sight=sights)
def test_any_order_of_steps_shows_the_rows_a_list_would(steps, sight):
    """Rows that never come into sight are left out where the layer says so."""
    layer, kept, saved, number = LayerContext(sight), [], [], 0
    for step, a, b in steps:
        if step == "extend":
            fresh = list(range(number, number + a + b))
            number += a + b
            kept = kept + fresh[:a]
            first, last = layer.wanted(a)
            if first + last < a:
                if first:
                    extend(layer, fresh[:first], first)
                layer.skip()
                fresh, a = fresh[a - last :], last
            if not fresh:
                continue
            seen = in_sight(kept, sight)
            assert extend(layer, fresh, a) == seen + fresh[a:]
            assert layer.visible == len(seen)
        elif step == "rewind":
            count = min(a, len(kept))
            if layer.can_drop(count, len(kept) - count):
                layer.drop(count)
                kept = kept[: len(kept) - count]
                assert layer.visible == len(in_sight(kept, sight))
            else:
                assert sight.most is not None and count, "whoever sees all goes back to anywhere"
        elif step == "snapshot":
            saved.append((layer.snapshot(), kept))
        elif saved and step == "restore":
            snapshot, kept = saved[a % len(saved)]
            layer.restore(snapshot)
        elif saved:
            del saved[a % len(saved)]


def test_a_windowed_layer_holds_about_twice_its_window_however_long_it_goes_on():
    layer, capacities = LayerContext(sight(512, None)), set()
    for start in range(0, 20_000, 100):
        extend(layer, list(range(start, start + 108)), 100)
        capacities.add(layer.rows.capacity)
    assert max(capacities) <= 2 * 512 + 256
    assert layer.visible == 511


def test_a_full_layer_grows_in_steps():
    layer = LayerContext(Sight())
    for start in range(0, 1000, 10):
        extend(layer, list(range(start, start + 18)), 10)
    assert layer.rows.capacity == 1024


def big_context(window: int | None) -> tuple[Context, mx.array]:
    context = Context([sight(window, None)])
    filling = mx.zeros((1, 8, 3000, 128))
    context.layers[0].extend(filling, filling, keep=3000)
    step = mx.zeros((1, 8, 8, 128))
    mx.eval(context.arrays(), step)
    return context, step


@pytest.mark.parametrize("held", [False, True])
def test_rows_are_written_in_place_even_while_a_snapshot_lives(held):
    context, step = big_context(None)
    snapshot = context.snapshot() if held else None
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(5):
        keys, _ = context.layers[0].extend(step, step, keep=3)
        mx.eval(keys.sum(), context.arrays())
        del keys
    one_buffer = context.arrays()[0].nbytes
    assert mx.get_peak_memory() - before < one_buffer / 2
    assert snapshot is None or snapshot.layers[0].filled == 3000


def test_restoring_the_only_snapshot_copies_nothing():
    context, step = big_context(None)
    snapshot = context.snapshot()
    buffer = context.layers[0].rows
    for _ in range(3):
        context.layers[0].extend(step, step, keep=8)
        context.restore(snapshot)
        assert context.layers[0].rows is buffer
    later = context.snapshot()
    context.restore(snapshot)
    context.layers[0].extend(step, step, keep=8)
    assert context.layers[0].rows is buffer, "a snapshot of as many rows is not in the way"
    assert later.layers[0].filled == 3000


@pytest.mark.parametrize("types", [["full_attention"] * 2, ["sliding_attention"] * 2])
def test_a_drafter_s_memory_stays_within_its_window(types):
    drafter = Drafter(toy_network(layer_types=types, sliding_window=100), ToyEnds())
    sizes = []
    for _ in range(20):
        drafter.inject(toy_features(200), 200)
        drafter.settle()
        mx.eval(drafter.propose(1, 6).tokens)
        sizes.append(sum(array.nbytes for array in drafter._context.arrays()))
    assert drafter.context_length == 4000
    assert (sizes[-1] == sizes[0]) == (types[0] == "sliding_attention")
