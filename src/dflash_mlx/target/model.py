"""The verifier: any mlx-lm model whose state can be undone, running its own forward under taps.

Comes in: an mlx-lm model and its config. Goes out: passes (logits, features, tape), embeddings, head. Knows no
drafter and no text.
"""

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from dflash_mlx.core import Pass
from dflash_mlx.errors import NumericalError, UnsupportedError
from dflash_mlx.kernels import fastmath, layers, trial
from dflash_mlx.kernels.choice import NO_KERNELS, Choices, Contest
from dflash_mlx.kernels.table import Table
from dflash_mlx.target import caches, kernels, replay, taps, words
from dflash_mlx.target.caches import Cache, CacheSnapshot, Tape, quantised
from dflash_mlx.target.quick import WORTH, QuickForward
from dflash_mlx.target.recurrence import Recorder, Update

_locks: dict[int, threading.RLock] = {}


class MLXTarget:
    """A loaded mlx-lm model as a `core.Target`.

    Args:
        model: the model, its weights evaluated.
        config: its `config.json`.
        name: what messages call it.
        kv_bits: 4 or 8 keeps keys and values quantised from the first token on, where the layer's kind of cache
            allows it; None keeps them in the type of the activations.

    Raises:
        UsageError: for other `kv_bits`.
        UnsupportedError: for a cache kind that cannot be undone, a forward that is not what the taps expect, or
            attention that does not read quantised keys.
    """

    def __init__(self, model: nn.Module, config: dict[str, Any], name: str, *, kv_bits: int | None = None):
        self.model = model
        self.config = config
        self.name = name
        text = config.get("text_config") or config
        self.model_type: str = config.get("model_type", type(model).__module__)
        self.max_positions: int | None = text.get("max_position_embeddings", text.get("n_positions"))
        self.logit_softcap: float | None = text.get("final_logit_softcapping")
        self.choices = NO_KERNELS
        self._quick: QuickForward | None = None
        self._layers: list[nn.Module] = list(model.layers)
        self.num_layers = len(self._layers)
        self._trunk = _trunk(model, self._layers[0], self.model_type)
        self._lock = _lock_of(model)
        caches.check_model(model, self.model_type)
        self._recorder = Recorder(model)
        self._last: tuple[nn.Module, Table] | None = None
        self._looked_for_last = False
        quantised.check_bits(kv_bits)
        self.kv_bits = kv_bits
        self._kv_group = self._group_size() if kv_bits else 0
        self.hidden_size, self.vocab_size = self._probe()

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        arrays: dict[str, mx.array] = dict(tree_flatten(self.model.parameters()))
        return sum(array.nbytes for array in arrays.values())

    @property
    def dtype(self) -> mx.Dtype:
        """The type of the activations."""
        return self.embed(mx.array([0])).dtype

    def make_cache(self) -> Cache:
        """An empty cache."""
        if self.kv_bits:
            return quantised.empty(self.model, self.kv_bits, self._kv_group)
        cache: Cache = make_prompt_cache(self.model)
        return cache

    def forward(self, ids: mx.array, cache: Cache | None = None) -> mx.array:
        """mlx-lm's own forward [1, S] -> [1, S, V], out of reach of taps that another thread has set."""
        with self._lock:
            logits: mx.array = self.model(ids, cache=cache)
        return logits

    def embed(self, ids: mx.array) -> mx.array:
        """Token ids [S] to the rows [S, D] that enter layer 0, scaled as the model scales them."""
        try:
            with self._lock, taps.stopping(self._layers[0]):
                self.model(ids[None])
        except taps.Reached as reached:
            return reached.rows[0]
        raise AssertionError("the forward did not reach layer 0")

    def lookup(self, ids: mx.array) -> mx.array:
        """Token ids [S] to rows [S, D] of the embedding's table, neither scaled nor normed.

        Raises:
            UnsupportedError: the model keeps its table where it cannot be told.
        """
        table = getattr(self._trunk, "embed_tokens", None)
        if table is None:
            raise UnsupportedError(
                f"A '{self.model_type}' model keeps its embedding where this drafter's format cannot reach it; "
                "take a drafter of another format."
            )
        rows: mx.array = table(ids)
        return rows

    def head(self, hidden: mx.array) -> mx.array:
        """Normed rows [S, D] to logits [S, V]: the model's own forward above its layers, soft-cap included."""
        with self._lock, taps.returning(self._trunk, hidden[None]):
            logits: mx.array = self.model(mx.zeros((1, hidden.shape[0]), mx.int32))[0]
        return logits

    def head_table(self) -> Table | None:
        """The matrix that `head` multiplies with; None where logits cannot be had word by word."""
        found = self._last_layer()
        return found[1] if found else None

    def head_by(self, hidden: mx.array, product: words.Product) -> mx.array:
        """`head` of the words whose logits `product` makes of normed rows [S, D], scaled and capped like all."""
        found = self._last_layer()
        assert found is not None, "ask head_table first"
        with self._lock, words.multiplying(found[0], product):
            return self.head(hidden)

    def verify(self, ids: mx.array, cache: Cache, taps_: Sequence[int] = ()) -> Pass:
        """One forward over ids [S] after what the cache holds; everything returned is lazy.

        If it raises, the cache is as before.
        Feature i of `taps_` is the output of layer i (0-based), before the next layer's norm; -1 is what enters
        layer 0.
        """
        rows = ids.shape[0]
        embedded = self.embed(ids) if -1 in taps_ else None
        tape = caches.before(cache, rows)
        try:
            with (
                self._lock,
                self._quickly(rows),
                taps.recording(self._layers, [i for i in taps_ if i >= 0]) as outputs,
                self._recorder.recording(rows) as intakes,
            ):
                logits = self.model(ids[None], cache=cache)
            if not caches.after(cache, tape, intakes):
                raise self._unknown_layout()
        except BaseException:
            # Some layers have taken the rows and some have not.
            caches.commit(cache, tape, 0)
            raise
        tapped = [outputs[i][0] if embedded is None or i >= 0 else embedded for i in taps_]
        features = mx.concatenate(tapped, axis=-1) if tapped else mx.zeros((rows, 0))
        return Pass(logits[0], features, tape)

    def commit(self, cache: Cache, tape: Tape, keep: int) -> None:
        """Let the cache hold only the first `keep` rows of the pass that made `tape`."""
        caches.commit(cache, tape, keep)

    def settle(self, cache: Cache) -> None:
        """Evaluate everything the cache holds."""
        caches.settle(cache)

    def settling(self, cache: Cache) -> Iterator[None]:
        """The same in parts, a few layers each: Python answers a Ctrl-C after each."""
        return caches.settling(cache)

    def snapshot(self, cache: Cache) -> CacheSnapshot:
        """The state now, for `restore`."""
        return caches.snapshot(cache)

    def restore(self, cache: Cache, snapshot: CacheSnapshot) -> None:
        """Bring back the state of `snapshot`."""
        caches.restore(cache, snapshot)

    def contests(self, *, block_size: int, key_bands: list[int]) -> Iterator[Contest]:
        """What passes of 2 to `block_size` rows could use, one contest for each class of shapes."""
        with self._lock:
            shapes = self._shapes()
        yield from kernels.contests(
            self.model,
            shapes,
            vocab_size=self.vocab_size,
            dtype=self.dtype,
            block_size=block_size,
            key_bands=key_bands,
        )
        yield from replay.contests(self._replayed(), block_size=block_size)

    def use(self, choices: Choices) -> str | None:
        """Run passes of 2 to 32 rows with the chosen kernels, once they gave what the stock forward gives.

        Call it between generations; `NO_KERNELS` brings the stock forward back.

        Returns:
            None, or a sentence for the user: they gave something else, and the forward is the stock one.
        """
        with self._lock:
            layers.restore(self.model)
            self.choices = self._recorder.choices = NO_KERNELS
            if choices is NO_KERNELS:
                return None
            expected = self._trial()
            mx.eval(expected)
            kernels.give(self.model, self._shapes(), choices)
            self._recorder.choices = choices
            wrong = trial.difference(expected, self._trial, dtype=self.dtype)
            if wrong is None:
                self.choices = choices
                return None
            layers.restore(self.model)
            self._recorder.choices = NO_KERNELS
        return (
            f"The forward of {self.name} differs with the Metal kernels ({wrong}) in this version of mlx-lm: none "
            "is used."
        )

    def quicken(self, *, worth: int = WORTH) -> str | None:
        """On a CPU, run float32 passes of several rows with quick exponentials, once they gave what MLX's own give.

        Passes of one row, most of whose time is reading weights, stay stock. Call it between generations.

        Args:
            worth: exponentials of a layer's attention from which its own are replaced; all are, for the comparison.

        Returns:
            None, or a sentence for the user: they gave something else, and MLX's own are used.
        """
        if self._quick is not None or not fastmath.is_quick(self.dtype):
            return None
        with self._lock:
            expected = self._trial()
            mx.eval(expected)
            self._quick = QuickForward(self.model, worth=0)
            wrong = trial.difference(expected, self._trial, dtype=self.dtype)
            self._quick = None if wrong else QuickForward(self.model, worth=worth)
            if wrong is None:
                return None
        return f"MLX's own exponentials are used, as quick ones do not work here ({wrong}): rounds take a tenth longer."

    @property
    def is_quick(self) -> bool:
        """Whether passes of several rows use quick exponentials."""
        return self._quick is not None

    def _quickly(self, rows: int) -> AbstractContextManager[None]:
        return nullcontext() if self._quick is None or rows == 1 else self._quick()

    def _last_layer(self) -> tuple[nn.Module, Table] | None:
        if not self._looked_for_last:
            with self._lock:
                rows = self.embed(mx.array([0, 1]))
                self._last = words.last_layer(self.model, self._trunk, self.vocab_size, rows)
            self._looked_for_last = True
        return self._last

    def _shapes(self) -> kernels.Shapes:
        two = mx.array([[0, 1]])
        return kernels.shapes(self.model, lambda: self.model(two, cache=self.make_cache()), rows=2)

    def _replayed(self) -> list[replay.Inputs]:
        """What the delta rules of a pass of two rows take in; lazy."""
        with self._lock, self._recorder.recording(2) as heard:
            self.model(mx.array([[0, 1]]), cache=self.make_cache())
        intakes = [update.intake() for update in heard if isinstance(update, Update)]
        return [intake for intake in intakes if intake is not None]

    def _group_size(self) -> int:
        assert self.kv_bits
        with self._lock:
            return quantised.group_size(self.model, self.kv_bits, self.name)

    def _trial(self) -> list[mx.array]:
        """Logits of passes of many row counts, half of each undone before the next; lazy."""
        cache = self.make_cache()
        self.verify(mx.array([1, 2, 3]), cache)
        logits = []
        for rows in (2, 4, 8, 16, 32):
            tried = self.verify(mx.arange(rows) % self.vocab_size, cache)
            logits.append(tried.logits)
            self.commit(cache, tried.tape, rows // 2)
        return logits

    def _probe(self) -> tuple[int, int]:
        """Hold a tapped and recorded pass, the embedding and the head against the stock forward; gives the widths.

        A change in mlx-lm that breaks what the taps rely on is refused here, aloud.
        """
        ids = mx.array([0, 1, 2])
        stock = self.forward(ids[None], self.make_cache())[0]
        cache = self.make_cache()
        tapped = self.verify(ids, cache, range(self.num_layers))
        with self._lock, taps.recording([self._trunk], [0]) as outputs:
            self.model(ids[None], cache=self.make_cache())
        hidden = outputs[0][0]
        rows = self.embed(ids)
        again, doubled = self.head(hidden), self.head(2 * hidden)
        mx.eval(stock, tapped, again, doubled, rows)
        if mx.any(mx.isnan(stock)).item():
            raise NumericalError(
                f"The logits of {self.name} are no numbers in {rows.dtype}; try dtype 'bfloat16' or 'float32', or "
                "fetch its files again."
            )
        fits = (
            mx.array_equal(stock, tapped.logits).item()
            and mx.array_equal(stock, again).item()
            and not mx.array_equal(again, doubled).item()  # a head behind a norm would not see the factor
            and tapped.features.shape == (3, self.num_layers * rows.shape[-1])
        )
        if not fits:
            raise UnsupportedError(
                f"The forward of a '{self.model_type}' model is not one that hidden states can be read from in this "
                "version of mlx-lm (tapped and stock passes differ). Try mode='off', or another target."
            )
        if not caches.is_faithful(tapped.tape):
            raise self._unknown_layout()
        return int(rows.shape[-1]), int(stock.shape[-1])

    def _unknown_layout(self) -> UnsupportedError:
        return UnsupportedError(
            f"A '{self.model_type}' model does not keep its caches in the way that rejected tokens can be undone in, "
            "with this version of mlx-lm. Try mlx-lm itself for plain decoding, or another target."
        )


def _trunk(model: nn.Module, first: nn.Module, model_type: str) -> nn.Module:
    """The module that holds the layers: everything below the head, final norm included."""
    for module in _descend(model):
        for value in module.values():
            if isinstance(value, list) and value and value[0] is first and module is not model:
                return module
    raise UnsupportedError(
        f"A '{model_type}' model keeps its layers where they cannot be told from its head."
    )


def _descend(module: nn.Module) -> Iterator[nn.Module]:
    yield module
    for child in module.children().values():
        if isinstance(child, nn.Module):
            yield from _descend(child)


def _lock_of(model: nn.Module) -> threading.RLock:
    """One lock a model, shared by all targets made of it and forgotten with it."""
    key, new = id(model), threading.RLock()
    lock = _locks.setdefault(key, new)
    if lock is new:
        weakref.finalize(model, _locks.pop, key, None)
    return lock
