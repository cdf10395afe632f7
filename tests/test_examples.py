"""Every example runs, here with a tiny random pair in place of the machine's default one."""

import copy
import io
import runpy
from pathlib import Path

import pytest

import dflash_mlx
from tests.loading.checkpoints import write_draft, write_target

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    return str(write_target(root / "target", eos_token_id=None)), str(write_draft(root / "draft"))


@pytest.fixture
def run(folders, monkeypatch, capsys):
    """Run an example with these arguments; gives what it printed on stdout and stderr.

    Answers have at most 20 tokens; `run.asked` are the prompts, as they were when they were asked.
    """

    class Tiny(dflash_mlx.DFlashGenerator):
        def __init__(self, *names, **options):
            super().__init__(*(names or folders), **options)

        def stream(self, prompt, *, max_new_tokens, **options):
            run_example.asked.append(copy.deepcopy(prompt))
            return super().stream(prompt, max_new_tokens=min(20, max_new_tokens), **options)

        def compare(self, prompt, *, max_new_tokens, **options):
            return super().compare(prompt, max_new_tokens=min(20, max_new_tokens), **options)

    monkeypatch.setattr(dflash_mlx, "DFlashGenerator", Tiny, raising=False)

    def run_example(name, *arguments):
        monkeypatch.setattr("sys.argv", [name, *arguments])
        [path] = [example for example in EXAMPLES if example.stem == name]
        runpy.run_path(str(path), run_name="__main__")
        return capsys.readouterr()

    run_example.asked = []
    return run_example


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_it_is_short_and_tested_here(example):
    text = example.read_text()
    assert len(text.splitlines()) < 40
    assert f'run("{example.stem}"' in Path(__file__).read_text()


def test_generate(run):
    text, figures = run("generate").out.rsplit("\n", 2)[:2]
    assert text and figures.startswith("20 tokens in ")


def test_streaming(run):
    printed = run("streaming")
    assert printed.out.strip() and printed.err.endswith("ended by length after 20 tokens\n")


def test_sampling(run):
    lines = run("sampling").out
    first, second, third = lines.split("\n1 ")[0], lines.split("\n2 ")[1], lines.split("\n1 ")[1]
    assert first.removeprefix("1 ").split("\n2 ")[0] == third.split("\nidentical")[0]
    assert second != third
    assert "identical: True" in lines


def test_chat(run, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n\nnever read\n"))
    printed = run("chat").out
    first, second = run.asked
    answer = second[1]["content"]
    assert first == [{"role": "user", "content": "one"}]
    assert second.pop(1).pop("token_ids")
    assert second == [*first, {"role": "user", "content": "two"}]
    assert answer and printed.startswith(f"> {answer}\n> ")


def test_local_folder(run, folders):
    printed = run("local_folder", *folders, "Name", "a", "lake.")
    assert printed.out.strip() and "target drafted by draft" in printed.err


def test_local_folder_says_what_is_wrong(run, folders):
    with pytest.raises(SystemExit, match="error: .*nowhere"):
        run("local_folder", folders[0], "./nowhere")
    with pytest.raises(SystemExit, match="TARGET DRAFTER"):
        run("local_folder")
