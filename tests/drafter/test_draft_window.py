"""`draft_window`: which keys a query sees, where they stand, what is kept of them, and what is refused."""

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_mlx.drafter import Drafter, check_draft_window, load_draft
from dflash_mlx.errors import UsageError
from tests.drafter.toys import (
    ToyEnds,
    read_plainly,
    toy_config,
    toy_features,
    toy_network,
    write_toy,
)

FULL, SLIDING = "full_attention", "sliding_attention"
CLOSE = 1e-4
ENDS = ToyEnds()


def drafter_of(features: mx.array, *pieces: int, **changes: object) -> Drafter:
    """A drafter that took the features in, piece by piece."""
    drafter, taken = Drafter(toy_network(**changes), ENDS), 0
    for piece in pieces or (len(features),):
        drafter.inject(features[taken : taken + piece], piece)
        drafter.settle()
        taken += piece
    return drafter


def moved_by(position: int, **changes: object) -> list[float]:
    """How far each drafted slot moves when one context token of twenty is another."""
    features = toy_features(20)
    other = mx.array(features)
    other[position] = features[position] + 1.0
    before, after = (drafter_of(rows, **changes).logits(1, 6) for rows in (features, other))
    return mx.abs(after - before).max(axis=1).tolist()


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({"draft_window": 8}, [[0, 1, *range(14, 20)]] * 5),
        ({"draft_window": 16}, [[0, 1, 2, 3, *range(8, 20)]] * 5),
        # slot j stands at 20 + j; what slides has no sinks and takes the smaller window
        ({"draft_window": 8, "sliding_window": 64}, [range(21 + j - 8, 20) for j in range(5)]),
        ({"draft_window": 8, "sliding_window": 7}, [range(22 + j - 7, 20) for j in range(5)]),
    ],
    ids=["8", "16", "8 of a window of 64", "8 of a window of 7"],
)
def test_which_context_tokens_a_slot_sees(changes, seen):
    """By hand: a token moves the slots that see it and no other."""
    layers = {"layer_types": [SLIDING if "sliding_window" in changes else FULL], "num_hidden_layers": 1}
    # Full attention inside the block would carry what one slot saw to the others; one layer has no second chance.
    for position in range(20):
        moves = [move > 1e-4 for move in moved_by(position, **changes, **layers)]
        assert moves == [position in slot for slot in seen], position


@settings(max_examples=25)
@given(
    types=st.lists(st.sampled_from([FULL, SLIDING]), min_size=2, max_size=2),
    window=st.integers(2, 24),
    draft_window=st.integers(6, 24),
    spans=st.lists(st.integers(0, 30), min_size=1, max_size=4),
    block=st.integers(2, 6),
    settled=st.booleans(),
)
def test_drafts_are_those_of_a_plain_reading(types, window, draft_window, spans, block, settled):
    """Positions are absolute, whatever was left out; pieces of any length, read at once or as they come."""
    network = toy_network(layer_types=types, sliding_window=window, draft_window=draft_window)
    features, seen = toy_features(sum(spans)), 0
    drafter = Drafter(network, ENDS)
    for span in spans:
        drafter.inject(features[seen : seen + span], span)
        if settled:
            drafter.settle()
        seen += span
    plainly = read_plainly(network, ENDS, features, 7, block)
    assert mx.abs(drafter.logits(7, block) - mx.array(plainly)).max().item() < CLOSE
    assert drafter.context_length == seen


def test_a_window_that_holds_the_whole_context_changes_no_bit():
    features = toy_features(24)
    unset = drafter_of(features, 20, 4).logits(3, 6)
    for tokens in (24, 25, 4096):
        assert mx.array_equal(drafter_of(features, 20, 4, draft_window=tokens).logits(3, 6), unset)
    assert not mx.array_equal(drafter_of(features, 20, 4, draft_window=23).logits(3, 6), unset)


