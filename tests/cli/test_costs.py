"""`dflash-mlx doctor` on what drafting costs: what is kept is shown, and measured again on request alone."""

import json

import pytest

from dflash_mlx.calibration import Again, stored
from dflash_mlx.policy import CostCurve, Depth
from tests.cli.fake import FakeGenerator

KEY = {
    "target": "Qwen3-8B",
    "draft": "z-lab/Qwen3-8B-DFlash",
    "dtype": "mlx.core.bfloat16",
    "draft_bits": "4",
    "draft_vocab": "None",
    "block_size": "8",
}
OLD = [Depth(64, 0.05, 0.02, 0.001, {1: 0.05, 2: 0.055, 8: 0.08})]
NEW = [Depth(64, 0.04, 0.01, 0.0, {1: 0.04, 8: 0.4}), Depth(900, 0.05, 0.01, 0.0, {1: 0.05, 8: 0.1})]


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A cache folder with one curve."""
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path))
    stored.write(tmp_path / "costs" / stored.file_name(KEY), KEY, OLD)


@pytest.fixture
def measuring(monkeypatch):
    """Generators that can be measured."""
    again = Again(CostCurve(OLD, 8), CostCurve(NEW, 8), "Measured, in 5 s.")
    monkeypatch.setattr(FakeGenerator, "measure_costs", lambda self: again, raising=False)


def test_the_doctor_shows_what_is_kept_and_loads_nothing(console, kept):
    result = console("doctor")
    table = result.stdout.split("costs\n")[1]
    assert "Qwen3-8B + z-lab/Qwen3-8B-DFlash (bfloat16, block 8, 4 bits)" in table
    rows = [line.split()[-9:] for line in table.splitlines() if "tokens a round" in line]
    assert rows == [
        ["64", "50", "20", "2", "55", "1.50", "tokens", "a", "round"],
        ["64", "50", "20", "8", "80", "2.00", "tokens", "a", "round"],
    ]
    assert console.made == []


def test_json_has_the_curve_pair_by_pair(console, kept):
    [pair] = json.loads(console("doctor", "--json").stdout)["costs"]["pairs"]
    assert (pair["target"], pair["dtype"], pair["draft_bits"]) == ("Qwen3-8B", "bfloat16", "4")
    assert "draft_vocab" not in pair
    [depth] = pair["depths"]
    assert depth["plain_ms"] == pytest.approx(50) and depth["look_ms"] == pytest.approx(1)
    assert [row["tokens_to_pay"] for row in depth["rows"]] == pytest.approx([1.5, 2.0])


def test_recalibrate_shows_old_and_new(console, measuring):
    result = console("doctor", "--recalibrate", "--target-model", "Qwen3-8B", "--draft-bits", "4")
    assert result.exit_code == 0 and "Measured, in 5 s." in result.stderr
    before, now = result.stdout.split("before\n")[1].split("now\n")
    assert "1.50 tokens a round" in before and "10.25 tokens a round (never)" in now
    assert "900" in now and "900" not in before
    [made] = console.made
    assert (made.target_model, made.draft_bits) == ("Qwen3-8B", 4) and made.closed
    assert made.mode == "on", "loading measures nothing by itself"


def test_recalibrate_says_where_nothing_was_known(console, monkeypatch):
    again = Again(None, CostCurve(NEW, 8), "Measured.")
    monkeypatch.setattr(FakeGenerator, "measure_costs", lambda self: again, raising=False)
    assert "nothing was known" in console("doctor", "--recalibrate").stdout
    found = json.loads(console("doctor", "--recalibrate", "--json").stdout)
    assert found["before"]["depths"] == [] and len(found["now"]["depths"]) == 2


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--recalibrate", "--diagnose"], "one after the other"),
        (["--recalibrate", "--mode", "auto"], "--mode changes nothing"),
        (["--recalibrate", "--temperature", "1"], "--temperature changes nothing"),
        (["--recalibrate", "--draft-bits", "3"], "--draft-bits is 3"),
        (["--target-model", "x"], "goes with --diagnose or --recalibrate"),
        (["--temperature", "1"], "--temperature goes with --diagnose; give that too"),
    ],
)
def test_what_means_nothing_is_refused_before_anything_is_loaded(console, options, sentence):
    result = console("doctor", *options)
    assert (result.exit_code, result.stdout, console.made) == (2, "", [])
    assert sentence in result.stderr


def test_a_setting_that_is_not_understood_is_a_problem(console, monkeypatch):
    monkeypatch.setenv("DFLASH_COSTS", "of")
    result = console("doctor")
    assert result.exit_code == 1 and "DFLASH_COSTS is 'of'" in result.stdout.split("problems\n")[1]
