"""Costs are measured once, by the real loop, and kept: on a clock that the fake pair moves itself."""

import json
import os
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import pytest

from dflash_mlx import DFlashGenerator, calibration
from dflash_mlx.calibration import Bench, measure, stored
from dflash_mlx.core import Pass, Proposal
from dflash_mlx.errors import UsageError
from dflash_mlx.policy import CostCurve, Depth
from tests.kit.models import tiny_target
from tests.loading.checkpoints import write_draft, write_target

KEY = {"chip": "M9", "mlx": "0.32.4", "target": "t", "draft": "d", "block_size": "8"}
DEPTHS = [Depth(64, 0.05, 0.02, 0.001, {1: 0.05, 8: 0.08}), Depth(1024, 0.06, 0.03, 0.0, {1: 0.06, 8: 0.1})]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Costly:
    """A target whose passes take as long as they are said to, by rows and depth; some are interrupted."""

    def __init__(self, clock: Clock, *, hiccup: float = 0.0, busy: float = 0.15):
        self.target, self.clock = tiny_target(num_hidden_layers=2, max_position_embeddings=1400), clock
        self.hiccup, self.busy, self.dice = hiccup, busy, Random(3)
        self.passes: list[int] = []
        self.extra: dict[int, float] = {}  # seconds more, by rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)

    def verify(self, ids: mx.array, cache: Any, taps: Sequence[int] = ()) -> Pass:
        rows, depth = ids.shape[0], cache[0].offset
        self.passes.append(rows)
        self.clock.now += seconds_of(rows) * (2 if depth >= 512 else 1) + self.extra.get(rows, 0.0)
        if self.dice.random() < self.busy:
            self.clock.now += self.hiccup
        return self.target.verify(ids, cache, taps)


def seconds_of(rows: int) -> float:
    return 0.010 + 0.002 * min(rows, 16)


class Guess:
    """A drafter that takes 5 ms and is wrong."""

    taps, block_size, context_length = (0, 1), 16, 0

    def __init__(self, clock: Clock):
        self.clock = clock

    def inject(self, features: mx.array, keep: int) -> None:
        self.context_length += keep

    def see(self, text):
        pass

    def settle(self) -> None:
        pass

    def propose(self, anchor: int, block_size: int) -> Proposal:
        self.clock.now += 0.005
        return Proposal(mx.zeros(block_size - 1, mx.int32), mx.ones(block_size - 1))


def bench_of(clock: Clock, target: Costly) -> Bench:
    return Bench(target, lambda: Guess(clock), 64, clock=clock)


@pytest.mark.parametrize("block_size", [2, 8, 16])
def test_what_is_measured_is_what_passes_take(block_size: int) -> None:
    clock = Clock()
    target = Costly(clock)
    shallow, deep = measure(bench_of(clock, target), block_size=block_size)
    rows = [r for r in (1, 2, 3, 4, 5, 6, 8, 12, 16) if r <= block_size]
    assert shallow.steady and deep.steady
    assert shallow.depth.tokens == 64 and deep.depth.tokens > 1000
    for depth, factor in ((shallow.depth, 1), (deep.depth, 2)):
        assert depth.plain == pytest.approx(factor * seconds_of(1))
        assert depth.draft == pytest.approx(0.005)
        assert depth.look == pytest.approx(0, abs=1e-9)
        assert depth.verify == pytest.approx({r: factor * seconds_of(r) for r in rows})
    assert max(target.passes) == max(64, block_size), "nothing beyond the block is verified"


def test_a_moment_in_which_the_machine_was_busy_changes_nothing() -> None:
    clock = Clock()
    shallow, _ = measure(bench_of(clock, Costly(clock, hiccup=0.015)), block_size=8)
    quiet = {rows: seconds_of(rows) for rows in (1, 2, 3, 4, 5, 6, 8)}
    assert shallow.depth.verify == pytest.approx(quiet, rel=0.2)


