"""`kv_bits`, `draft_window` and `draft_bits` at the public surface: together, honoured, told, and one text."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_mlx import DFlashGenerator, calibration, engine
from dflash_mlx.cli.record import comparison_record, result_record
from dflash_mlx.conversation import Conversations
from dflash_mlx.errors import UnsupportedError, UsageError
from tests.kit.planned import PlannedDrafter
from tests.loading.checkpoints import VOCAB, write_draft, write_target, write_wide_target

LONG = [(7 * j * j + 5 * j + 3) % 300 for j in range(90)]
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 7}
ALL = {"kv_bits": 4, "draft_window": 16, "draft_bits": 8}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("pair")
    # Widths that can be packed; the drafter's own are not.
    return write_wide_target(root / "target", eos_token_id=None), write_draft(root / "draft")


@pytest.fixture(scope="module")
def runner(folders: tuple[Path, Path]) -> Iterator[DFlashGenerator]:
    with DFlashGenerator(*folders, **ALL) as made:
        yield made


def test_together_they_give_the_text_of_plain_decoding_with_the_same_keys(
    runner: DFlashGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past the drafter's window, the prompt in chunks; against mlx-lm's own loop."""
    monkeypatch.setitem(engine.PREFILL_CHUNK, "cpu", 32)
    for options in ({}, SAMPLED):
        compared = runner.compare(LONG, max_new_tokens=40, **options)
        assert compared.identical
        assert compared.drafted.stats.verified > 0


def test_quantised_keys_are_another_model_and_a_window_is_not(folders: tuple[Path, Path]) -> None:
    texts: dict[str, tuple[int, ...]] = {}
    for name, options in {"none": {}, "window": {"draft_window": 8}, "keys": {"kv_bits": 4}}.items():
        with DFlashGenerator(*folders, **options) as made:
            texts[name] = made.generate(LONG, max_new_tokens=60, **SAMPLED).token_ids
    assert texts["none"] == texts["window"] != texts["keys"]


@pytest.mark.parametrize("accepted", [[0], [3], [7, 7, 1], [0, 7, 7, 4]], ids=["0", "part", "full", "mixed"])
def test_whatever_is_accepted_over_quantised_keys_the_text_is_plain(
    runner: DFlashGenerator, monkeypatch: pytest.MonkeyPatch, accepted: list[int]
) -> None:
    plain = DFlashGenerator(runner.target, mode="off").generate(LONG, max_new_tokens=60, **SAMPLED)
    truth = [*LONG, *plain.token_ids]
    monkeypatch.setattr(engine, "Drafter", lambda *_, **__: PlannedDrafter(truth, accepted, vocab_size=VOCAB))
    monkeypatch.setattr(runner, "_kept", Conversations(10**9))  # of planned drafters alone
    drafted = runner.generate(LONG, max_new_tokens=40, **SAMPLED)
    assert drafted.token_ids == plain.token_ids[:40]
    assert drafted.stats.accept_lengths[:4] == (accepted * 4)[:4]


def test_what_was_given_is_told_with_every_answer(runner: DFlashGenerator) -> None:
    compared = runner.compare(LONG, max_new_tokens=4)
    told = json.loads(json.dumps(comparison_record(compared)))
    assert (told["kv_bits"], told["draft_window"], told["draft_bits"]) == (4, 16, 8)
    assert (told["plain"]["kv_bits"], told["plain"]["draft_window"], told["plain"]["draft_bits"]) == (
        4,
        None,
        None,
    )


def test_unset_is_told_as_none(folders: tuple[Path, Path]) -> None:
    with DFlashGenerator(*folders) as made:
        told = result_record(made.generate("Say it.", max_new_tokens=2))
    assert (told["kv_bits"], told["draft_window"], told["draft_bits"]) == (None, None, None)


def test_a_conversation_goes_on_with_both_as_in_a_cold_run(folders: tuple[Path, Path]) -> None:
    """Turns much longer than the window; what is kept is cut back to where the next prompt parts from it."""
    with DFlashGenerator(*folders, **ALL) as warm, DFlashGenerator(*folders, **ALL, kept_gb=0) as cold:
        prompt = list(LONG)
        for turn in range(3):
            said = warm.generate(prompt, max_new_tokens=30, **SAMPLED)
            assert said.token_ids == cold.generate(prompt, max_new_tokens=30, **SAMPLED).token_ids
            assert (said.stats.reused_tokens > 0) == (turn > 0)
            prompt += [*said.token_ids[: 30 - 9 * turn], 5, 9, 11 + turn]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_bits": 3}, "kv_bits 3: 4, 8 or none"),
        ({"draft_window": 1}, "draft_window 1: expected tokens of the context"),
        ({"draft_window": 7}, "draft_window 7: the drafter drafts blocks of 8 tokens; give 8 or more"),
        ({"mode": "off", "draft_window": 64}, "so draft_window would be ignored; leave one out"),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    folders: tuple[Path, Path], options: dict[str, Any], words: str
) -> None:
    draft = None if options.get("mode") == "off" else folders[1]
    with pytest.raises(UsageError, match=words):
        DFlashGenerator(folders[0], draft, **options)


def test_a_shared_target_is_not_quantised_behind_its_owner_s_back(
    runner: DFlashGenerator, folders: tuple[Path, Path]
) -> None:
    with pytest.raises(UsageError, match="kv_bits is 8, but the shared target .* loaded with kv_bits 4"):
        DFlashGenerator(runner.target, folders[1], kv_bits=8)
    with DFlashGenerator(runner.target, folders[1]) as other:
        assert other.generate("Say it.", max_new_tokens=2).stats.kv_bits == 4


def test_heads_too_narrow_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="multiple of 32; those of narrow are"):
        DFlashGenerator(write_target(tmp_path / "narrow"), mode="off", kv_bits=4)


def test_costs_are_measured_for_each_of_them(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: list[dict[str, str]] = []

    def costs(bench: Any, key: dict[str, str], **_: Any) -> calibration.Known:
        keys.append(key)
        return calibration.Known(None, ())

    monkeypatch.setenv("DFLASH_COSTS", "auto")
    monkeypatch.setattr(calibration, "costs", costs)
    for options in ({}, {"kv_bits": 4}, {"kv_bits": 8}, {"draft_window": 8}, {"draft_window": 16}):
        with DFlashGenerator(*folders, **options):
            pass
    assert len({tuple(sorted(key.items())) for key in keys}) == 5


def test_memory_of_a_long_context_is_smaller_by_what_was_given(folders: tuple[Path, Path]) -> None:
    """A drafter's context that stays at its window, and keys of a quarter or an eighth of float32 with scales."""
    held: dict[str, tuple[int, int]] = {}
    for name, options in {"none": {}, "both": {"kv_bits": 4, "draft_window": 16}}.items():
        with DFlashGenerator(*folders, **options) as made:
            made.generate([*LONG, *LONG, *LONG, *LONG], max_new_tokens=8)
            [state] = made._kept._states
            drafter = made._engine.drafter()
            assert drafter is not None
            drafter.restore(state.context)
            cache = sum(layer.nbytes for layer in state.cache)
            held[name] = cache, drafter.nbytes_of([state.context])
    assert held["both"][0] == pytest.approx(held["none"][0] * 6 / 32, rel=0.01)
    assert held["both"][1] <= held["none"][1] / 2
