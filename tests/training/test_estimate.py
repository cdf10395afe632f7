import pytest

from dflash_mlx.training.estimate import Pieces, estimate
from dflash_mlx.training.gather_estimate import Estimate, work_left

SHARD = {"shard_answers": 256, "own_passes": 128, "max_answer_tokens": 192}
PIECES = {
    "seconds_per_row": 0.002,
    "rows": 100_000,
    "seconds_per_token": 0.003,
    "tokens": 10_000,
    "seconds_per_held_out_token": 0.01,
    "held_out_tokens": 500,
    "peak_bytes": 3_000,
    "kept_bytes": 2_000,
    "weight_bytes": 100,
}


def test_whole_shards_are_counted_as_no_part_of_one_is_kept():
    work = work_left(80_000, **SHARD)  # 250 * (1 - exp(-192 / 250)) = 134.01 tokens an answer, 34,308 a shard
    assert (work.answers, work.tokens, work.own_passes) == (768, 102_924, 3 * 128)
    assert work_left(1, **SHARD).answers == 256


def test_answers_that_are_there_tell_how_long_the_others_will_be():
    work = work_left(50_000, **SHARD, known=(200, 25_000))  # 125 each: 32,000 a shard
    assert (work.answers, work.tokens, work.own_passes) == (512, 64_000, 2 * 128)


def test_a_disk_need_that_rounds_to_nothing_is_said_in_words():
    found = Estimate(seconds=850, memory_bytes=1_300_000_000, disk_bytes=540_000)
    assert found.sentence() == "about 14 minutes, 1.3 GB of memory and less than 1 MB of disk"


@pytest.mark.parametrize("on_disk", [False, True])
def test_pieces_are_scaled_up(on_disk):
    found = estimate(Pieces(**PIECES, kept_on_disk=on_disk))
    assert (found.training_seconds, found.feature_seconds, found.measuring_seconds) == (200, 30, 5)
    assert found.memory_bytes == 3_000 + (0 if on_disk else 2_000)
    assert found.disk_bytes == 9 * 100 + 50 + (2_000 if on_disk else 0)


def test_a_run_that_ends_by_the_clock_takes_no_longer():
    found = estimate(Pieces(**PIECES, kept_on_disk=False, seconds_at_most=100))
    assert found.feature_seconds == 30 and found.training_seconds == 70
    assert estimate(Pieces(**PIECES, kept_on_disk=False, seconds_at_most=20)).training_seconds == 0
