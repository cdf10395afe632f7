"""Pictures are XML that holds the numbers, each where its value belongs."""

import re
import xml.etree.ElementTree as ET

import pytest

from dflash_mlx.bench.charts import Bar, Line, bars, lines, ticks
from dflash_mlx.bench.pictures import pictures
from dflash_mlx.bench.summary import rows
from dflash_mlx.policy import CostCurve, Depth
from tests.bench.made import answer, trial

SVG = "{http://www.w3.org/2000/svg}"
CURVE = CostCurve([Depth(64, 0.05, 0.016, 0.0, {1: 0.05, 4: 0.06, 8: 0.075})], 8)


def parsed(text):
    return ET.fromstring(text)


def texts(root):
    return [element.text for element in root.iter(f"{SVG}text")]


def tips(root):
    return [element.text for element in root.iter(f"{SVG}title")][1:]


def test_bars_carry_their_values_and_are_as_high_as_they_say():
    root = parsed(
        bars(
            "A <chart>",
            ["x & y", "z"],
            [("one", [Bar(1.0), Bar(2.0, 1.5, 2.5)]), ("two", [None, Bar(0.5)])],
            y_label="times",
            reference=1.0,
        )
    )
    assert {"A <chart>", "x & y", "z", "one", "two", "1.00", "2.00", "0.50"} <= set(texts(root))
    assert tips(root) == ["x & y, one: 1", "z, one: 2", "z, two: 0.5"]
    heights = [float(rect.get("height")) for rect in root.iter(f"{SVG}rect") if rect.get("x")]
    assert heights == pytest.approx([heights[0], 2 * heights[0], heights[0] / 2], abs=0.11)


def test_a_whisker_spans_its_quartiles():
    root = parsed(bars("t", ["a"], [("s", [Bar(2.0, 1.0, 4.0)])], y_label="y"))
    low, high = map(
        float, re.match(r"M[\d.]+ ([\d.]+)V([\d.]+)", next(root.iter(f"{SVG}path")).get("d")).groups()
    )
    foot = 400 - 56
    assert (foot - high) / (foot - low) == pytest.approx(4, abs=0.01)


def test_lines_stand_where_their_points_are():
    root = parsed(
        lines(
            "t",
            [Line("a", [(0, 0.0), (1, 5.0), (2, 10.0)]), Line("b", [(0, 3.0)], dashed=True)],
            x_label="x",
            y_label="y",
        )
    )
    assert tips(root) == ["a, 0: 0", "a, 1: 5", "a, 2: 10", "b, 0: 3"]
    points = [
        tuple(map(float, point.split(",")))
        for point in next(root.iter(f"{SVG}polyline")).get("points").split()
    ]
    assert points[1][0] - points[0][0] == pytest.approx(points[2][0] - points[1][0], abs=0.11)
    assert (
        points[0][1] - points[1][1] == pytest.approx(points[1][1] - points[2][1], abs=0.11)
        and points[0][1] > points[2][1]
    )


@pytest.mark.parametrize("top", [0.003, 0.7, 1.0, 1.63, 9.99, 10, 42, 199.9, 12345])
def test_ticks_are_round_and_reach_the_top(top):
    found = ticks(top)
    assert found[0] == 0 and found[-2] < top <= found[-1] * (1 + 1e-9) and 4 <= len(found) <= 9
    step = found[1]
    assert float(f"{step:e}"[:3].rstrip("e")) in (1.0, 2.0, 2.5, 5.0)


def test_nothing_measured_still_has_an_axis():
    assert ticks(0.0) == [0.0, 1.0]


def test_the_pictures_of_a_race():
    drafted = answer(15.0, accepted=[7, 3], verified=[7, 7])
    trials = [
        trial("code", plain=10.0, auto=12.0, block_8=drafted),
        trial("prose", plain=10.0, auto=9.0, block_8=drafted),
        trial("code", context=2048, plain=4.0, auto=5.0),
    ]
    found = {name: parsed(text) for name, text in pictures(rows(trials, "auto"), "auto", CURVE).items()}
    assert list(found) == ["speedup.svg", "acceptance.svg", "context.svg", "costs.svg"]
    assert {"code, auto: 1.2", "prose, auto: 0.9", "code, block 8: 1.5"} <= set(tips(found["speedup.svg"]))
    assert {"code, 1: 100", "code, 4: 50", "prose, 7: 50"} <= set(tips(found["acceptance.svg"]))
    assert {"plain, decoding, 1: 4", "auto, decoding, 1: 5"} <= set(tips(found["context.svg"]))
    assert {"a round, after 64 tokens, 8: 91", "plain step, after 64 tokens, 1: 50"} <= set(
        tips(found["costs.svg"])
    )


def test_what_was_not_measured_is_not_drawn():
    assert list(pictures(rows([trial(plain=10.0, auto=12.0)], "auto"), "auto", None)) == ["speedup.svg"]
