"""How a pair drafts: over which words, and in how many bits, chosen by what was measured on this machine.

In: a loaded pair and what was asked for. Out: a shortlist or none, a packed drafter or none, a sentence for the user.
Decides once, before the first generation, and with the same figures always alike.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

from dflash_mlx import calibration
from dflash_mlx.calibration import Drafts
from dflash_mlx.drafter import Drafter, DraftNetwork, Shortlist, quantised
from dflash_mlx.drafter.shortlist import Head, refuse, why_whole
from dflash_mlx.errors import PairError, UsageError
from dflash_mlx.kernels.table import Table
from dflash_mlx.loading import LoadedPair, by_frequency, recommended_bytes, weight_bytes
from dflash_mlx.policy.odds import expected_tokens
from dflash_mlx.runtime import GB, Machine

DraftVocab = int | Literal["auto", "full"]
DraftBits = int | Literal["auto"]

_SHARES = (16, 8, 4, 2)  # a list holds one of so many words
_LEAST = 2048  # words; shorter lists miss too much
_STEP = 256  # list lengths are multiples of it
_ACCEPTED = 0.7  # of proposals, a guess: the share that a missed word is taken from
_FROM_TEXT = 0.5  # of the missed words, those that the text holds already (SmolLM2: 0.42 to 0.48)
_WORTH = 1.01  # a round must become faster by this factor
# The same for packed drafters: 8 bits agree nearly always with 16, 4 bits are worth a few proposals in a hundred.
_WORTH_PACKED = {8: 1.02, 4: 1.05}
_UNPACKED = "unpacked"


class Packed(NamedTuple):
    """A pair whose drafter has the bits that suit this machine."""

    pair: LoadedPair
    notes: tuple[str, ...]


class Listed(NamedTuple):
    """What a pair drafts over."""

    shortlist: Shortlist | None  # None: all words of the head
    notes: tuple[str, ...]


def check_draft_vocab(value: object) -> None:
    """Refuse anything but "auto", "full" and a whole number of words.

    Raises:
        UsageError: another value.
    """
    if value in ("auto", "full"):
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"draft_vocab is {value!r}; expected 'auto', 'full' or a number of words.")


def packed(
    pair: LoadedPair, *, key: Mapping[str, str] | None, block_size: int, tell: Callable[[str], None]
) -> Packed:
    """Quantise an unquantised drafter where a round becomes clearly faster by that.

    Args:
        pair: its kernels not chosen yet.
        key: what measured figures hold for; None: nothing is to be measured.
        block_size: tokens in a drafted block.
        tell: told before anything is measured.
    """
    network, target = pair.draft, pair.target.model
    if network is None:
        return Packed(pair, ())
    if network.bits is not None:
        return Packed(pair, (f"{network.name} is stored with {network.bits} bits and stays so.",))
    if key is None:
        return Packed(
            pair, ("The drafter is not quantised: draft_bits 'auto' goes by costs, and none are measured.",)
        )
    made: dict[str, DraftNetwork] = {_UNPACKED: network}

    def ways() -> Mapping[str, Callable[[], Drafter]]:
        made.update({str(bits): quantised(network, bits) for bits in _WORTH_PACKED})
        return {name: partial(Drafter, one, target) for name, one in made.items()}

    try:
        names = [_UNPACKED, *map(str, _WORTH_PACKED)]
        found = calibration.draft_costs(target, names, ways, key, block_size=block_size, tell=tell)
    except UsageError as error:
        return Packed(pair, (f"The drafter is not quantised. {error}",))
    bits = best_bits(found)
    times = ", ".join(f"{1e3 * found.draft[str(n)]:.1f} with {n} bits" for n in _WORTH_PACKED)
    times = f"{1e3 * found.draft[_UNPACKED]:.1f} ms unquantised, {times}"
    if bits is None:
        return Packed(
            pair, (f"The drafter is not quantised, as that would not pay here: a draft takes {times}.",)
        )
    chosen = made[str(bits)] if str(bits) in made else quantised(network, bits)
    nbytes = pair.nbytes - weight_bytes(network) + weight_bytes(chosen)
    note = f"The drafter is quantised to {bits} bits: a draft takes {times}."
    return Packed(replace(pair, draft=chosen, nbytes=nbytes), (note,))


def listed(
    pair: LoadedPair,
    asked: DraftVocab,
    *,
    machine: Machine,
    key: Mapping[str, str] | None,
    block_size: int,
    tell: Callable[[str], None],
) -> Listed:
    """The shortlist of a pair.

    Args:
        pair: with a drafter, its kernels chosen.
        asked: "auto", "full" or how many words.
        machine: how much it holds.
        key: what measured figures hold for; None: nothing is to be measured, and "auto" means "full".
        block_size: tokens in a drafted block.
        tell: told before anything is measured.

    Raises:
        UsageError: more words than there are.
        UnsupportedError: a number of words, and a drafter that cannot propose from some.
        PairError: frequent words of another vocabulary.
    """
    network, target = pair.draft, pair.target.model
    if network is None or asked == "full" or (asked == "auto" and key is None):
        return Listed(None, ())
    table = _table(network, pair)
    why = why_whole(
        own_words=network.config.parts.ends.head_rows if network.d2t is not None else None,
        markov=network.markov_head is not None,
        table=table,
        target=target.name,
    )
    if asked == "auto":
        if why is not None or table is None or key is None:
            return Listed(None, ())
        return _chosen(pair, network, table, machine=machine, key=key, block_size=block_size, tell=tell)
    if why is not None or table is None:
        raise refuse(network.name, asked, why or "")
    least = network.config.parts.selector.top_k if network.config.parts.selector else 1
    if not least <= asked < target.vocab_size:
        raise UsageError(
            f"draft_vocab is {asked}; {network.name} can propose from {least} to {target.vocab_size - 1:,} words, or "
            "from all ('full')."
        )
    return Listed(Shortlist(table, _order(pair, network)[:asked], through=_head(pair, network)), ())


def _table(network: DraftNetwork, pair: LoadedPair) -> Table | None:
    """The table whose rows make the drafter's logits."""
    if network.lm_head is None:
        return pair.target.model.head_table()
    own = Table.of(network.lm_head)
    # It may be padded beyond the target's words.
    return own.first(min(own.rows, pair.target.model.vocab_size)) if own else None


