"""What each Metal kernel moves and computes on real shapes, against the least possible; with --time, how long.

    uv run python benchmarks/kernel_counts.py            # counts: any machine, nothing is evaluated
    uv run python benchmarks/kernel_counts.py --time     # the same with measured times: a Mac with Metal

Each kernel is launched by its own Python function into a recorder, so that grids, templates and splits are the
real ones; from them and the rules that its body states follow the loads of every threadgroup.

* least: every input byte that matters once, every output byte once.
* moved: as issued, but where the distinct bytes of an operand fit in 4 MiB (half the smallest system cache of
  an Apple chip) reading them again counts nothing, and neither does scratch of that size, which one launch
  writes, the next reads, and nobody needs afterwards. A model of the cache, not a measurement.
* issued: all loads and stores of all threadgroups, whatever cache may serve them: what moved can be at most.
* SIMD/core: SIMD-groups that a core holds at once on a GPU of 40 cores: bounded by how many threadgroups there
  are and by 32 KiB of threadgroup memory. Registers bound it too; only Apple's compiler knows them.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import dflash_mlx  # noqa: F401  before mlx: it puts BLAS in front

sys.path.insert(0, str(Path(__file__).parent))

import mlx.core as mx
from kernel_shapes import Case, cases

CACHE = 4 << 20
CORES = 40
THREADGROUP_MEMORY = 32 << 10


@dataclass
class Launch:
    """One launch as a kernel's Python function made it; arrays are never evaluated but for tiny parameters."""

    kernel: str
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    template: dict
    inputs: dict[str, mx.array]
    outputs: dict[str, mx.array]

    @property
    def groups(self) -> tuple[int, int, int]:
        return tuple(-(-g // t) for g, t in zip(self.grid, self.threadgroup, strict=True))

    @property
    def threadgroups(self) -> int:
        x, y, z = self.groups
        return x * y * z

    @property
    def simd_groups(self) -> int:
        x, y, z = self.threadgroup
        return x * y * z // 32


class Recorder:
    """Stands in for `mx.fast.metal_kernel` and keeps what it is asked for."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def __call__(self, *, name: str, input_names: list[str], output_names: list[str], **_) -> Callable:
        def launch(*, inputs, output_shapes, output_dtypes, grid, threadgroup, template=None, **_):
            arrays = [mx.array(value) if not isinstance(value, mx.array) else value for value in inputs]
            outputs = [mx.zeros(s, d) for s, d in zip(output_shapes, output_dtypes, strict=True)]
            self.launches.append(
                Launch(
                    kernel=name.rpartition("_")[0],  # without the digest
                    grid=grid,
                    threadgroup=threadgroup,
                    template=dict(template or []),
                    inputs=dict(zip(input_names, arrays, strict=True)),
                    outputs=dict(zip(output_names, outputs, strict=True)),
                )
            )
            return outputs

        return launch


class Stream(NamedTuple):
    """One operand: its distinct bytes, and those of all loads or stores."""

    name: str
    distinct: int
    issued: int

    @property
    def moved(self) -> int:
        return self.issued if self.distinct > CACHE else min(self.issued, self.distinct)


def scratch(name: str, nbytes: int) -> Stream:
    """What passes from one launch to the next and is dead then."""
    return Stream(name, 0 if nbytes <= CACHE else nbytes, nbytes)


@dataclass
class Count:
    """What one launch does."""

    streams: list[Stream]
    flops: int  # as executed, padding of tiles included
    threadgroup_bytes: int = 0
    launch: Launch | None = None
    working: int | None = None  # threadgroups that do not return at once

    @property
    def resident(self) -> float:
        """SIMD-groups that a core holds, at most."""
        groups = (self.working or self.launch.threadgroups) / CORES
        if self.threadgroup_bytes:
            groups = min(groups, THREADGROUP_MEMORY // self.threadgroup_bytes)
        return groups * self.launch.simd_groups


def count_product(launch: Launch) -> Count:
    """rows_qmm and rows_qmm_gathered."""
    t = launch.template
    x, w, scales = (launch.inputs[name] for name in ("x", "w", "scales"))
    y = launch.outputs["y"]
    width = 8 * t["NT"] * t["SN"]
    rows, depth = x.shape
    columns = w.shape[-2]
    reach = launch.groups[0] * width  # weight rows that lanes ask for; those past the last repeat it
    row_bytes = w.shape[-1] * 4 + 2 * scales.shape[-1] * scales.dtype.size
    tiles, heights = _row_tiles(launch, 8 * t["MT"])
    experts = len({e for e, _ in heights}) if "experts" in launch.inputs else 1
    streams = [
        Stream("weights", experts * columns * row_bytes, tiles * reach * row_bytes),
        # each strip of a threadgroup reads the rows of its tile, its slices a part each
        Stream("x", x.nbytes, launch.groups[0] * t["SN"] * sum(h for _, h in heights) * depth * x.dtype.size),
        Stream("y", y.nbytes, y.nbytes),
    ]
    if "experts" in launch.inputs:
        streams.append(Stream("experts", 4 * rows, 4 * rows * launch.groups[0] * rows))
    # every turn of a SIMD-group multiplies whole tiles; a turn covers 512 / BITS of the depth
    turns = -(-depth // (512 // t["BITS"])) * (512 // t["BITS"])
    flops = 2 * tiles * 8 * t["MT"] * reach * turns
    memory = 4 * t["SK"] * 8 * t["MT"] * width
    return Count(streams, flops, memory, launch, tiles * launch.groups[0])


def _row_tiles(launch: Launch, height: int) -> tuple[int, list[tuple[int, int]]]:
    """Tiles of activation rows, and (expert, rows) of each."""
    if "experts" not in launch.inputs:
        return 1, [(0, len(launch.inputs["x"]))]
    ids = launch.inputs["experts"].tolist()
    heights = []
    for expert in sorted(set(ids)):
        left = ids.count(expert)
        while left > 0:
            heights.append((expert, min(left, height)))
            left -= height
    return len(heights), heights


def count_attention(launch: Launch) -> Count:
    """First pass of block attention, both forms."""
    q, k = launch.inputs["q"], launch.inputs["context_k"]
    context, window, rows = launch.inputs["params"].tolist()
    _, heads, _, dim = q.shape
    size = q.dtype.size
    kv_heads = k.shape[1]
    keys = context - (max(0, min(context, context - window + 1)) if window else 0) + rows
    row_groups, _, splits = launch.groups
    key_bytes = 2 * kv_heads * keys * dim * size
    part, stats = launch.outputs["o_part"].nbytes, launch.outputs["stats"].nbytes
    streams = [
        Stream("keys and values", key_bytes, row_groups * key_bytes),
        Stream("q", q.nbytes, _query_readings(launch, keys) * q.nbytes),
        scratch("parts", part + stats) if splits > 1 else Stream("out", part, part + stats),
    ]
    stacked = heads // kv_heads * rows
    if "BK" in launch.template:
        tile = launch.template["BK"]
        padded = row_groups * launch.simd_groups * 8  # query rows of a kv head in fragments of eight
        flops = 4 * kv_heads * padded * -(-keys // tile) * tile * dim
        return Count(streams, flops, 2 * tile * (dim * size + 16), launch)
    rows_kept, simd_groups = launch.template["RB"], launch.template["NSG"]
    flops = 4 * kv_heads * -(-stacked // rows_kept) * rows_kept * keys * dim
    return Count(streams, flops, simd_groups * (4 * dim + 8 * rows_kept), launch)


def _query_readings(launch: Launch, keys: int) -> int:
    """By every split; by every tile where a SIMD-group holds only a part of its queries."""
    t = launch.template
    held = "QF" not in t or 8 * t["QF"] == t["D"]
    return launch.groups[2] if held else -(-keys // t["BK"])


def count_merge(launch: Launch) -> Count:
    """Second pass of block attention."""
    part, stats, out = launch.inputs["o_part"], launch.inputs["stats"], launch.outputs["out"]
    streams = [scratch("parts", part.nbytes + stats.nbytes), Stream("out", out.nbytes, out.nbytes)]
    return Count(streams, 3 * part.size, 0, launch)


def count_replay(launch: Launch) -> Count:
    i = launch.inputs
    batch, rows, key_heads, key_dim = i["key"].shape
    heads, value_dim = i["v"].shape[2:]
    kept = sum(i["count"].tolist())
    blocks = launch.grid[1]
    key_row = key_dim * i["key"].dtype.size
    gates = kept * heads * (i["decay"].size // (batch * rows * heads) * 4 + i["beta"].dtype.size)
    window = launch.outputs["window"].nbytes
    streams = [
        Stream("state in", i["state"].nbytes, i["state"].nbytes),
        Stream("state out", i["state"].nbytes, i["state"].nbytes),
        Stream("keys", kept * key_heads * key_row, kept * heads * blocks * key_row),
        Stream(
            "values",
            kept * heads * value_dim * i["v"].dtype.size,
            kept * heads * value_dim * i["v"].dtype.size,
        ),
        Stream("gates", gates, gates * blocks),
        Stream("window", 2 * window, 2 * window),
    ]
    return Count(streams, 5 * kept * heads * blocks * 8 * key_dim, 0, launch)


def count_walk_rows(launch: Launch) -> Count:
    logits = launch.inputs["logits"]
    parts = sum(array.nbytes for array in launch.outputs.values())
    streams = [Stream("logits", logits.nbytes, logits.nbytes), scratch("parts", parts)]
    return Count(streams, logits.size, 64, launch)


def count_walk(launch: Launch) -> Count:
    parts = launch.inputs["best"].nbytes + launch.inputs["id"].nbytes
    walk = launch.outputs["walk"].nbytes
    proposal = launch.inputs["proposal"].nbytes
    streams = [scratch("parts", parts), Stream("proposal", proposal, proposal), Stream("walk", walk, walk)]
    return Count(streams, launch.inputs["id"].size, 128, launch)


def count_context_rows(launch: Launch) -> Count:
    given = launch.inputs["k"].nbytes + launch.inputs["v"].nbytes
    made = sum(array.nbytes for array in launch.outputs.values())
    streams = [Stream("rows in", given, given), Stream("rows out", made, made)]
    return Count(streams, 10 * launch.inputs["k"].size, 0, launch)


COUNTS = {
    "rows_qmm": count_product,
    "rows_qmm_gathered": count_product,
    "block_attention_matrix": count_attention,
    "block_attention_vector": count_attention,
    "block_attention_merge": count_merge,
    "delta_replay": count_replay,
    "greedy_walk_rows": count_walk_rows,
    "greedy_walk": count_walk,
    "context_rows": count_context_rows,
}


@dataclass
class Row:
    """A line of the table: one call, whatever the number of its launches."""

    case: Case
    counts: list[Count] = field(default_factory=list)

    @property
    def moved(self) -> int:
        return sum(stream.moved for count in self.counts for stream in count.streams)

    @property
    def issued(self) -> int:
        return sum(stream.issued for count in self.counts for stream in count.streams)

    @property
    def ratio(self) -> float:
        return self.moved / self.case.least

    @property
    def flops(self) -> int:
        return sum(count.flops for count in self.counts)


def count(case: Case) -> Row:
    """Launch one case into a recorder and count."""
    recorder = Recorder()
    case.kernel(recorder)
    assert recorder.launches, f"{case.kernel_name} on {case.part} launched nothing"
    return Row(case, [COUNTS[launch.kernel](launch) for launch in recorder.launches])


def measure(case: Case, rounds: int) -> tuple[float, float]:
    """Median milliseconds of the kernel and of MLX's own operations, in turn."""
    arms: list[Callable[[], Sequence[mx.array]]] = [lambda: case.kernel(mx.fast.metal_kernel), case.stock]
    taken: tuple[list[float], list[float]] = ([], [])
    mx.eval(case.arrays)
    for turn in range(rounds + 1):
        for which, arm in enumerate(arms):
            start = time.perf_counter()
            mx.eval([out for _ in range(8) for out in arm()])
            if turn:  # the first compiles
                taken[which].append((time.perf_counter() - start) / 8 * 1e3)
    return statistics.median(taken[0]), statistics.median(taken[1])


def report(rows: list[Row], times: list[tuple[float, float]] | None) -> None:
    """Print the table to stdout."""
    head = ["model", "kernel", "part", "least MB", "moved", "ratio", "issued", "GFLOP", "groups", "SIMD/core"]
    lines = [head + (["ms", "stock ms", "GB/s"] if times else [])]
    for i, row in enumerate(rows):
        first = row.counts[0]
        line = [
            row.case.model,
            row.case.kernel_name,
            row.case.part,
            f"{row.case.least / 1e6:.2f}",
            f"{row.moved / 1e6:.2f}",
            f"{row.ratio:.3f}",
            f"{row.issued / 1e6:.1f}",
            f"{row.flops / 1e9:.2f}",
            str(first.working or first.launch.threadgroups),
            f"{first.resident:.1f}",
        ]
        if times:
            kernel, stock = times[i]
            line += [f"{kernel:.3f}", f"{stock:.3f}", f"{row.moved / kernel / 1e6:.0f}"]
        lines.append(line)
    widths = [max(len(line[c]) for line in lines) for c in range(len(lines[0]))]
    for line in lines:
        print(
            "  ".join(
                t.ljust(w) if c < 3 else t.rjust(w) for c, (t, w) in enumerate(zip(line, widths, strict=True))
            )
        )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rows", type=int, default=16, help="rows of the verify pass and of the block (2 to 32)"
    )
    parser.add_argument("--time", action="store_true", help="measure too; needs a Metal device")
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds with --time")
    options = parser.parse_args(arguments)
    if not 2 <= options.rows <= 32:
        parser.error(f"--rows is {options.rows}; it must be 2 to 32")
    if options.time and not mx.metal.is_available():
        print(
            "--time needs a Mac with Metal, and this machine has none; leave it out for the counts.",
            file=sys.stderr,
        )
        return 1
    rows, times = [], []
    for case in cases(options.rows):
        rows.append(count(case))
        if options.time:
            times.append(measure(case, options.rounds))
            mx.clear_cache()
    report(rows, times or None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
