"""Repositories over a loopback hub: what is fetched, what is asked, and what people read when it fails."""

import os
import shutil
import signal
import socket
import threading
import time

import pytest
from huggingface_hub import constants

from dflash_mlx.errors import HubError
from dflash_mlx.loading import hub as hub_room
from dflash_mlx.loading import load_pair
from dflash_mlx.loading.hub import small_files, weights
from tests.loading.checkpoints import split_into_shards, write_draft, write_target
from tests.loading.conftest import point_to


@pytest.fixture
def repos(hub, tmp_path):
    hub.add("someone/tiny", write_target(tmp_path / "target"))
    hub.add("someone/tiny-drafter", write_draft(tmp_path / "draft"))
    return hub


def fetched(hub, ending):
    return [request for request in hub.requests if request.startswith("GET") and request.endswith(ending)]


def refused(repo, role="target"):
    with pytest.raises(HubError) as caught:
        small_files(repo, role=role)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_pair_is_fetched_and_loaded(repos, cpu):
    pair = load_pair("someone/tiny", "someone/tiny-drafter", machine=cpu)
    assert (pair.target.name, pair.draft.name) == ("someone/tiny", "someone/tiny-drafter")
    assert pair.target.eos_ids == (2, 7)  # the tokenizer's and the config's


def test_a_cached_pair_asks_the_network_nothing(repos, cpu):
    load_pair("someone/tiny", "someone/tiny-drafter", machine=cpu)
    repos.requests.clear()
    load_pair("someone/tiny", "someone/tiny-drafter", machine=cpu)
    assert repos.requests == []


def test_a_pair_that_does_not_fit_is_refused_before_weights_are_fetched(repos, cpu, tmp_path):
    repos.add("someone/other", write_draft(tmp_path / "other", hidden_size=128))
    with pytest.raises(Exception, match="hidden size 128 against 64"):
        load_pair("someone/tiny", "someone/other", machine=cpu)
    assert fetched(repos, "config.json")
    assert not fetched(repos, ".safetensors")


def test_only_files_that_are_needed_are_fetched(repos, tmp_path):
    for name in ("pytorch_model.bin", "consolidated.safetensors", "modeling.py", "README.md"):
        (repos.repos["someone/tiny"].folder / name).write_text("x")
    folder = weights(small_files("someone/tiny", role="target"))
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }


def test_a_connection_cut_in_a_file_is_taken_up_where_it_broke(repos, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1024)
    served = repos.repos["someone/tiny"]
    whole = (served.folder / "model.safetensors").read_bytes()
    served.cut["model.safetensors"] = len(whole) // 2
    folder = weights(small_files("someone/tiny", role="target"))
    assert (folder / "model.safetensors").read_bytes() == whole
    ranges = [headers["Range"] for headers in repos.headers if "Range" in headers]
    assert len(ranges) == 1 and 0 < int(ranges[0].removeprefix("bytes=").removesuffix("-")) <= len(whole) // 2


def test_ctrl_c_does_not_wait_for_a_file(repos):
    """The hub's threads go on until the next piece; nobody waits for them, and what they hold is taken up later."""
    let_go = threading.Event()

    def stall():
        os.kill(os.getpid(), signal.SIGINT)
        let_go.wait(60)

    served = repos.repos["someone/tiny"]
    served.stall["model.safetensors"] = stall
    found = small_files("someone/tiny", role="target")
    with pytest.raises(KeyboardInterrupt):
        weights(found)
    [left] = [thread for thread in threading.enumerate() if thread.name == hub_room.FETCHING]
    let_go.set()
    left.join(60)
    assert not (found.folder / "model.safetensors").exists(), "it went on although nobody waited"
    assert (weights(found) / "model.safetensors").exists()


def test_what_is_fetched_and_read_is_told_with_its_size(repos, cpu):
    steps = []
    pair = load_pair("someone/tiny", "someone/tiny-drafter", machine=cpu, on_load=steps.append)
    assert [(step.stage, step.role, step.name) for step in steps if step.done == 0] == [
        ("fetch", "drafter", "someone/tiny-drafter"),
        ("fetch", "target", "someone/tiny"),
        ("read", "target", "someone/tiny"),
        ("read", "drafter", "someone/tiny-drafter"),
    ]
    read = [step for step in steps if step.stage == "read" and step.role == "target"]
    done = [step.done for step in read]
    assert done == sorted(done) and len(done) > 10, "tensor by tensor, so that a Ctrl-C comes in between"
    assert done[-1] == read[0].nbytes == pair.target.model.nbytes and read[0].pair_nbytes == pair.nbytes


def test_a_loading_that_is_told_to_stop_stops(repos, cpu):
    def stop(step):
        if step.done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_pair("someone/tiny", "someone/tiny-drafter", machine=cpu, on_load=stop)


def test_shards_that_arrived_are_kept_when_another_fails(repos):
    served = repos.repos["someone/tiny"]
    first, second = split_into_shards(served.folder)
    served.gone.add(second.name)
    with pytest.raises(HubError, match="target someone/tiny"):
        weights(small_files("someone/tiny", role="target"))
    served.gone.clear()
    repos.requests.clear()
    folder = weights(small_files("someone/tiny", role="target"))
    assert (folder / second.name).exists()
    assert not fetched(repos, first.name) and fetched(repos, second.name)


