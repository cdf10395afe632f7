"""The greedy walk: tokens with the lowest id on ties, and how far the proposal agrees, in one array."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest
from tests import metal_emulator as emulator
from tests.metal_emulator.support import require

from dflash_mlx.kernels.choice import NO_KERNELS, Choices, Chooser
from dflash_mlx.kernels.greedy_walk import (
    contest,
    greedy_walk,
    greedy_walk_kernel,
    greedy_walk_reference,
    shape_class,
    supports,
)


@dataclass(frozen=True)
class Case:
    """Logits of one pass; `agree` proposed tokens are right."""

    rows: int = 4
    vocabulary: int = 300
    agree: int = 2
    dtype: mx.Dtype = mx.float32
    levels: int = 0  # how many different logits there are, for ties; 0: as many as the dtype gives

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("mlx.core.")
        return f"s{self.rows}-v{self.vocabulary}-a{self.agree}-{kind}-l{self.levels}"

    def arrays(self, seed: int = 0) -> tuple[mx.array, mx.array]:
        keys = mx.random.split(mx.random.key(seed), 2)
        logits = mx.random.normal((self.rows, self.vocabulary), key=keys[0])
        if self.levels:
            logits = mx.random.randint(0, self.levels, logits.shape, key=keys[1])
        logits = logits.astype(self.dtype)
        right = mx.array(plain_tokens(logits)[:-1], mx.int32)
        wrong = (right + 1) % self.vocabulary
        return logits, mx.where(mx.arange(self.rows - 1) == self.agree, wrong, right)


def plain_tokens(logits: mx.array) -> list[int]:
    return [int(np.argmax(row)) for row in np.array(logits.astype(mx.float32))]  # NumPy's takes the first


def emulated(mode: str, seed: int = 0):
    require()
    return emulator.factory(mode=mode, seed=seed)


def check(case: Case, run, seed: int = 0) -> None:
    logits, proposal = case.arrays(seed)
    walk = run(logits, proposal)
    assert walk.dtype == mx.int32 and walk.shape == (case.rows + 1,)
    accepted, *tokens = walk.tolist()
    assert tokens == plain_tokens(logits), str(case)
    assert accepted == min(case.agree, case.rows - 1), str(case)


def small_cases() -> list[Case]:
    cases = [Case(rows=s, agree=a) for s in (2, 3, 7, 16, 31, 32) for a in {0, 1, s // 2, s - 2, s - 1}]
    # inside a SIMD-group, a threadgroup, a part of 4096 ids, and at the edges of parts
    cases += [
        Case(vocabulary=v, dtype=t) for v in (7, 31, 32, 33, 255, 256, 257) for t in (mx.float32, mx.float16)
    ]
    cases += [
        Case(rows=2, vocabulary=v, dtype=mx.bfloat16, levels=3) for v in (9, 4095, 4096, 4097, 8192, 8193)
    ]
    cases += [Case(levels=k) for k in (1, 2, 5)]
    return cases


REALISTIC = [
    Case(16, 151936, 9, mx.bfloat16),
    Case(5, 248320, 4, mx.float16),
    Case(8, 49152, 0, mx.float32),
]


@pytest.mark.parametrize("case", small_cases(), ids=str)
def test_the_definition_takes_the_lowest_id_and_counts_the_agreeing_prefix(case):
    check(case, greedy_walk_reference)


def kernel_of(factory):
    return lambda logits, proposal: greedy_walk_kernel(logits, proposal, factory=factory)


def test_the_kernel_equals_the_definition_under_checks():
    """The fast case of the long list below: two parts, ties, a last part that ends inside a SIMD-group."""
    check(
        Case(rows=5, vocabulary=4133, agree=3, dtype=mx.bfloat16, levels=4), kernel_of(emulated("check", 1))
    )


def test_the_kernel_equals_the_definition_on_a_vocabulary():
    check(Case(7, 49152, 4, mx.bfloat16), kernel_of(emulated("fast")))


def test_a_vocabulary_of_more_parts_than_lanes_is_searched_to_its_end():
    """Parts 0 and 32 fall to the same lane of the merge; the lower id wins also there."""
    last, low, high = 151935, 5, 32 * 4096 + 5
    ids = mx.arange(151936)
    logits = mx.stack([ids == last, (ids == low) | (ids == high), (ids == high) | (ids == last)])
    walk = greedy_walk_kernel(
        logits.astype(mx.float16), mx.array([last, low], mx.int32), factory=emulated("fast")
    )
    assert walk.tolist() == [2, last, low, high]


@pytest.mark.slow
@pytest.mark.parametrize("case", small_cases(), ids=str)
def test_odd_shapes_under_checks(case):
    for seed in range(4):
        check(case, kernel_of(emulated("check", seed)), seed)


@pytest.mark.slow
@pytest.mark.parametrize("case", REALISTIC, ids=str)
def test_real_vocabularies(case):
    check(case, kernel_of(emulated("fast", seed=2)))


@pytest.mark.metal
@pytest.mark.skipif(not mx.metal.is_available(), reason="needs a Metal device")
@pytest.mark.parametrize("case", small_cases() + REALISTIC, ids=str)
def test_on_metal(case):
    check(case, kernel_of(mx.fast.metal_kernel))


@pytest.mark.parametrize("value", [float("-inf"), float("inf"), float("nan"), 0.0, -3e38])
def test_a_row_without_a_largest_logit_still_names_a_token(value):
    """Rows that are all -inf or all NaN come from broken processors; a token outside the vocabulary never does."""
    rows = mx.full((2, 5000), value)
    walk = greedy_walk_kernel(rows, mx.array([0], mx.int32), factory=emulated("check"))
    assert walk.tolist() == [1, 0, 0]


def test_minus_infinity_loses_to_everything():
    row = mx.where(mx.arange(5000) == 4999, -3e38, float("-inf"))
    walk = greedy_walk_kernel(mx.stack([row, row]), mx.array([4999], mx.int32), factory=emulated("check"))
    assert walk.tolist() == [1, 4999, 4999]


def test_agreement_after_a_wrong_token_counts_for_nothing():
    case = Case(rows=6, agree=1)
    logits, proposal = case.arrays()
    tokens = plain_tokens(logits)
    assert proposal.tolist()[2:] == tokens[2:-1]  # right again behind the wrong one
    for run in (greedy_walk_reference, kernel_of(emulated("check"))):
        assert run(logits, proposal).tolist() == [1, *tokens]


class Refusing:
    """A factory that no call may reach."""

    def __call__(self, **_):
        raise AssertionError("a kernel was built")


@pytest.mark.parametrize("rows", [1, 33])
def test_outside_the_limits_the_reference_answers(rows):
    logits, proposal = mx.zeros((rows, 40)), mx.zeros((rows - 1,), mx.int32)
    assert not supports(logits, proposal)
    choices = Choices(frozenset({("greedy_walk", shape_class(logits))}), Refusing())
    assert greedy_walk(logits, proposal, choices=choices).tolist() == [rows - 1] + [0] * rows


def test_limits_see_dtypes_and_lengths():
    logits, proposal = Case().arrays()
    assert supports(logits, proposal)
    assert not supports(logits, proposal[:-1])
    assert not supports(logits, proposal.astype(mx.uint32))
    assert not supports(logits.astype(mx.int32), proposal)
    assert not supports(logits[None], proposal)


def test_a_call_runs_what_was_chosen_for_its_class():
    logits, proposal = Case().arrays()
    choices = Choices(frozenset({("greedy_walk", shape_class(logits))}), Refusing())
    with pytest.raises(AssertionError, match="a kernel was built"):
        greedy_walk(logits, proposal, choices=choices)
    other = Case(rows=9).arrays()
    assert mx.array_equal(greedy_walk(*other, choices=choices), greedy_walk_reference(*other))
    got = greedy_walk(logits, proposal, choices=NO_KERNELS)
    assert mx.array_equal(got, greedy_walk_reference(logits, proposal))


def test_a_contest_passes_the_kernel():
    case = contest(4, 300, mx.bfloat16)
    assert case.shape_class == shape_class(Case(dtype=mx.bfloat16).arrays()[0])
    chooser = Chooser(None, mode="on", factory=emulated("fast"))
    assert chooser.prepare([case]).factory_for("greedy_walk", case.shape_class) and not chooser.notes


FAULTS = [
    ("group_id[g] < group_id[0]", "group_id[g] > group_id[0]"),
    ("min(from + SPAN, V)", "from + SPAN"),
    ("simd_min(top == simd_top ? top_id : 2147483647)", "simd_max(top == simd_top ? top_id : 0)"),
    ("if (thread_index_in_simdgroup == 0) {", "{"),
    ("if (thread_index_in_threadgroup == 0) {", "{"),
    ("i += 256", "i += 512"),
    ("threadgroup_barrier(mem_flags::mem_threadgroup);", ""),
    ("threadgroup_barrier(mem_flags::mem_threadgroup);", "simdgroup_barrier(mem_flags::mem_threadgroup);"),
    ("row * parts + part", "row * parts"),
    ("simd_min(top == row_top ? top_id : 2147483647)", "simd_max(top == row_top ? top_id : 0)"),
    ("accepted < S - 1 && ", ""),
    ("if (row == 0 && lane == 0) {", "if (lane == 0) {"),
    ("walk[1 + row]", "walk[row]"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("line", "fault"), FAULTS, ids=range(len(FAULTS)))
def test_a_planted_fault_is_seen(line, fault):
    planted = []

    def factory(*, source: str, header: str, **rest):
        planted.append(source.count(line) + header.count(line))
        return emulated("check", 1)(
            source=source.replace(line, fault), header=header.replace(line, fault), **rest
        )

    with pytest.raises((emulator.KernelFault, AssertionError)):
        for levels in (0, 4):
            check(Case(5, 4133, 4, mx.bfloat16, levels), kernel_of(factory))
    assert sum(planted) >= 1, "the body no longer has this line"