def test_measuring_ends_on_a_slow_machine_and_says_when_it_was_a_busy_one() -> None:
    clock = Clock()
    (shallow, *_) = measure(bench_of(clock, Costly(clock, hiccup=0.2, busy=0.5)), block_size=8)
    assert clock.now < 40
    assert not shallow.steady
    slow = Clock()
    assert len(measure(bench_of(slow, Costly(slow, hiccup=2.0, busy=1.0)), block_size=8)) == 1
    assert slow.now < 120


def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: dict[str, str] = KEY) -> tuple[Any, int]:
    """Asks for costs with the cache folder at `tmp_path`; also gives how often a pass was run."""
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path))
    clock = Clock()
    target = Costly(clock)
    return calibration.costs(bench_of(clock, target), key, block_size=8), len(target.passes)


def test_costs_are_measured_once_for_each_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, passes = known(tmp_path, monkeypatch)
    assert passes > 0 and len(first.notes) == 1 and str(tmp_path) in first.notes[0]
    again, passes = known(tmp_path, monkeypatch)
    assert passes == 0 and again.notes == ()
    assert again.curve.measured == first.curve.measured
    _, passes = known(tmp_path, monkeypatch, {**KEY, "mlx": "0.33"})
    assert passes > 0 and len(list((tmp_path / "costs").iterdir())) == 2


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", "null", '{"version": 1}', '{"version": 1, "key": {}, "depths": []}', "\x00\xff"]
)
def test_a_damaged_file_is_measured_again_and_replaced(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / stored.file_name(KEY)
    path.write_text(damage, encoding="latin-1")
    assert stored.read(path, KEY) is None
    assert stored.write(path, KEY, DEPTHS) == DEPTHS == stored.read(path, KEY)
    assert [file.name for file in tmp_path.iterdir()] == [path.name], "nothing is left lying about"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("plain", 0),
        ("draft", -1),
        ("verify", []),
        ("verify", [[0, 1.0]]),
        ("look", float("nan")),
        ("tokens", "x"),
    ],
)
def test_figures_that_cannot_be_are_not_believed(name: str, value: object, tmp_path: Path) -> None:
    path = tmp_path / stored.file_name(KEY)
    stored.write(path, KEY, DEPTHS)
    record = json.loads(path.read_text())
    record["depths"][0][name] = value
    path.write_text(json.dumps(record))
    assert stored.read(path, KEY) is None


def test_of_two_processes_that_measured_the_first_one_s_costs_stay(tmp_path: Path) -> None:
    path = tmp_path / "costs" / stored.file_name(KEY)
    assert stored.write(path, KEY, DEPTHS) == DEPTHS
    assert stored.write(path, KEY, DEPTHS[:1]) == DEPTHS


def test_costs_are_measured_again_on_request_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path))
    path = tmp_path / "costs" / stored.file_name(KEY)
    stored.write(path, KEY, DEPTHS)
    clock = Clock()
    found = calibration.again(bench_of(clock, Costly(clock)), KEY, block_size=8)
    assert found.old is not None and list(found.old.measured) == DEPTHS
    assert list(found.new.measured) == stored.read(path, KEY) != DEPTHS
    assert found.new.measured[0].plain == pytest.approx(seconds_of(1)) and str(path) in found.note
    path.unlink()
    assert calibration.again(bench_of(clock, Costly(clock)), KEY, block_size=8).old is None


def test_every_curve_that_is_kept_is_found_and_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path))
    assert calibration.known_pairs() == []
    keys = [KEY, {**KEY, "block_size": "16"}]
    for key in keys:
        stored.write(tmp_path / "costs" / stored.file_name(key), key, DEPTHS)
    for name, text in (("a.json", "{"), ("b.json", "[]"), ("c.json", '{"key": {"x": "y"}, "seconds": 1}')):
        (tmp_path / "costs" / name).write_text(text)
    found = calibration.known_pairs()
    assert [key for key, _ in found] == sorted(keys, key=lambda key: key["block_size"])
    assert all(list(curve.measured) == DEPTHS for _, curve in found)


def test_hopeless_costs_are_looked_at_once() -> None:
    """With MLX's own BLAS on Linux n rows cost n steps, and measuring them often takes longest of all."""
    clock = Clock()
    target = Costly(clock, busy=0)
    target.extra = {rows: 0.012 * rows for rows in range(2, 9)}
    [shallow] = measure(bench_of(clock, target), block_size=8)
    assert shallow.steady and not CostCurve([shallow.depth], 8).can_pay_after(0)
    assert sum(rows == 5 for rows in target.passes) == 1