def test_offline_a_cached_repository_is_used(repos, monkeypatch):
    weights(small_files("someone/tiny", role="target"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert small_files("someone/tiny", role="target").whole


def test_offline_a_missing_repository_is_named(repos, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    message = refused("someone/tiny", "drafter")
    assert message.startswith("The drafter someone/tiny is not wholly in the cache and HF_HUB_OFFLINE is set")
    assert repos.requests == []


def test_offline_a_repository_without_its_weights_is_not_used(repos, monkeypatch):
    small_files("someone/tiny", role="target")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "not wholly in the cache" in refused("someone/tiny")


@pytest.mark.parametrize("lost", ["tokenizer.json", "model.safetensors"])
def test_a_cache_without_the_hub_s_list_is_completed(repos, tmp_path, monkeypatch, lost):
    """Versions before 2 of huggingface-hub keep no list, so a folder must be judged by itself."""
    weights(small_files("someone/tiny", role="target"))
    older = tmp_path / "older"
    shutil.copytree(tmp_path / "cache", older, symlinks=True, ignore=shutil.ignore_patterns("trees"))
    (found,) = older.rglob(lost)
    found.unlink()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(older))
    assert (weights(small_files("someone/tiny", role="target")) / lost).exists()


@pytest.mark.parametrize("status", [401, 403])
def test_a_gated_repository_says_where_to_accept_and_how_to_log_in(repos, status):
    repos.repos["someone/tiny-drafter"].error = (status, "GatedRepo")
    message = refused("someone/tiny-drafter", "drafter")
    assert (
        f"The drafter someone/tiny-drafter is gated: accept its terms at {repos.url}/someone/tiny-drafter"
        in message
    )
    assert "hf auth login" in message and "HF_TOKEN" in message


def test_a_missing_repository_names_what_is_near(repos):
    message = refused("z-lab/Qwen3-8B-DFlash-b61", "drafter")
    assert "The drafter z-lab/Qwen3-8B-DFlash-b61 is not on the hub" in message
    assert "z-lab/Qwen3-8B-DFlash-b16" in message


def test_what_answers_401_to_nobody_may_be_missing_or_private(repos):
    repos.repos["someone/tiny"].error = (401, None)
    message = refused("someone/tiny")
    assert "is not on the hub" in message and "or it is private" in message and "hf auth login" in message


def test_a_token_that_is_refused(repos, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_old")
    repos.repos["someone/tiny"].error = (401, None)
    assert "refused the token" in refused("someone/tiny")


def test_a_name_that_is_no_hub_id(repos):
    assert "'some one/tiny' is no hub id for the target" in refused("some one/tiny")


@pytest.mark.parametrize(
    ("status", "words"),
    [(429, "too many requests"), (403, "forbids"), (503, "answered 503")],
)
def test_a_status_becomes_a_sentence(repos, status, words):
    repos.repos["someone/tiny"].error = (status, None)
    message = refused("someone/tiny")
    assert "The target someone/tiny" in message and words in message


def test_a_hub_that_is_silent_is_given_up(repos, monkeypatch):
    monkeypatch.setattr(hub_room, "ANSWER_WITHIN", 0.2)
    repos.repos["someone/tiny"].wait = 1.0
    assert "did not answer in time" in refused("someone/tiny")


def test_without_a_network_the_answer_comes_at_once_and_names_the_bundled_pair(tmp_path, monkeypatch):
    with socket.socket() as unused:  # bound and not listening: every connection is refused
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        point_to(url, tmp_path, monkeypatch)
        started = time.monotonic()
        message = refused("Qwen/Qwen3-8B")
    assert time.monotonic() - started < 5
    assert f"The target Qwen/Qwen3-8B could not be fetched: there is no connection to {url}." in message
    assert "The bundled pair works offline: --target-model smollm2-135m." in message


@pytest.mark.parametrize("error", [(401, None), (401, "GatedRepo"), (403, None), (429, None), (500, None)])
def test_a_token_never_appears(repos, monkeypatch, caplog, capfd, error):
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecret")
    repos.repos["someone/tiny"].error = error
    message = refused("someone/tiny")
    assert "Bearer hf_secretsecret" in (value for headers in repos.headers for value in headers.values())
    assert "secretsecret" not in message + "".join(capfd.readouterr()) + caplog.text


def test_a_password_in_the_hub_s_address_never_appears(repos, monkeypatch, caplog, capfd):
    monkeypatch.setattr(constants, "ENDPOINT", repos.url.replace("//", "//user:hf_secretsecret@"))
    repos.repos["someone/tiny"].error = (500, None)
    message = refused("someone/tiny")
    assert repos.url in message
    assert "secretsecret" not in message + "".join(capfd.readouterr()) + caplog.text


def test_nothing_is_drawn_where_stderr_is_no_terminal(repos, capfd):
    weights(small_files("someone/tiny", role="target"))
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")