@pytest.mark.parametrize("types", [[FULL, FULL], [SLIDING, FULL]])
def test_memory_stays_that_of_the_window_however_long_it_goes_on(types):
    drafter = Drafter(toy_network(layer_types=types, sliding_window=600, draft_window=64), ENDS)
    rounds, sizes = toy_features(6), []
    for _ in range(4):
        for piece in (1000, 300, *[5] * 60):  # long prompts, in one piece and in chunks, then rounds
            drafter.inject(toy_features(piece) if piece > 5 else rounds, piece)
            mx.eval(drafter.propose(1, 6).tokens)
        sizes.append(drafter.nbytes_of([drafter.snapshot()]))
    assert drafter.context_length == 4 * 1600
    assert len(set(sizes)) == 1
    assert max(layer.rows.capacity for layer in drafter._context.layers) == 256, "one step of growth"


turns = st.lists(
    st.tuples(st.sampled_from(["take", "take", "back", "mark", "return"]), st.integers(0, 20)), max_size=14
)


@settings(max_examples=25)
@given(
    turns=turns,
    draft_window=st.sampled_from([6, 9, 16]),
    types=st.sampled_from([[FULL] * 2, [SLIDING, FULL]]),
)
def test_going_back_drafts_as_if_the_rest_had_not_been_or_is_refused(turns, draft_window, types):
    """Conversations: rewinding, and places that are come back to."""
    network = toy_network(layer_types=types, sliding_window=12, draft_window=draft_window)
    stream, used = toy_features(400), 0
    drafter, taken, marks = Drafter(network, ENDS), [], []
    for turn, count in turns:
        if turn == "take":
            rows = stream[used : used + count]
            drafter.inject(rows, count)
            drafter.settle()
            taken, used = [*taken, *rows], used + count
        elif turn == "back":
            length = max(len(taken) - count, 0)
            if drafter.rewind(length):
                taken = taken[:length]
            assert drafter.context_length == len(taken)
        elif turn == "mark":
            marks.append((drafter.snapshot(), taken))
        elif marks:
            snapshot, taken = marks[count % len(marks)]
            drafter.restore(snapshot)
    fresh = Drafter(network, ENDS)
    if taken:
        fresh.inject(mx.stack(taken), len(taken))
    assert mx.abs(drafter.logits(2, 6) - fresh.logits(2, 6)).max().item() < CLOSE


def test_a_few_tokens_back_is_always_possible_within_a_round():
    drafter = drafter_of(toy_features(60), 50, 5, 5, draft_window=16)
    assert drafter.rewind(56)
    assert not drafter_of(toy_features(60), draft_window=16).rewind(56), "the tokens between were never read"


def test_what_is_saved_is_what_is_seen_and_goes_on_as_before():
    features, more = toy_features(50), toy_features(3, seed=9)
    drafter = drafter_of(features, 30, 20, draft_window=16)
    drafter.settle()
    shown = drafter.arrays([drafter.snapshot()])
    assert {rows.shape[2] for rows in shown.values()} == {16}
    again = Drafter(drafter.network, ENDS)
    again.fill(shown, [50])
    for one in (drafter, again):
        one.inject(more, 3)
    assert mx.array_equal(drafter.logits(3, 6), again.logits(3, 6))


@pytest.mark.parametrize("tokens", [0, 1, -5, 2.5, True, "64"])
def test_what_is_no_number_of_tokens_is_refused_before_any_file_is_read(tokens, tmp_path):
    with pytest.raises(UsageError, match=f"draft_window {tokens}: expected tokens of the context"):
        check_draft_window(tokens)


def test_fewer_tokens_than_a_block_are_refused_before_the_weights(tmp_path):
    folder = write_toy(tmp_path / "toy", toy_network(), toy_config())
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(
        UsageError, match="draft_window 5: the drafter drafts blocks of 6 tokens; give 6 or more"
    ):
        load_draft(folder, name="toy", draft_window=5)


def test_a_loaded_network_knows_its_window(tmp_path):
    folder = write_toy(tmp_path / "toy", toy_network(), toy_config())
    assert load_draft(folder, name="toy", draft_window=16).config.draft_window == 16
    assert load_draft(folder, name="toy").config.draft_window is None