def test_a_step_in_the_costs_by_rows_is_there_at_every_depth() -> None:
    """OpenBLAS takes longer over 5 rows than over 8; with many tokens only a few row counts are measured."""
    clock = Clock()
    target = Costly(clock, busy=0)
    target.extra = {5: 0.02, 6: 0.03}
    shallow, deep = measure(bench_of(clock, target), block_size=8)
    for rows, extra in ((3, 0.0), (5, 0.02), (6, 0.03)):
        assert shallow.depth.verify[rows] == pytest.approx(seconds_of(rows) + extra)
        assert deep.depth.verify[rows] == pytest.approx(2 * seconds_of(rows) + extra, rel=0.1)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_folder_that_cannot_be_written_costs_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    found, _ = known(tmp_path, monkeypatch)
    assert found.curve is not None and "cannot be kept" in found.notes[0]


def test_a_busy_machine_s_costs_are_kept_too_and_said(  # or every start on it would measure again
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path))
    clock = Clock()
    found = calibration.costs(bench_of(clock, Costly(clock, hiccup=0.2, busy=0.5)), KEY, block_size=8)
    assert found.curve is not None and "busy" in found.notes[0]
    assert len(list((tmp_path / "costs").iterdir())) == 1


@pytest.mark.parametrize(("value", "wanted"), [(None, True), ("auto", True), ("off", False)])
def test_the_environment_says_whether_to_measure(
    value: str | None, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DFLASH_COSTS")
    if value is not None:
        monkeypatch.setenv("DFLASH_COSTS", value)
    assert calibration.wanted() is wanted
    monkeypatch.setenv("DFLASH_COSTS", "of")
    with pytest.raises(UsageError, match="DFLASH_COSTS is 'of'"):
        calibration.wanted()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("pair")
    return write_target(root / "target", eos_token_id=None), write_draft(root / "draft")


def given(depths: list[Depth]) -> Any:
    """Stands in for `calibration.costs`; remembers the keys that it was asked for."""
    keys = []

    def costs(bench: Bench, key: dict[str, str], *, block_size: int, tell: Any) -> calibration.Known:
        keys.append(key)
        return calibration.Known(CostCurve(depths, block_size), ("Measured.",))

    costs.keys = keys
    return costs


WORTH = [Depth(0, 0.05, 0.001, 0.0, {1: 0.04, 8: 0.04})]
BARELY = [Depth(0, 0.05, 0.04, 0.001, {1: 0.05, 8: 0.2})]
HOPELESS = [Depth(0, 0.05, 0.05, 0.001, {1: 0.05, 8: 0.4})]


@pytest.mark.parametrize("depths", [WORTH, BARELY, HOPELESS], ids=["worth it", "barely", "hopeless"])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "sampled"])
def test_the_answer_is_the_same_whatever_drafting_costs(
    depths: list[Depth], options: dict[str, Any], folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_COSTS", "auto")
    monkeypatch.setattr(calibration, "costs", given(depths))
    with DFlashGenerator(*folders) as runner, DFlashGenerator(runner.target, mode="off") as plain:
        results = [runner.generate("Say it.", max_new_tokens=80, **options) for _ in range(2)]
        truth = plain.generate("Say it.", max_new_tokens=80, **options)
    assert [result.token_ids for result in results] == [truth.token_ids] * 2
    first, again = (result.stats for result in results)
    assert first.verify_lengths == again.verify_lengths, "choices come from costs and text alone"
    assert len(first.verify_lengths) == first.rounds and sum(first.verify_lengths) == first.verified
    assert first.plain_tokens_per_second_estimate == pytest.approx(20)
    if depths is WORTH:
        assert first.plain_rounds <= 1 and set(first.verify_lengths[:10]) == {7}
    elif depths is HOPELESS:
        assert first.plain_rounds == first.rounds and first.verified == 0
        assert any("not even a drafter that is always right would pay" in note for note in first.notes)
    else:  # the random drafter is always wrong
        assert 0.8 * first.rounds < first.plain_rounds < first.rounds
        assert any("drafting did not pay here" in note for note in first.notes)


def test_an_explicit_mode_measures_nothing_and_is_not_downgraded(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = given(HOPELESS)
    monkeypatch.setenv("DFLASH_COSTS", "auto")
    monkeypatch.setattr(calibration, "costs", costs)
    for mode, lengths in (("on", {7}), ("off", {0})):
        with DFlashGenerator(folders[0], None if mode == "off" else folders[1], mode=mode) as runner:
            stats = runner.generate("Say it.", max_new_tokens=20).stats
        assert set(stats.verify_lengths[:10]) == lengths
        assert stats.plain_tokens_per_second_estimate is None and "Measured." not in stats.notes
    assert costs.keys == []


def test_another_pair_type_or_block_has_costs_of_its_own(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = given(WORTH)
    monkeypatch.setenv("DFLASH_COSTS", "auto")
    monkeypatch.setattr(calibration, "costs", costs)
    for options in ({}, {"block_size": 4}, {"dtype": "bfloat16"}, {"draft_bits": 8}):
        with DFlashGenerator(*folders, **options):
            pass
    assert len({stored.file_name(key) for key in costs.keys}) == 4


def test_a_real_pair_is_measured_once(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_COSTS", "auto")
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path))
    monkeypatch.setattr(
        sys.modules["dflash_mlx.calibration.measure"], "_STEADY", float("inf")
    )  # other tests may run beside this one
    with DFlashGenerator(*folders) as runner:
        first = runner.generate("Say it.", max_new_tokens=40)
        assert any("Measured what drafting costs" in note for note in runner.notes)
        with DFlashGenerator(runner.target, folders[1]) as second:
            again = second.generate("Say it.", max_new_tokens=40)
            assert not any("Measured" in note for note in second.notes)
    assert again.token_ids == first.token_ids
    assert again.stats.verify_lengths == first.stats.verify_lengths


def test_a_generator_measures_again_when_asked(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_COSTS", "auto")
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path))
    keys = []

    def again(bench: Bench, key: dict[str, str], *, block_size: int) -> calibration.Again:
        keys.append((key, block_size))
        return calibration.Again(None, CostCurve(DEPTHS, block_size), "Measured.")

    costs = given(WORTH)
    monkeypatch.setattr(calibration, "again", again)
    monkeypatch.setattr(calibration, "costs", costs)
    with DFlashGenerator(*folders, mode="on") as runner:
        assert runner.measure_costs().new.measured == tuple(DEPTHS)
    with DFlashGenerator(*folders), DFlashGenerator(folders[0], mode="off") as plain:
        with pytest.raises(UsageError, match="no drafter is loaded"):
            plain.measure_costs()
    assert keys == [(costs.keys[0], 8)], "kept where the next generator looks"


_THREE_RUNS = """
import json, sys
from dflash_mlx import DFlashGenerator
with DFlashGenerator(*sys.argv[1:]) as runner:
    for _ in range(3):
        result = runner.generate("Say it.", max_new_tokens=60)
        print(json.dumps([result.token_ids, result.stats.verify_lengths, result.stats.plain_rounds]))
"""


@pytest.mark.slow
def test_three_runs_in_one_process_and_in_three_choose_alike(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """With a stored curve, which the first process leaves behind; drafts that hit and miss, on real costs."""
    environment = os.environ | {"DFLASH_COSTS": "auto", "DFLASH_CACHE": str(tmp_path)}
    command = [sys.executable, "-c", _THREE_RUNS, *map(str, folders)]
    runs = [
        subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
        for _ in range(4)
    ]
    assert len(list((tmp_path / "costs").glob("*.json"))) >= 1
    lines = {line for text in runs[1:] for line in text.splitlines()}
    assert len(lines) == 1 and runs[1].count("\n") == 3
    tokens = {json.dumps(json.loads(line)[0]) for text in runs for line in text.splitlines()}
    assert len(tokens) == 1, "the text is the same whatever was measured"
