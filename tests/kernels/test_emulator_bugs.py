"""Bugs planted in working kernels: each is noticed, most with a diagnosis."""

import re
from dataclasses import dataclass, replace
from typing import Literal

import pytest
from tests import metal_emulator as emulator
from tests.metal_emulator.samples import FIRST_PASS, Attention, Form, Sample

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
SIMD_BARRIER = "simdgroup_barrier(mem_flags::mem_threadgroup);"
TOLERANCE = 3e-3  # float16 results of the kernels as they are stay below a third of this


@dataclass(frozen=True)
class Bug:
    """A change to the text of a kernel, and what must be said about it."""

    name: str
    old: str
    new: str
    said: str | None  # a pattern for the fault, LINE for the changed line; None: only the numbers are wrong
    form: Form = "vector"
    part: Literal["source", "header"] = "source"
    occurrence: int = 1  # which `old` is replaced
    case: dict[str, int] | None = None

    def __str__(self) -> str:
        return self.name

    def planted(self) -> Sample:
        text, at = self._place()
        return replace(
            FIRST_PASS[self.form], **{self.part: text[:at] + self.new + text[at + len(self.old) :]}
        )

    def pattern(self) -> str:
        text, at = self._place()
        assert self.said is not None
        return self.said.replace("LINE", str(1 + text.count("\n", 0, at)))

    def _place(self) -> tuple[str, int]:
        text, at = getattr(FIRST_PASS[self.form], self.part), -1
        for _ in range(self.occurrence):
            at = text.index(self.old, at + 1)
        return text, at


