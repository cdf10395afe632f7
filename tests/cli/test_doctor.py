"""`dflash-mlx doctor`: facts on stdout, an exit code that says whether something can be mended; nothing is loaded."""

import json
import socket

import pytest
from huggingface_hub import constants

from dflash_mlx import runtime, tuning
from dflash_mlx.blas import Blas
from dflash_mlx.cli import doctor
from dflash_mlx.kernels.choice import Chooser
from dflash_mlx.kernels.verdicts import Machine, Verdict, merge

HERE = Machine("chip", "system", "mlx")


@pytest.fixture(autouse=True)
def sound_machine(monkeypatch):
    """Nothing to mend, whatever machine the tests run on; a look at the network fails."""

    def refuse(*_, **__):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(runtime, "blas", lambda: Blas("Some BLAS 1.0"))
    monkeypatch.setattr(doctor, "usable", lambda: None)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.delenv("DFLASH_KERNELS", raising=False)


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """A machine with Metal on which two kernels were measured."""
    found = [
        Verdict("rows_qmm", "d", "m6-8 n64", "faster", "41 % faster", 1.2345678, 0.875),
        Verdict("context_rows", "d", "s16 h2", "wrong", "wrong: off by 3, allowed 0.0001"),
    ]
    path = tmp_path / "kernels.json"
    merge(path, HERE, found)
    monkeypatch.setattr(doctor, "usable", lambda: lambda **_: None)
    monkeypatch.setattr(tuning, "chooser", lambda: Chooser(path, factory=lambda **_: None, machine=HERE))
    return path


def test_it_prints_sections_on_stdout_and_loads_no_model(console):
    result = console("doctor")
    assert (result.exit_code, result.stderr, console.made) == (0, "", [])
    titles = [line for line in result.stdout.splitlines() if not line.startswith(" ")]
    assert titles == ["machine", "versions", "blas", "folders", "models", "kernels", "costs"]
    assert "  name     Some BLAS 1.0\n" in result.stdout
    assert "no Metal device: MLX's own operations run" in result.stdout


def test_json_is_one_object_with_the_same(console):
    result = console("doctor", "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 0 and found.keys() == doctor.examine().keys()
    assert found["versions"]["mlx"] and found["machine"]["memory_gb"] > 0
    assert found["kernels"]["table"] == [] and found["kernels"]["used"] is False
    assert found["problems"] == []
    assert json.loads(console("--json", "doctor").stdout) == found


def test_the_table_says_what_was_chosen_and_why(console, measured):
    lines = console("doctor").stdout.splitlines()
    start = next(i for i, line in enumerate(lines) if "shape class" in line)
    assert [line.split("  ") for line in lines[start:]] and "stock ms" in lines[start]
    assert lines[start + 1].split() == "context_rows s16 h2 stock wrong: off by 3, allowed 0.0001 - -".split()
    assert lines[start + 2].split() == "rows_qmm m6-8 n64 kernel 41 % faster 1.235 0.875".split()
    columns = {
        line.index(word) for line, word in zip(lines[start + 1 : start + 3], ("s16", "m6-8"), strict=True)
    }
    assert len(columns) == 1, "cells stand below each other"


def test_a_kernel_that_is_switched_off_is_shown_as_such(console, measured, monkeypatch):
    monkeypatch.setenv("DFLASH_KERNELS", "off")
    found = json.loads(console("doctor", "--json").stdout)["kernels"]
    assert (found["setting"], found["used"]) == ("off", False)
    assert {row["chosen"] for row in found["table"]} == {"stock"}


@pytest.mark.parametrize(
    ("breaking", "sentence"),
    [
        (lambda m: m.setenv("DFLASH_KERNELS", "fast"), "DFLASH_KERNELS is 'fast'"),
        (
            lambda m: m.setattr(runtime, "blas", lambda: Blas("slow", "no OpenBLAS could be loaded")),
            "no OpenBLAS",
        ),
        (
            lambda m: m.setattr("dflash_mlx.loading.places.BUNDLED_FOLDER", doctor.Path("/nowhere")),
            "drafter is missing",
        ),
    ],
    ids=["setting", "blas", "bundled"],
)
def test_what_can_be_mended_is_said_last_and_exits_1(console, monkeypatch, breaking, sentence):
    breaking(monkeypatch)
    result = console("doctor")
    last = result.stdout.split("problems\n")[1]
    assert result.exit_code == 1 and sentence in last and "Traceback" not in result.output


def test_a_damaged_file_of_measurements_is_said(console, measured):
    measured.write_text("{")
    result = console("doctor")
    assert result.exit_code == 1 and "damaged" in result.stdout.split("problems\n")[1]


def test_offline_and_the_hub_cache_are_those_of_the_environment(console, monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    folders = json.loads(console("doctor", "--json").stdout)["folders"]
    assert (folders["hub"], folders["hub_cache"]) == ("offline", str(tmp_path))


@pytest.mark.parametrize("option", [["--seed", "1"], ["-p", "x"], ["--target-model", "T"], ["--no-stats"]])
def test_options_of_an_answer_are_refused_before_it(console, option):
    result = console(*option, "doctor")
    assert (result.exit_code, result.stdout, console.made) == (2, "", [])
    assert "has no meaning for doctor" in result.stderr
