"""The target's own draws: logits and a position in, one token id a row out. Knows no model and no drafter.

A draw depends on the logits of its row, the seed and the absolute position, and on nothing else, so the text
is the same whatever proposed it and however many rows a pass had. Processing order: processors, temperature,
top-k, top-p, min-p, then Gumbel-max in fp32. Ties take the lowest id.
"""

import hashlib
from collections.abc import Callable, Sequence

import mlx.core as mx
from mlx_lm.sample_utils import make_logits_processors

from dflash_mlx.core import SamplingParams
from dflash_mlx.errors import UsageError
from dflash_mlx.kernels import greedy_walk
from dflash_mlx.kernels.choice import NO_KERNELS, Choices

LogitsProcessor = Callable[[mx.array, mx.array], mx.array]
"""Takes the tokens before a row [n] and its logits [1, V] in fp32, returns logits [1, V]."""

UNDECIDED = -1
"""Stands for a draw whose cut reaches past the shortlist; `Sampler.draw_whole` decides it."""

NO_NUMBERS = -2
"""Stands for a draw from logits that are no numbers."""

_SHORTLIST = 256  # largest logits among which top-p, top-k and min-p are cut
_GROUP = 16  # a row is searched for its largest by groups of this many
_INFINITE = 3.4e38  # what no longer is a number in fp32


def check(params: SamplingParams) -> None:
    """Refuse values that mean nothing.

    Raises:
        UsageError: naming the option, the value found and the range expected.
    """
    rules = (
        ("temperature", params.temperature, 0 <= params.temperature < _INFINITE, "0 or more, and finite"),
        ("top_p", params.top_p, 0 < params.top_p <= 1, "above 0 and at most 1 (1: no cut)"),
        ("top_k", params.top_k, params.top_k >= 0, "0 or more (0: no cut)"),
        ("min_p", params.min_p, 0 <= params.min_p <= 1, "between 0 and 1 (0: no cut)"),
        (
            "repetition_penalty",
            params.repetition_penalty,
            0 < params.repetition_penalty < _INFINITE,
            "above 0 (1: none), and finite",
        ),
        ("presence_penalty", params.presence_penalty, _finite(params.presence_penalty), "a finite number"),
        ("frequency_penalty", params.frequency_penalty, _finite(params.frequency_penalty), "a finite number"),
    )
    for name, value, fits, expected in rules:
        if not fits:  # also when the value is not a number
            raise UsageError(f"{name} is {value}; expected {expected}.")


def _finite(value: float) -> bool:
    return -_INFINITE < value < _INFINITE


