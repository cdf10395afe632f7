"""`dflash-mlx convert`: the record on stdout, progress on stderr, an exit code."""

import json

from tests.loading.checkpoints import write_draft, write_target


def test_it_prints_what_was_written_and_how_it_compares(console, tmp_path):
    source = write_draft(tmp_path / "source")
    result = console("convert", str(source), str(tmp_path / "out"))
    assert (result.exit_code, console.made) == (0, [])
    titles = [line for line in result.stdout.splitlines() if not line.startswith(" ")]
    assert titles == ["written", "comparison"]
    assert (
        "  exact                yes\n" in result.stdout
        and f"  folder        {tmp_path / 'out'}\n" in result.stdout
    )
    assert [line.split()[0] for line in result.stderr.splitlines()] == ["Reading", "Writing", "Reading"]


def test_json_is_one_object_whichever_side_the_option_stands_on(console, tmp_path):
    source = write_draft(tmp_path / "source")
    after = console(
        "convert", str(source), str(tmp_path / "a"), "--bits", "8", "--dtype", "float32", "--json"
    )
    before = console("--json", "convert", str(source), str(tmp_path / "b"))
    found = json.loads(after.stdout)
    assert (found["written"]["bits"], found["written"]["dtype"]) == (8, "float32")
    assert 0 < found["comparison"]["relative_difference"] < 0.1
    assert json.loads(before.stdout)["comparison"]["exact"] is True


def test_what_cannot_be_honoured_is_one_sentence(console, tmp_path):
    source, target = str(write_draft(tmp_path / "source")), str(write_target(tmp_path / "target"))
    out = str(tmp_path / "out")
    for arguments, code, says in (
        ([source, out, "--bits", "3"], 2, "--bits is 3; expected one of 4, 8, 16"),
        ([source, out, "--dtype", "int8"], 2, "--dtype is int8; expected one of"),
        ([source, " "], 2, "The name of the folder to make is empty"),
        ([source, target], 2, "is not empty"),
        ([source], 2, "Missing argument"),
        ([target, out], 1, "is not a drafter"),
        (["nonsense", out], 1, "No drafter is known as 'nonsense'"),
    ):
        result = console("convert", *arguments)
        assert (result.exit_code, result.stdout) == (code, ""), arguments
        assert says in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


def test_options_of_an_answer_are_refused_before_it(console, tmp_path):
    result = console("--seed", "1", "convert", "a", str(tmp_path / "out"))
    assert (result.exit_code, result.stdout) == (2, "") and "has no meaning for convert" in result.stderr
