"""`kv_bits` and `draft_window` at load: honoured, counted, or refused before any weights are read."""

from dataclasses import replace

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from dflash_mlx.drafter import DraftConfig
from dflash_mlx.errors import UnsupportedError, UsageError
from dflash_mlx.loading import load_pair, memory
from dflash_mlx.loading.pair import check_target
from dflash_mlx.target import caches
from tests.drafter.toys import toy_config
from tests.families.test_kv_bits import REFUSED, wide
from tests.kit.families import FAMILIES, family
from tests.loading.checkpoints import DRAFT, write_draft, write_target, write_wide_target

GB = 10**9


@pytest.fixture
def folders(tmp_path):
    return write_wide_target(tmp_path / "wide"), write_draft(tmp_path / "drafter")


@pytest.fixture
def no_weights(monkeypatch):
    def loads(*_, **__):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("dflash_mlx.loading.checkpoint.load_target", loads)
    monkeypatch.setattr("dflash_mlx.loading.checkpoint.load_draft", loads)


def test_both_are_honoured(folders, cpu):
    pair = load_pair(*folders, machine=cpu, kv_bits=4, draft_window=32)
    kinds = {(type(layer).__name__, layer.bits, layer.group_size) for layer in pair.target.model.make_cache()}
    assert (pair.target.model.kv_bits, kinds) == (4, {("QuantizedKVCache", 4, 32)})
    assert pair.draft.config.draft_window == 32


@pytest.mark.slow
def test_the_bundled_file_takes_kv_bits_too(cpu):
    target = load_pair(machine=cpu, mode="off", kv_bits=8).target.model
    assert {(type(c).__name__, c.bits, c.group_size) for c in target.make_cache()} == {
        ("QuantizedKVCache", 8, 64)
    }


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_bits": 3}, "kv_bits 3: 4, 8 or none"),
        ({"kv_bits": 8.0}, "kv_bits 8.0: 4, 8 or none"),
        ({"draft_window": 0}, "draft_window 0: expected tokens of the context"),
        ({"draft_window": "64"}, "draft_window 64: expected tokens"),
    ],
)
def test_values_that_mean_nothing_are_refused_before_any_file_is_looked_for(cpu, options, words):
    with pytest.raises(UsageError, match=words):
        load_pair("no/such-target", machine=cpu, **options)


def test_a_window_below_the_block_is_refused_before_any_weights(folders, cpu, no_weights):
    with pytest.raises(
        UsageError, match="draft_window 7: the drafter drafts blocks of 8 tokens; give 8 or more"
    ):
        load_pair(*folders, machine=cpu, draft_window=7)


def test_a_window_that_changes_nothing_is_told_as_such(tmp_path, folders, cpu):
    slides = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 32}
    sliding = write_draft(tmp_path / "sliding", **slides)
    [note] = load_pair(folders[0], sliding, machine=cpu, draft_window=64).notes
    assert (
        note
        == "draft_window 64 changes nothing: no layer of sliding sees more than 31 tokens of the context."
    )
    assert load_pair(folders[0], sliding, machine=cpu, draft_window=16).notes == ()
    assert load_pair(*folders, machine=cpu, draft_window=10_000).notes == ()


def test_heads_that_cannot_be_quantised_are_refused_before_any_weights(tmp_path, cpu, no_weights):
    narrow = write_target(tmp_path / "narrow")
    with pytest.raises(UnsupportedError, match=r"heads .* multiple of 32; those of narrow are \[16\] wide"):
        load_pair(narrow, write_draft(tmp_path / "drafter"), machine=cpu, kv_bits=8)


@pytest.mark.parametrize("name", [name for name in REFUSED if not name.endswith("-16")])
def test_a_family_that_cannot_be_quantised_is_refused_by_its_config(name):
    """Nothing is computed: a config of the full size would be as quick."""
    config = {**FAMILIES[name]}
    inner = {**config.get("text_config", config), **wide(name)}
    config = {**config, "text_config": inner} if "text_config" in config else inner
    before = mx.get_active_memory()
    words = REFUSED[name].replace(name, f"owner/{name}")
    with pytest.raises(UnsupportedError, match=words):
        check_target(config, name=f"owner/{name}", kv_bits=8)
    assert mx.get_active_memory() - before < 20_000, "no weights were made"


def test_a_shared_target_keeps_its_kv_bits(folders, cpu):
    first = load_pair(*folders, machine=cpu, kv_bits=8)
    for bits in (None, 8):
        assert load_pair(first.target, folders[1], machine=cpu, kv_bits=bits).target is first.target
    with pytest.raises(
        UsageError, match="kv_bits is 4, but the shared target wide was loaded with kv_bits 8"
    ):
        load_pair(first.target, folders[1], machine=cpu, kv_bits=4)
    plain = load_pair(*folders, machine=cpu)
    with pytest.raises(
        UsageError, match="kv_bits is 8, but the shared target wide was loaded with kv_bits None"
    ):
        load_pair(plain.target, folders[1], machine=cpu, kv_bits=8)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "qwen3_5"])
def test_the_quantised_context_is_counted_as_the_caches_fill(name, bits):
    """Rings and states are not packed."""
    target = family(name, kv_bits=bits, head_dim=32)
    cache = target.make_cache()
    for _ in range(16):
        target.verify(mx.arange(16), cache)
        target.settle(cache)
    with_tokens = [layer for layer in caches.parts(cache) if hasattr(layer, "offset")]
    held = sum(a.nbytes for c in with_tokens for _, a in tree_flatten(c.state) if isinstance(a, mx.array))
    told = memory.context_bytes(target.config, itemsize=4, kv_bits=bits, tokens=256)
    assert told is not None and 0.8 * held <= told <= 1.25 * held


def test_a_drafter_s_context_is_counted_by_its_window():
    config = DraftConfig.from_dict(toy_config(), name="toy")
    row = 2 * 2 * 8 * 4  # keys and values of two heads of eight, float32
    assert memory.draft_context_bytes(config, itemsize=4, tokens=1000) == 2 * 1000 * row
    narrow = config.with_draft_window(64)
    assert memory.draft_context_bytes(narrow, itemsize=4, tokens=1000) == 2 * 2 * 65 * row


def test_what_saves_memory_is_in_the_sizes_that_are_told(folders, cpu, monkeypatch):
    """A machine on which the pair is tight without them and has room with them."""
    contexts = []

    def keep(need, *_, **__):
        contexts.append(need.context)

    monkeypatch.setattr(memory, "verdict", keep)
    for options in (
        {},
        {"kv_bits": 8},
        {"kv_bits": 4},
        {"draft_window": 8},
        {"kv_bits": 4, "draft_window": 8},
    ):
        load_pair(*folders, machine=replace(cpu, memory_gb=64.0), **options)
    target, draft = 2 * 4 * 2 * 32 * 4 * memory.CONTEXT, 2 * 2 * 2 * 16 * 4 * memory.CONTEXT
    narrow = draft * 2 * 9 // memory.CONTEXT
    assert DRAFT["block_size"] == 8
    assert contexts == [
        target + draft,
        target * 10 // 32 + draft,  # 8 bits, and two float32 for 32 numbers
        target * 6 // 32 + draft,
        target + narrow,
        target * 6 // 32 + narrow,
    ]