class Sampler:
    """Draws for one generation.

    Args:
        params: temperature, cuts, penalties and seed.
        processors: the caller's own, applied after the penalties of `params`.
        choices: the kernels in use.
    """

    def __init__(
        self,
        params: SamplingParams,
        processors: Sequence[LogitsProcessor] = (),
        *,
        choices: Choices = NO_KERNELS,
    ):
        self.params = params
        self._choices = choices
        self._processors = [*_penalties(params), *processors]

    @property
    def reads_history(self) -> bool:
        """Whether `draw` needs the tokens before its rows."""
        return bool(self._processors)

    def draw(self, logits: mx.array, position: int, history: mx.array | None = None) -> mx.array:
        """Draw one token a row.

        Args:
            logits: [S, V]; row j draws the token at `position + j`.
            position: absolute position of the first row's token, that is, how many tokens stand before it.
            history: [position + S - 1] token ids, those before the last row's token; needed if `reads_history`.

        Returns:
            [S] int32, lazy; `UNDECIDED` in rows that only `draw_whole` can decide, `NO_NUMBERS` where a model broke.
        """
        return self._draw(logits, position, history, max(_SHORTLIST, self.params.top_k + 1))

    def walk(self, logits: mx.array, proposed: mx.array) -> mx.array | None:
        """Greedy draws of a pass and how far the proposal agrees with them, where a kernel was chosen for that.

        Args:
            logits: [S, V].
            proposed: [S - 1] int32.

        Returns:
            [S + 1] int32, lazy: the agreeing tokens, then what `draw` gives; None where `draw` is to be asked.
        """
        if self.params.temperature > 0 or self._processors:
            return None
        if not greedy_walk.is_chosen(logits, proposed, self._choices):
            return None
        return greedy_walk.greedy_walk(logits, proposed, choices=self._choices)

    def draw_whole(self, logits: mx.array, position: int, history: mx.array | None = None) -> mx.array:
        """Like `draw`, over a full sort of each row: slow, and never undecided."""
        return self._draw(logits, position, history, logits.shape[-1])

    def gap(self, logits: mx.array, position: int, history: mx.array | None, ids: tuple[int, int]) -> float:
        """By how much logits [1, V] would have to move for the draw at `position` to fall on the second id.

        At temperature 0 the difference of the two logits, else that of the perturbed ones. A token that top-k, top-p
        or min-p cut off must first come in again: where that takes more, the gap is its distance to the last one kept.
        """
        logits = self._process(logits.astype(mx.float32), position, history)
        pair, temperature = mx.array(ids, mx.uint32), self.params.temperature
        if temperature == 0:
            return _first_ahead(logits[0, pair])
        scores = _tempered(logits, temperature)
        ahead = _first_ahead(scores[0, pair] + _gumbel(pair, _keys(self.params.seed, position, 1))[0])
        missing = mx.maximum(_last_kept(scores, self.params) - scores[0, pair], 0)
        first, second = _floats(missing)
        if second > 0:
            return temperature * max(ahead, second)
        return temperature * (min(ahead, -first) if first > 0 else ahead)

    def _draw(self, logits: mx.array, position: int, history: mx.array | None, shortlist: int) -> mx.array:
        logits = self._process(logits.astype(mx.float32), position, history)
        # A model that breaks makes whole rows of no numbers; one entry tells.
        return mx.where(mx.isnan(logits[:, 0]), NO_NUMBERS, self._drawn(logits, position, shortlist))

    def _drawn(self, logits: mx.array, position: int, shortlist: int) -> mx.array:
        params = self.params
        if params.temperature == 0:
            return mx.argmax(logits, axis=-1).astype(mx.int32)
        scores = _tempered(logits, params.temperature)
        keys = _keys(params.seed, position, logits.shape[0])
        if params.top_k == 0 and params.top_p == 1 and params.min_p == 0:
            ids = mx.arange(logits.shape[-1], dtype=mx.uint32)
            return mx.argmax(scores + _gumbel(ids, keys), axis=-1).astype(mx.int32)
        return _draw_within(scores, keys, params, min(shortlist, logits.shape[-1]))

    def _process(self, logits: mx.array, position: int, history: mx.array | None) -> mx.array:
        if not self._processors:
            return logits
        assert history is not None, "this sampler reads the history"
        rows = []
        for j in range(logits.shape[0]):
            row = logits[j : j + 1]
            for processor in self._processors:
                row = processor(history[: position + j], row)
            rows.append(row)
        return mx.concatenate(rows)


def _penalties(params: SamplingParams) -> list[LogitsProcessor]:
    """mlx-lm's processors for the penalties that are set; each looks back over the last 20 tokens."""
    repetition = params.repetition_penalty if params.repetition_penalty != 1 else None
    processors: list[LogitsProcessor] = make_logits_processors(
        repetition_penalty=repetition,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
    )
    return processors


def _tempered(logits: mx.array, temperature: float) -> mx.array:
    """Logits over temperature, each row's largest at 0: finite there however small the temperature."""
    largest = mx.max(logits, axis=-1, keepdims=True)
    return mx.where(logits == largest, 0, (logits - largest) / temperature)