QUICK = [
    Bug(
        "missing barrier after the load of a tile",
        BARRIER,
        "",
        r"data race on [kv]_tile|uninitialised threadgroup memory [kv]_tile",
        occurrence=2,
    ),
    Bug(
        "context read past its capacity",
        "if (j < ctx_len) {",
        "if (j < total) {",
        r"out-of-bounds read of 2 bytes at [kv]_ctx \+\d+ \(size 25600 bytes\).*attention_vector.header.metal:14",
        part="header",
    ),
    Bug(
        "wrong head offset, reads another head",
        "k_ctx + hkv * cap * D",
        "k_ctx + hkv * ctx_len * D",
        None,
    ),
]
MORE = [
    Bug(
        "output never written", "l_part[out] = l[r];", "", r"output l_part: 192 of 192 elements never written"
    ),
    Bug(
        "device pointer to threadgroup memory",
        "const device T* qr = q +",
        "const device T* qr = k_tile; qr = q +",
        r"attention_vector.metal:LINE:\d+: error: cannot initialize a variable of type .*device",
    ),
    Bug("missing barrier before the next tile", BARRIER, "", r"data race on [kv]_tile"),
    Bug(
        "barrier for the wrong memory",
        BARRIER,
        "threadgroup_barrier(mem_flags::mem_device);",
        r"data race on [kv]_tile",
        occurrence=2,
    ),
    Bug(
        "missing simdgroup_barrier after the scores",
        SIMD_BARRIER,
        "",
        r"data race on s_tile|uninitialised threadgroup memory s_tile",
        form="matrix",
    ),
    Bug(
        "missing simdgroup_barrier after the probabilities",
        SIMD_BARRIER,
        "",
        r"data race on p_tile|uninitialised threadgroup memory p_tile",
        form="matrix",
        occurrence=2,
    ),
    Bug(
        "block rows read past their end",
        "} else if (j < total) {",
        "} else {",
        r"out-of-bounds read of 2 bytes at k_blk",
        part="header",
    ),
    Bug(
        "threadgroup array overrun",
        "threadgroup T k_tile[BK * D];",
        "threadgroup T k_tile[BK * D - 4];",
        r"out-of-bounds write of 2 bytes at k_tile \+\d+ \(size 4088 bytes\)",
    ),
    Bug(
        "private array overrun",
        "i < PER; i++) {\n    o[r][i] = 0;",
        "i <= PER; i++) { o[r][i] = 0;",
        r"array index out of bounds\) at attention_vector.metal:LINE",
    ),
    Bug(
        "one row too few written",
        "if (row >= ROWS) {\n    break;",
        "if (row >= ROWS - 1) {\n    break;",
        r"elements never written",
    ),
    Bug("missing guard of lane 0", "if (lane == 0) {", "if (true) {", r"data race on m_part"),
    Bug(
        "split left out of the output's offset",
        "* splits + split;",
        "* splits;",
        r"data race on [oml]_part .*of another threadgroup",
    ),
    Bug("uninitialised accumulator", "l[r] = 0;", "", None),
    Bug(
        "divergent simd_sum",
        "l[r] = l[r] * factor + simd_sum(p);",
        "if (p > 0) { l[r] = l[r] * factor + simd_sum(p); }",
        r"divergent SIMD-group: simd_sum at attention_vector.metal:LINE reached by \d+ of 32 lanes",
    ),
    Bug(
        "early return before a barrier",
        "constexpr int PER = D / 32;",
        "constexpr int PER = D / 32; if (simdgroup_index_in_threadgroup == 7) { return; }",
        r"threadgroup_barrier at attention_vector.metal:37 reached by 224 of 256 threads",
    ),
    Bug(
        "barrier in a branch that not all threads take",
        BARRIER,
        "if (sg < 4) { " + BARRIER + " }",
        r"divergent threadgroup_barrier|data race|uninitialised",
        occurrence=2,
    ),
    Bug(
        "-inf as the maximum of a tile that is masked as a whole",
        "const float new_m = max(m[r], simd_max(s));",
        "const float new_m = max(m[r] == Limits<float>::finite_min ? -INFINITY : m[r], simd_max(s == "
        "Limits<float>::finite_min ? -INFINITY : s));",
        None,
        case={"window": 20},
    ),
    Bug(
        "misaligned vector load",
        "s += float(qr[d]) * float(k_tile[lane * D + d]);",
        "vec<T, 4> w = *(const threadgroup vec<T, 4>*)(k_tile + lane * D + 1); s += float(qr[d]) * float(w.x);",
        r"misaligned access\) at attention_vector.metal:LINE",
    ),
    Bug(
        "index overflows 32 bits",
        "const int hkv = threadgroup_position_in_grid.y;",
        "const int big = 1 << 20; const int hkv = threadgroup_position_in_grid.y + (big * (cap * 64) == 1);",
        r"signed integer overflow \(multiply\)",
    ),
    Bug(
        "pointer without an address space",
        "const device T* qr = q +",
        "const T* qr = q +",
        r"attention_vector.metal:LINE: `T\* qr`: a pointer or reference needs an address space",
    ),
    Bug(
        "thread pointer to threadgroup memory",
        "const device T* qr = q +",
        "thread T* kt = k_tile; const device T* qr = q +",
        r"cannot initialize a variable of type",
    ),
    Bug(
        "double",
        "float s = 0;",
        "double s = 0;",
        r"attention_vector.metal:LINE: `double`: double does not exist",
    ),
    Bug("non-ASCII comment", "// q [Hq", "// q \u2192 [Hq", r"attention_vector.metal:LINE: non-ASCII"),
    Bug(
        "too much threadgroup memory",
        "threadgroup T k_tile[BK * D];",
        "threadgroup T k_tile[BK * D * 4];",
        r"threadgroup memory: 40960 bytes with v_tile exceed the limit of 32768",
        case={"head_dim": 128},
    ),
    Bug(
        "shuffle from a lane that does not exist",
        "const float pj = simd_shuffle(p, ushort(j));",
        "const float pj = simd_shuffle(p, ushort(j + 1));",
        r"shuffle from a lane index >= 32 at attention_vector.metal:LINE",
    ),
]


@pytest.mark.parametrize(
    ("bug", "seed"),
    [(bug, 0) for bug in QUICK] + [pytest.param(bug, 1, marks=pytest.mark.slow) for bug in QUICK + MORE],
    ids=str,
)
def test_planted_bugs_are_noticed(bug: Bug, seed: int) -> None:
    problem = Attention.random(**(bug.case or {}))
    factory = emulator.factory(mode="check", seed=seed)
    if bug.said is None:
        # `not <=` and not `>`: the error may be NaN
        assert not problem.error(problem.run(bug.form, factory, first_pass=bug.planted())) <= TOLERANCE
        return
    with pytest.raises(emulator.KernelFault) as caught:
        problem.run(bug.form, factory, first_pass=bug.planted())
    assert re.search(bug.pattern(), str(caught.value)), caught.value


@pytest.mark.parametrize(
    "seed", [1, pytest.param(0, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("form", ["vector", "matrix"])
def test_the_same_kernels_without_a_bug_pass(form: Form, seed: int) -> None:
    problem = Attention.random(window=20)
    out = problem.run(form, emulator.factory(mode="check", seed=seed))
    assert problem.error(out) < TOLERANCE / 3
