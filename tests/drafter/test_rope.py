"""The draft's rotation against Transformers' tables and mlx-lm's rope modules."""

import json
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.rope_utils import initialize_rope

from dflash_mlx.drafter.rope import Rope, RopeConfig
from dflash_mlx.errors import CheckpointError, UnsupportedError

ROPES = json.loads((Path(__file__).parent.parent / "golden" / "ropes.json").read_text())
YARN = ROPES["yarn"]["parameters"]


def read(**config) -> RopeConfig:
    return RopeConfig.from_dict(config, name="toy")


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("layout", ["rope_parameters", "rope_scaling", "old rope_scaling"])
def test_frequencies_and_amplitude_are_those_of_transformers_wherever_the_keys_lie(name, layout):
    golden = ROPES[name]
    if layout == "old rope_scaling":
        old = {("type" if key == "rope_type" else key): value for key, value in golden["parameters"].items()}
        config = read(rope_theta=old.pop("rope_theta"), rope_scaling=old, max_position_embeddings=262144)
    else:
        config = read(**{layout: golden["parameters"]}, max_position_embeddings=262144)
    assert [1 / length for length in config.wavelengths(64)] == pytest.approx(golden["inv_freq"], rel=2e-6)
    assert config.amplitude() == pytest.approx(golden["amplitude"], rel=1e-6)


def test_the_amplitude_of_the_old_35b_files_is_that_of_factor_64():
    assert read(rope_parameters=YARN).amplitude() == pytest.approx(1.41589, abs=1e-5)


@pytest.mark.parametrize("name", ["default", "linear", "yarn", "llama3"])
def test_rows_are_rotated_as_mlx_lm_rotates_them(name):
    parameters = ROPES[name]["parameters"]
    theirs = initialize_rope(64, parameters["rope_theta"], False, parameters, 262144)
    ours = Rope(read(rope_parameters=parameters), 64)
    rows = mx.random.normal((1, 2, 9, 64), key=mx.random.key(0))
    assert mx.allclose(
        ours(rows, offset=4321) * ours.amplitude, theirs(mx.array(rows), offset=4321), atol=2e-3
    )


def test_rotation_is_half_split():
    rows = mx.zeros((1, 1, 1, 8)).at[..., 0].add(1.0)
    rotated = Rope(read(rope_theta=100.0), 8)(rows, offset=1)[0, 0, 0].tolist()
    assert rotated == pytest.approx([0.5403023, 0, 0, 0, 0.8414710, 0, 0, 0], abs=1e-6)


def test_a_top_level_theta_comes_first():
    assert read(rope_theta=5.0, rope_parameters={"rope_theta": 6.0}).theta == 5.0
    assert read(rope_parameters={"rope_theta": 6.0}, rope_scaling={"rope_theta": 7.0}).theta == 6.0


@pytest.mark.parametrize(
    ("config", "error", "says"),
    [
        ({}, CheckpointError, "no rope_theta"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "longrope"}}, UnsupportedError, "'longrope'"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear"}}, CheckpointError, "linear"),
        ({"rope_theta": 1e4, "rope_is_neox_style": False}, UnsupportedError, "neighbouring values in pairs"),
        (
            {"rope_theta": 1e4, "rope_parameters": {"partial_rotary_factor": 0.25}},
            UnsupportedError,
            "part of each head",
        ),
        (
            {"rope_theta": 1e4, "rope_parameters": {"full_attention": {}}},
            UnsupportedError,
            "each type of layer",
        ),
    ],
)
def test_other_rotations_are_refused_by_name(config, error, says):
    with pytest.raises(error, match=says):
        read(**config)