def _keys(seed: int, position: int, rows: int) -> mx.array:
    """Two 32-bit words of key [rows, 2] for the draws at `position` and after."""
    words = []
    for p in range(position, position + rows):
        digest = hashlib.blake2b(f"{seed}:{p}".encode(), digest_size=8).digest()
        words.append([int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")])
    return mx.array(words, dtype=mx.uint32)


def _gumbel(ids: mx.array, keys: mx.array) -> mx.array:
    """Gumbel noise of token `ids` ([n] or [S, n]) under `keys` [S, 2]: a function of the two, fp32 [S, n].

    Noise belongs to the token id, not to its rank, so that two logits changing rank do not change the draw.
    """
    bits = _mix(_mix(ids * mx.array(0x9E3779B9, mx.uint32) + keys[:, :1]) ^ keys[:, 1:])
    below_one = 1 - 2**-24  # the largest fp32 below 1
    uniform = mx.minimum((bits.astype(mx.float32) + 0.5) * 2.0**-32, below_one)
    # -log1p(-u) keeps full precision where it matters, at the small values that win the race.
    return -mx.log(-mx.log1p(-uniform))


def _mix(x: mx.array) -> mx.array:
    """A 32-bit integer hash with low bias (constants by C. Wellons' hash prospector, public domain)."""
    x = (x ^ (x >> 16)) * mx.array(0x7FEB352D, mx.uint32)
    x = (x ^ (x >> 15)) * mx.array(0x846CA68B, mx.uint32)
    return x ^ (x >> 16)


def _draw_within(scores: mx.array, keys: mx.array, params: SamplingParams, shortlist: int) -> mx.array:
    """Gumbel-max inside what top-k, top-p and min-p leave of each row [S, V], whose largest score is 0.

    Every cut keeps a prefix by rank.
    """
    values, ids = _largest(scores, shortlist)
    kept = _kept(values, scores, params)
    noisy = mx.where(kept, values + _gumbel(ids, keys), -mx.inf)
    best = mx.max(noisy, axis=-1, keepdims=True)
    last_id = mx.array(scores.shape[-1] - 1, mx.uint32)  # where no score is a number, still an id
    drawn = mx.min(mx.where(noisy == best, ids, last_id), axis=-1).astype(mx.int32)
    if shortlist == scores.shape[-1]:
        return drawn
    # Elements equal to the shortlist's last may have been left out, so the cut must end above it, unless those
    # are impossible ones.
    last, last_kept = values[:, -1], mx.min(mx.where(kept, values, mx.inf), axis=-1)
    return mx.where((last_kept > last) | (last == -mx.inf), drawn, UNDECIDED)


def _kept(values: mx.array, scores: mx.array, params: SamplingParams) -> mx.array:
    """What the cuts leave of the largest `values` [S, n], in order, of each row of scores [S, V]."""
    count = values.shape[-1]
    kept = mx.broadcast_to(mx.arange(count) < (params.top_k or count), values.shape)
    weights = mx.exp(values)
    if params.top_p < 1:
        ranked = mx.where(kept, weights, 0)
        if params.top_k:
            total = mx.sum(ranked, axis=-1, keepdims=True)
        else:
            total = mx.exp(mx.logsumexp(scores, axis=-1, keepdims=True))
        before = mx.cumsum(ranked, axis=-1) - ranked
        kept = kept & (before < params.top_p * total)
    if params.min_p > 0:
        kept = kept & (weights >= params.min_p)
    return kept


def _last_kept(scores: mx.array, params: SamplingParams) -> mx.array:
    """The smallest of scores [1, V] that the cuts leave [1]."""
    values, _ = _largest(scores, scores.shape[-1])
    return mx.min(mx.where(_kept(values, scores, params), values, mx.inf), axis=-1)


def _first_ahead(two: mx.array) -> float:
    first, second = _floats(two)
    return first - second


def _floats(array: mx.array) -> list[float]:
    values: list[float] = array.tolist()  # type: ignore[assignment]
    return values


def _largest(scores: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """The `count` largest of each row [S, V] in order, the lowest id first among equals: values, ids (uint32)."""
    rows, width = scores.shape
    ids = mx.broadcast_to(mx.arange(width, dtype=mx.int64), scores.shape)
    if width > count * _GROUP:
        scores, ids = _best_groups(scores, count)
    if scores.shape[-1] > count:
        places = mx.argpartition(-scores, count - 1, axis=-1)[:, :count]
        scores, ids = mx.take_along_axis(scores, places, -1), mx.take_along_axis(ids, places, -1)
    # One integer holds value and id: sorting it orders by value down, then by id up.
    order = mx.view(scores + 0.0, mx.int32)  # + 0.0: a negative zero is a zero
    order = order ^ ((order >> 31) & 0x7FFFFFFF)
    packed = mx.sort((-order.astype(mx.int64)) * 2**32 + ids, axis=-1)
    order = (-(packed >> 32)).astype(mx.int32)
    values = mx.view(order ^ ((order >> 31) & 0x7FFFFFFF), mx.float32)
    return values, (packed & 0xFFFFFFFF).astype(mx.uint32)


def _best_groups(scores: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """The members of the `count` groups with the largest maxima; the `count` largest scores are among them."""
    rows, width = scores.shape
    short = -width % _GROUP
    padded = mx.pad(scores, [(0, 0), (0, short)], constant_values=-mx.inf) if short else scores
    groups = padded.reshape(rows, -1, _GROUP)
    best = mx.argpartition(-mx.max(groups, axis=-1), count - 1, axis=-1)[:, :count]
    members = mx.take_along_axis(groups, best[..., None], axis=1).reshape(rows, -1)
    ids = best[..., None].astype(mx.int64) * _GROUP + mx.arange(_GROUP, dtype=mx.int64)
    return members, ids.reshape(rows, -1)