def _head(pair: LoadedPair, network: DraftNetwork) -> Head | None:
    """What is done to the table's products: the target's own scale and cap, where it is the target's head."""
    return pair.target.model.head_by if network.lm_head is None else None


def _order(pair: LoadedPair, network: DraftNetwork) -> list[int]:
    counted, size = network.frequent, pair.target.model.vocab_size
    if counted is not None and counted.vocab_size > size:
        raise PairError(
            f"The frequent words of {network.name} are those of a vocabulary of {counted.vocab_size:,}, but "
            f"{pair.target.name} has {size:,} words; the drafter belongs to another target."
        )
    return by_frequency(pair.target.tokenizer, size, counted)


def _chosen(
    pair: LoadedPair,
    network: DraftNetwork,
    table: Table,
    *,
    machine: Machine,
    key: Mapping[str, str],
    block_size: int,
    tell: Callable[[str], None],
) -> Listed:
    target = pair.target.model
    row = table.nbytes / table.rows
    room = recommended_bytes(machine) - pair.nbytes
    sizes = [size for size in lengths(target.vocab_size) if size * row <= room]
    if not sizes:
        return Listed(None, ())
    order, head = _order(pair, network), _head(pair, network)
    make = partial(Drafter, network, target)

    def ways() -> Mapping[str, Callable[[], Drafter]]:
        longest = Shortlist(table, order[: sizes[-1]], through=head)
        return {str(n): partial(make, shortlist=longest.first(n)) for n in sizes} | {"full": make}

    found = calibration.draft_costs(
        target, [*map(str, sizes), "full"], ways, key, block_size=block_size, tell=tell
    )
    missed = {size: _missed(size, network, target.vocab_size) for size in sizes}
    size = best_length(found, missed, block_size=block_size)
    if size is None:
        return Listed(None, ())
    share = bearable(found, size, block_size=block_size)
    saved = max(found.draft["full"] - found.draft[str(size)], 0.0)
    shortlist = Shortlist(table, order[:size], through=head, bearable=share, saved=saved)
    note = (
        f"Proposals come from {size:,} of {target.vocab_size:,} words and those of the text: a draft takes "
        f"{1e3 * found.draft[str(size)]:.1f} ms instead of {1e3 * found.draft['full']:.1f} "
        f"({shortlist.nbytes / GB:.2f} GB more)."
    )
    return Listed(shortlist, (note,))


def lengths(vocab_size: int) -> list[int]:
    """How many words the lists have that are tried; none for a small vocabulary, whose head costs little."""
    rounded = [vocab_size // share // _STEP * _STEP for share in _SHARES]
    return [size for size in rounded if _LEAST <= size < vocab_size]


def best_bits(found: Drafts) -> int | None:
    """The bits that gain most over what they must gain at least; None: unquantised."""
    usual = found.verify + found.draft[_UNPACKED]
    gains = {
        bits: usual / (found.verify + found.draft[str(bits)]) / worth for bits, worth in _WORTH_PACKED.items()
    }
    best = max(gains, key=lambda bits: gains[bits])
    return best if gains[best] > 1.0 else None


def best_length(found: Drafts, missed: Mapping[int, float], *, block_size: int) -> int | None:
    """The list with which most tokens a second are expected; None: all words.

    Args:
        found: seconds of a draft by the number of words, and of all as "full".
        missed: the share of words that each list misses.
        block_size: tokens in a drafted block.
    """
    full = _tokens(0.0, block_size) / (found.verify + found.draft["full"])
    rates = {
        n: _tokens(share, block_size) / (found.verify + found.draft[str(n)]) for n, share in missed.items()
    }
    best = max(rates, key=lambda n: rates[n])
    return best if rates[best] > _WORTH * full else None


def bearable(found: Drafts, size: int, *, block_size: int) -> float:
    """The share of missed words up to which a list is faster than all words."""
    full = _tokens(0.0, block_size) / (found.verify + found.draft["full"])
    seconds = found.verify + found.draft[str(size)]
    return max(
        percent / 100 for percent in range(101) if _tokens(percent / 100, block_size) / seconds >= full
    )


def _missed(words: int, network: DraftNetwork, vocab_size: int) -> float:
    """The share of an answer's tokens that neither a list of so many words nor the text before holds."""
    if network.frequent is not None:
        return _FROM_TEXT * network.frequent.missing(words)
    # By the order of ids alone; answers of SmolLM2 (49,152 words) miss 0.24, 0.15, 0.08 and 0.03 with a sixteenth,
    # an eighth, a quarter and half of the ids. A larger vocabulary has more words in the same share of its ids.
    known = words * (49152 / max(vocab_size, 49152)) ** 0.5
    return min(1.0, _FROM_TEXT * 0.147 * (6144 / known) ** 0.87)


def _tokens(missed: float, block_size: int) -> float:
    """Tokens of a round whose proposals miss so many words."""
    return expected_tokens([_ACCEPTED * (1 - missed)] * (block_size - 1))[-1]
