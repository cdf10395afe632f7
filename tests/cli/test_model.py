"""/model: another pair in a running chat, what becomes of the old one, and what is said of loading."""

import json

import pytest

from dflash_mlx.cli import commands, running
from dflash_mlx.cli.commands import pair
from dflash_mlx.errors import UsageError
from tests.cli.terminal import CTRL_C, ENTER, TAB, terminal


def said(result):
    return [message["content"] for message in json.loads(result.stdout.splitlines()[-1])]


def test_the_conversation_and_the_options_go_with_it(console):
    result = console.chat(
        "--system", "S", "--seed", "4", "--kept-gb", "1",
        stdin=b"one\n/set max_new_tokens 9\n/model new-pair new-draft\necho\n",
    )  # fmt: skip
    old, new = console.made
    assert said(result) == ["S", "one", "hi", "echo"]
    assert (new.target_model, new.draft_model, new.kept_gb) == ("new-pair", "new-draft", 1.0)
    assert new.calls[0][1] == {"temperature": 0.6, "top_p": 0.95, "seed": 4, "max_new_tokens": 9}
    assert "new-pair with new-draft · 1.50 GB ready in 0.1 s" in result.stderr
    assert old.closed and new.closed, "one after the other"


def test_the_new_pair_reads_the_answers_in_its_own_tokens(console, monkeypatch):
    from tests.cli.fake import FakeGenerator

    monkeypatch.setattr(FakeGenerator, "answer_ids", lambda self, ids, text: (*ids, self.target_name, text))
    console.chat(stdin=b"one\n/model new-pair\nechos\n")
    _, new = console.made
    [answer] = [m for m in new.calls[0][0] if m["role"] == "assistant"]
    assert answer["token_ids"] == ("new-pair", "hi")


def test_draws_that_nobody_chose_are_those_of_the_new_model(console, monkeypatch):
    from tests.cli.fake import FakeGenerator

    honest = FakeGenerator.__post_init__

    def other(self):
        honest(self)
        if self.target_name == "new-pair":
            self.generation_defaults = {"temperature": 0.9, "top_p": 0.8, "top_k": 20}

    monkeypatch.setattr(FakeGenerator, "__post_init__", other)
    console.chat(stdin=b"/set top_p 0.5\n/set top_k none\n/model new-pair\none\n")
    assert console.made[1].calls[0][1] == {"temperature": 0.9, "top_p": 0.5}


def test_a_failed_load_keeps_the_old_pair(console):
    result = console.chat(stdin=b"one\n/model missing\necho\n")
    assert said(result) == ["one", "hi", "echo"]
    assert "error: The target missing could not be fetched" in result.stderr
    assert "fake-target with fake-draft stays." in result.stderr
    assert [len(made.calls) for made in console.made] == [2], "no other was made"


def test_two_pairs_that_do_not_fit_follow_each_other(console):
    result = console.chat(stdin=b"one\n/model big-pair\necho\n")
    old, new = console.made
    assert said(result) == ["one", "hi", "echo"] and old.closed
    assert "Both pairs together take" in result.stderr and "is given up first" in result.stderr
    assert len(new.calls) == 1


def test_a_pair_that_was_given_up_in_vain_is_loaded_again(console):
    result = console.chat(stdin=b"one\n/model big-broken\n/model\necho\n")
    old, again = [made for made in console.made if made.target_model is None]
    assert "big-broken is broken" in result.stderr
    assert result.stderr.count("is loaded again with the next message") == 1
    assert "the default pair of this machine is loaded with the next message" in result.stderr
    assert said(result) == ["one", "hi", "echo"] and old.closed and len(again.calls) == 1


def test_a_setting_loads_nothing_again(console):
    console.chat(stdin=b"/model big-broken\n/set top_p 0.5\n/undo\n")
    assert [made.target_model for made in console.made] == [None]


def test_another_drafter_shares_the_loaded_target(console, monkeypatch):
    from tests.cli.fake import FakeGenerator

    monkeypatch.setattr(
        FakeGenerator, "target", property(lambda self: f"loaded {self.target_name}"), raising=False
    )
    console.chat(stdin=b"/model fake-target other-draft\n")
    assert console.made[1].target_model == "loaded fake-target"


def test_alone_it_says_what_runs_and_what_is_here(console, monkeypatch):
    monkeypatch.setattr("dflash_mlx.cli.chat.on_this_machine", lambda: ["a: b with c", "d"])
    result = console.chat(stdin=b"/model\n")
    assert "fake-target with fake-draft runs\nOn this machine:\na: b with c\nd\n" in result.stderr


def test_what_is_here_are_the_pairs_whose_files_are(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert running.on_this_machine() == [
        "smollm2-135m: HuggingFaceTB/SmolLM2-135M-Instruct with smollm2-135m-dflash"
    ]


@pytest.mark.parametrize("argument", ["a b c", "'a", "''", "a ''"])
def test_other_than_one_or_two_names_are_refused(argument):
    with pytest.raises(UsageError, match="a target and a drafter"):
        pair(argument)


def test_names_with_spaces_are_quoted():
    assert pair("'my models/a' b") == ("my models/a", "b") and pair("a") == ("a", None)


def test_names_and_paths_are_completed(tmp_path):
    assert commands.completions("/model Q", lambda: ["Qwen3-4B", "smollm2"]) == ["Qwen3-4B"]
    (tmp_path / "talk one").mkdir()
    (tmp_path / "talk[1]").write_text("")
    (tmp_path / "other").write_text("")
    assert commands.completions(f"/load {tmp_path}/talk[") == [f"{tmp_path}/talk[1]"]
    assert commands.completions(f"/save {tmp_path}/o") == [f"{tmp_path}/other"]


def test_ctrl_c_while_the_other_pair_loads_keeps_the_old_one():
    with terminal("chat") as screen:
        screen.line("hi")
        screen.line("/model new-slow")
        screen.wait_for("reading the target new-slow: 2.00 GB")
        screen.type(CTRL_C)
        screen.wait_for("stopped")
        screen.wait_for("fake-target with fake-draft stays.")
        screen.line("echo")
        screen.wait_for('"assistant", "content": "hi"')
        screen.line("/exit")
        assert screen.leave() == 0 and "Traceback" not in screen.seen


def test_loading_is_drawn_on_one_line_and_leaves_with_it():
    with terminal("chat", "--target-model", "hub-pair", columns=80) as screen:
        screen.wait_for("Loading hub-pair ...")
        screen.wait_for("Fetching the target hub-pair (2.50 GB) from the hub ...")
        screen.wait_for("reading the target hub-pair: 2.00 GB")
        screen.wait_for("1.50 GB ready in 0.1 s")
        assert "\x1b[2Kmade of hub-pair" in screen.seen.replace("\x1b[2m", "").replace("\r", "")


def test_the_first_load_can_be_interrupted():
    for variables in ({}, {"NO_COLOR": "1"}):
        with terminal("chat", "--target-model", "my-slow", **variables) as screen:
            screen.wait_for("eading the target my-slow")
            screen.type(CTRL_C)
            assert screen.leave() == 130 and "Traceback" not in screen.seen


def test_a_name_is_completed_by_tab():
    with terminal("chat", "--no-history") as screen:
        screen.wait_for_prompt()
        screen.type(b"/mod" + TAB + b" new-pair" + ENTER)
        screen.wait_for("new-pair, decoded plainly")
