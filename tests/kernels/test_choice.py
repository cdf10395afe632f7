"""Which kernels are taken: right ones that are faster, the same for every process, fixed for a generation."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import FrozenInstanceError, replace

import mlx.core as mx
import pytest

from dflash_mlx.errors import UsageError
from dflash_mlx.kernels import verdicts
from dflash_mlx.kernels.choice import NO_KERNELS, Chooser, Contest, mode_from_environment
from dflash_mlx.kernels.verdicts import Machine, Verdict

MACHINE = Machine("Apple M9", "macOS 27.0", "0.32.4")


def factory(**keywords):
    raise AssertionError("these contests build nothing")


class Arms:
    """A contest whose arms say what they cost, on a clock that only they move."""

    def __init__(self, stock: float = 10.0, kernel: float = 5.0) -> None:
        self.now = 0.0
        self.stock, self.kernel = stock, kernel
        self.ran: list[str] = []

    def clock(self) -> float:
        return self.now

    def contest(self, answer=lambda x: [2 * x], name: str = "doubling", shape_class: str = "n8") -> Contest:
        def reference(x: mx.array) -> Sequence[mx.array]:
            self.now += self.stock
            self.ran.append("stock")
            return [2 * x]

        def candidate(factory, x: mx.array) -> Sequence[mx.array]:
            self.now += self.kernel
            self.ran.append("kernel")
            return answer(x)

        return Contest(
            kernel=name,
            digest="0123456789",
            shape_class=shape_class,
            bound=1e-3,
            bytes=1 << 30,
            inputs=lambda seed: (mx.random.normal((8,), key=mx.random.key(seed)),),
            reference=reference,
            candidate=candidate,
        )

    def chooser(self, path=None, mode="auto", machine=MACHINE) -> Chooser:
        return Chooser(path, mode=mode, factory=factory, machine=machine, clock=self.clock)


@pytest.mark.parametrize(
    ("kernel", "taken"), [(5.0, True), (9.6, True), (9.8, False), (10.0, False), (30.0, False)]
)
def test_a_kernel_is_taken_when_it_is_right_and_three_percent_faster(kernel, taken):
    arms = Arms(stock=10.0, kernel=kernel)
    chooser = arms.chooser()
    choices = chooser.prepare([arms.contest()])
    assert choices.factory_for("doubling", "n8") is (factory if taken else None)
    assert str(choices) == ("doubling" if taken else "stock")
    (row,) = chooser.table()
    assert row.chosen == ("kernel" if taken else "stock")
    assert (row.stock_ms, row.kernel_ms) == pytest.approx((10_000, kernel * 1000))
    assert chooser.notes == []


def test_the_arms_are_timed_in_turn_so_that_heat_hits_both():
    arms = Arms()
    arms.chooser().prepare([arms.contest()])
    timed = arms.ran[4:]  # after the two checks
    samples = [timed[i] for i in range(0, len(timed), 16)]
    assert samples[:6] == ["stock", "kernel", "stock", "kernel", "kernel", "stock"]
    assert samples.count("stock") == samples.count("kernel") == 8


@pytest.mark.parametrize(
    "answer",
    [
        lambda x: [2 * x + mx.where(mx.arange(8) == 3, 0.01, 0.0)],
        lambda x: [2 * x + mx.array(float("nan"))],
        lambda x: [(2 * x)[:7]],
        lambda x: [(2 * x).astype(mx.float16)],
    ],
    ids=["one element off", "nan", "another shape", "another dtype"],
)
@pytest.mark.parametrize("mode", ["auto", "on"])
def test_a_wrong_kernel_is_refused_aloud_however_fast(answer, mode, tmp_path):
    arms = Arms(kernel=0.1)
    chooser = arms.chooser(tmp_path / "kernels.json", mode)
    assert chooser.prepare([arms.contest(answer)]) is NO_KERNELS
    (note,) = chooser.notes
    assert "doubling" in note and "wrong" in note and "n8" in note
    again = arms.chooser(tmp_path / "kernels.json", mode)
    assert again.prepare([arms.contest(answer)]) is NO_KERNELS
    assert again.table()[0].why.startswith("wrong")


def test_integers_must_be_equal():
    arms = Arms()
    whole = replace(
        arms.contest(),
        reference=lambda x: [mx.arange(1000)],
        candidate=lambda factory, x: [mx.where(mx.arange(1000) == 7, 8, mx.arange(1000))],
    )
    assert arms.chooser().prepare([whole]) is NO_KERNELS


def test_a_kernel_is_held_to_the_exact_result_where_the_reference_rounds():
    arms = Arms()
    coarse = replace(arms.contest(), exact=lambda x: [2 * x + 0.01])
    chooser = arms.chooser()
    assert chooser.prepare([coarse]) is NO_KERNELS  # equal to the reference, off from the exact result
    assert chooser.table()[0].why.startswith("wrong")


def test_a_kernel_that_does_not_build_is_reported_once_with_the_compilers_first_line(tmp_path):
    def broken(x):
        raise RuntimeError(
            "[metal::Device] Unable to build metal library from source\n"
            "program_source:31:7: error: no member named 'thread_elements'\n"
            "program_source:90:1: error: another"
        )

    arms = Arms()
    chooser = arms.chooser(tmp_path / "kernels.json")
    contests = [arms.contest(broken, shape_class=name) for name in ("n8", "n16")]
    assert chooser.prepare(contests) is NO_KERNELS
    assert chooser.prepare(contests) is NO_KERNELS
    (note,) = chooser.notes
    assert "doubling" in note and "program_source:31:7: error: no member named 'thread_elements'" in note
    assert {row.chosen for row in chooser.table()} == {"stock"}
    later = arms.chooser(tmp_path / "kernels.json")
    assert later.prepare(contests) is NO_KERNELS and later.notes == []


def test_a_failure_that_is_not_the_kernels_own_is_tried_again_in_the_next_run(tmp_path):
    def full(x):
        raise RuntimeError(
            "[metal::malloc] Attempting to allocate 99 bytes which is greater than the maximum"
        )

    arms = Arms()
    chooser = arms.chooser(tmp_path / "kernels.json")
    assert chooser.prepare([arms.contest(full)]) is NO_KERNELS
    assert chooser.prepare([arms.contest()]) is NO_KERNELS  # not within this one
    assert len(chooser.notes) == 1 and "metal::malloc" in chooser.notes[0]
    again = arms.chooser(tmp_path / "kernels.json")
    assert again.prepare([arms.contest()]).factory_for("doubling", "n8") is factory


def test_memory_that_runs_out_in_the_race_ends_no_generation():
    arms = Arms()

    def later(x):
        if len(arms.ran) > 10:
            raise RuntimeError("[metal::malloc] out of memory")
        return [2 * x]

    chooser = arms.chooser()
    assert chooser.prepare([arms.contest(later)]) is NO_KERNELS and len(chooser.notes) == 1


def test_what_was_found_is_kept_for_the_next_run(tmp_path):
    path = tmp_path / "deep" / "kernels.json"
    first = Arms()
    first.chooser(path).prepare([first.contest()])
    second = Arms(kernel=99.0)
    assert second.chooser(path).prepare([second.contest()]).factory_for("doubling", "n8") is factory
    assert second.ran == []


@pytest.mark.parametrize(
    "other",
    [
        MACHINE._replace(chip="Apple M8"),
        MACHINE._replace(system="macOS 27.1"),
        MACHINE._replace(mlx="0.33.0"),
    ],
)
def test_another_machine_system_or_mlx_races_anew_and_keeps_its_own_lines(tmp_path, other):
    path = tmp_path / "kernels.json"
    here, there = Arms(), Arms(kernel=99.0)
    here.chooser(path).prepare([here.contest()])
    assert there.chooser(path, machine=other).prepare([there.contest()]) is NO_KERNELS
    assert there.ran
    assert Arms().chooser(path).table()[0].chosen == "kernel"
    assert Arms().chooser(path, machine=other).table()[0].chosen == "stock"


def test_another_text_of_a_kernel_races_anew(tmp_path):
    path = tmp_path / "kernels.json"
    arms = Arms()
    arms.chooser(path).prepare([arms.contest()])
    arms.ran.clear()
    arms.chooser(path).prepare([replace(arms.contest(), digest="abcdef0123")])
    assert arms.ran


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b"null",
        b"[]",
        b'{"version": 1}',
        b'{"version": 1, "verdicts": 3}',
        b'{"version": 1, "verdicts": [7, {}, {"kernel": "doubling"}]}',
    ],
)
def test_a_damaged_file_is_said_once_and_made_again(tmp_path, damage):
    path = tmp_path / "kernels.json"
    path.write_bytes(damage)
    arms = Arms()
    chooser = arms.chooser(path)
    assert chooser.prepare([arms.contest()]).factory_for("doubling", "n8") is factory
    assert len(chooser.notes) == 1 and str(path) in chooser.notes[0]
    assert len(json.loads(path.read_text())["verdicts"]) == 1
    again = Arms().chooser(path)
    assert [row.chosen for row in again.table()] == ["kernel"] and again.notes == []


def test_damaged_lines_do_not_cost_the_whole_ones(tmp_path):
    path = tmp_path / "kernels.json"
    arms = Arms()
    arms.chooser(path).prepare([arms.contest()])
    content = json.loads(path.read_text())
    content["verdicts"] += [
        {**content["verdicts"][0], "outcome": "best"},
        {**content["verdicts"][0], "kernel_ms": "1"},
    ]
    path.write_text(json.dumps(content))
    arms.ran.clear()
    chooser = arms.chooser(path)
    assert chooser.prepare([arms.contest()]).factory_for("doubling", "n8") is factory
    assert arms.ran == [] and len(chooser.notes) == 1


def test_processes_that_write_at_once_lose_nothing(tmp_path):
    path = tmp_path / "kernels.json"
    script = (
        "import sys; from pathlib import Path\n"
        "from dflash_mlx.kernels.verdicts import Machine, Verdict, merge\n"
        "for i in range(25):\n"
        f"    merge(Path({str(path)!r}), Machine(*{tuple(MACHINE)!r}),"
        " [Verdict('k', 'd', f'{sys.argv[1]} {i}', 'slow', 'slow')])\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", script, name]) for name in "ab"]
    while any(writer.poll() is None for writer in writers):
        found, trouble = verdicts.read(path, MACHINE)  # a reader never sees half a file
        assert trouble is None
    assert [writer.returncode for writer in writers] == [0, 0]
    found, _ = verdicts.read(path, MACHINE)
    assert {verdict.shape_class for verdict in found} == {f"{name} {i}" for name in "ab" for i in range(25)}
    assert sorted(file.name for file in tmp_path.iterdir()) == ["kernels.json", "kernels.json.lock"]


def test_the_process_that_came_first_decides_for_both(tmp_path):
    path = tmp_path / "kernels.json"
    arms = Arms()
    other = Verdict("doubling", "0123456789", "n8", "slow", "another process found so", 1.0, 2.0)

    def meanwhile(x):
        verdicts.merge(path, MACHINE, [other])
        return [2 * x]

    chooser = arms.chooser(path)
    assert chooser.prepare([arms.contest(meanwhile)]) is NO_KERNELS
    assert chooser.table()[0].why == "another process found so"


def test_a_folder_that_cannot_be_written_is_said_and_changes_nothing_else(tmp_path):
    (tmp_path / "file").write_text("")
    arms = Arms()
    chooser = arms.chooser(tmp_path / "file" / "kernels.json")
    assert chooser.prepare([arms.contest()]).factory_for("doubling", "n8") is factory
    assert any("could not be kept" in note for note in chooser.notes)


def test_a_choice_never_changes_once_a_generation_holds_it():
    arms = Arms()
    chooser = arms.chooser()
    held = chooser.prepare([arms.contest()])
    chooser.prepare([arms.contest(shape_class="n16")])
    assert held.factory_for("doubling", "n16") is None  # first seen inside a generation: the reference
    with pytest.raises(FrozenInstanceError):
        held.factory = None
    assert held.factory_for("doubling", "n8") is factory


def test_off_runs_nothing_and_on_takes_a_right_kernel_untimed(tmp_path):
    path = tmp_path / "kernels.json"
    arms = Arms(kernel=99.0)
    assert arms.chooser(path, "off").prepare([arms.contest()]) is NO_KERNELS
    assert arms.ran == []
    assert arms.chooser(path, "on").prepare([arms.contest()]).factory_for("doubling", "n8") is factory
    assert arms.ran == ["stock", "kernel"] * 2
    assert arms.chooser(path, "auto").prepare([arms.contest()]) is NO_KERNELS  # now it is timed, and slow
    assert len(arms.ran) > 4
    assert arms.chooser(path, "on").prepare([arms.contest()]).factory_for("doubling", "n8") is factory
    assert "DFLASH_KERNELS is on" in arms.chooser(path, "on").table()[0].why


@pytest.mark.skipif(mx.metal.is_available(), reason="this machine has Metal")
def test_without_metal_nothing_is_raced_and_on_says_why():
    arms = Arms()
    for mode, notes in (("auto", 0), ("on", 1)):
        chooser = Chooser(None, mode=mode, machine=MACHINE, clock=arms.clock)
        assert chooser.prepare([arms.contest()]) is NO_KERNELS
        assert len(chooser.notes) == notes
    assert arms.ran == []


def test_the_environment_is_understood_or_refused():
    assert mode_from_environment({}) == mode_from_environment({"DFLASH_KERNELS": " AUTO "}) == "auto"
    assert mode_from_environment({"DFLASH_KERNELS": "off"}) == "off"
    with pytest.raises(UsageError, match="'fast'.*auto, off, on"):
        mode_from_environment({"DFLASH_KERNELS": "fast"})
