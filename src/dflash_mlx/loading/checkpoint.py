"""One model's files behind one face, wherever they come from: config first, weights when asked.

A target is a folder (local or of the hub) or a GGUF file; a drafter is a folder.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dflash_mlx.core import LoadStep, OnLoad
from dflash_mlx.drafter import DraftNetwork, load_draft
from dflash_mlx.errors import CheckpointError
from dflash_mlx.loading import files, gguf, hub, memory, tokenizer
from dflash_mlx.loading.names import Source
from dflash_mlx.target import MLXTarget, build, load_target


class FolderCheckpoint:
    """A folder with config.json, safetensors and, for a target, a tokenizer.

    Args:
        source: a local folder or a hub id; of a hub id only the small files are fetched now.
        role: "target" or "drafter", for messages.

    Raises:
        HubError: not fetched.
        CheckpointError: no readable config.
    """

    def __init__(self, source: Source, role: str):
        self.name = source.name
        self._snapshot = hub.small_files(source.repo, role=role) if source.repo else None
        folder = self._snapshot.folder if self._snapshot else source.path
        assert folder is not None, "a source is a repository or a path"
        self.folder: Path = folder
        self.config: dict[str, Any] = files.read_json(folder / "config.json", name=self.name)

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """The folder's generation_config.json; {} without one."""
        return tokenizer.generation_config(self.folder, name=self.name)

    def tokenizer(self) -> TokenizerWrapper:
        """The tokenizer, with the ids that end an answer."""
        return tokenizer.load_tokenizer(
            self.folder, tokenizer.eos_token_ids(self.config, self.generation_config), name=self.name
        )

    def has_tokenizer(self) -> bool:
        """Whether the folder brings a tokenizer.json, as some drafters do."""
        return (self.folder / "tokenizer.json").exists()

    def check(self, on_load: OnLoad | None = None) -> None:
        """Fetch the weights if need be and hold every file against its header and the index."""
        if self._snapshot:
            if on_load and not self._snapshot.whole:
                role: Literal["target", "drafter"] = (
                    "target" if self._snapshot.role == "target" else "drafter"
                )
                on_load(LoadStep("fetch", role, self.name, self._snapshot.weights_nbytes))
            self.folder = hub.weights(self._snapshot)
            self._snapshot = replace(self._snapshot, folder=self.folder, whole=True)
        files.check_weights(self.folder, name=self.name)

    def held_bytes(self, *, dtype: mx.Dtype | None) -> int | None:
        """Bytes of the weights once loaded; None while they are not here and no index tells."""
        return memory.stored_bytes(self.folder, self.config, dtype=dtype, name=self.name)

    def target(
        self,
        *,
        dtype: mx.Dtype | None,
        kv_bits: int | None = None,
        on_bytes: Callable[[int], None] | None = None,
    ) -> MLXTarget:
        """The target, loaded; call `check` first."""
        return load_target(self.folder, dtype=dtype, name=self.name, kv_bits=kv_bits, on_bytes=on_bytes)

    def draft(
        self, *, bits: int | None, dtype: mx.Dtype | None, draft_window: int | None = None
    ) -> DraftNetwork:
        """The draft network, loaded; call `check` first."""
        return load_draft(self.folder, bits=bits, dtype=dtype, draft_window=draft_window, name=self.name)


class GGUFCheckpoint:
    """A GGUF file that holds a whole target, tokenizer included."""

    generation_config: dict[str, Any] = {}  # the format has none

    def __init__(self, path: Path, name: str):
        self.name = name
        self._model = gguf.read(path, name=name)
        self.config = self._model.config

    def tokenizer(self) -> TokenizerWrapper:
        """The tokenizer rebuilt from the file's metadata."""
        return self._model.tokenizer()

    def check(self, on_load: OnLoad | None = None) -> None:
        """Nothing is left to check: the file was read whole."""

    def held_bytes(self, *, dtype: mx.Dtype | None) -> int:
        """Bytes of the weights once loaded."""
        return self._model.held_bytes(dtype=dtype)

    def target(
        self,
        *,
        dtype: mx.Dtype | None,
        kv_bits: int | None = None,
        on_bytes: Callable[[int], None] | None = None,
    ) -> MLXTarget:
        """The target, loaded; the packed tensors are used up.

        Args:
            dtype: None keeps them packed; any other expands them.
            kv_bits: 4 or 8 quantises keys and values.
            on_bytes: told how many bytes of weights are there, after each tensor.
        """
        model = build(self.config)
        packed = self.config.get("quantization")
        if dtype is None and packed:
            nn.quantize(
                model,
                group_size=packed["group_size"],
                bits=packed["bits"],
                class_predicate=lambda path, _: packed.get(path, False),
            )
        try:
            model.load_weights(list(_told(self._model.weights(dtype=dtype), on_bytes)), strict=True)
        except ValueError as error:
            raise CheckpointError(f"The tensors of {self.name} do not fit its metadata: {error}") from error
        model.eval()
        config = {key: value for key, value in self.config.items() if dtype is None or key != "quantization"}
        return MLXTarget(model, config, self.name, kv_bits=kv_bits)


Checkpoint = FolderCheckpoint | GGUFCheckpoint


def _told(
    weights: Iterator[tuple[str, mx.array]], on_bytes: Callable[[int], None] | None
) -> Iterator[tuple[str, mx.array]]:
    done = 0
    for name, array in weights:
        done += array.nbytes
        if on_bytes:
            on_bytes(done)
        yield name, array


def open_target(source: Source) -> Checkpoint:
    """The checkpoint of a target, its config read."""
    if source.path is not None and source.path.suffix == ".gguf" and source.path.is_file():
        return GGUFCheckpoint(source.path, source.name)
    return FolderCheckpoint(source, "target")
