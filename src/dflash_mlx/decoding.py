"""The round loop: token ids in, committed rounds out. Knows nothing of text, files or the terminal.

One round drafts a block, lets the target verify it in one pass, keeps what are the target's own draws, undoes
the rest and only then yields. Between rounds the cache holds exactly the emitted tokens but the last, and
nothing lazy is left behind.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from dflash_mlx.acceptance import agree
from dflash_mlx.core import CutFunction, Drafter, Pass, Round, Target
from dflash_mlx.errors import NumericalError
from dflash_mlx.sampling import NO_NUMBERS, UNDECIDED, Sampler

_CLEAR_EVERY = 256  # tokens between two returns of freed buffers to the system, as in mlx-lm


class Policy(Protocol):
    """Decides how many proposed tokens to verify."""

    def choose(self, proposed: int) -> int:
        """Of `proposed` tokens, how many the target verifies."""


class Meter:
    """Seconds spent drafting and verifying, measured with barriers; without `enabled` it does nothing."""

    def __init__(self, *, enabled: bool = False):
        self.enabled = enabled
        self.draft = 0.0
        self.verify = 0.0
        self._since = 0.0

    def start(self) -> None:
        """Open a round."""
        self._since = time.perf_counter()

    def drafted(self, *arrays: mx.array) -> None:
        """Book the time since the last mark as drafting, once the arrays are there."""
        self.draft += self._lap(arrays)

    def verified(self, *arrays: mx.array) -> None:
        """Book the time since the last mark as verifying, once the arrays are there."""
        self.verify += self._lap(arrays)

    def _lap(self, arrays: Sequence[mx.array]) -> float:
        if not self.enabled:
            return 0.0
        mx.eval(*arrays)
        now = time.perf_counter()
        elapsed, self._since = now - self._since, now
        return elapsed


@dataclass(slots=True, kw_only=True)
class Decoder:
    """One generation over one cache.

    Args:
        target, cache: the verifier and the state it has reached.
        drafter: proposes blocks; None decodes plainly, one token a pass, pipelined.
        sampler: the target's draws.
        cut: says before anything is committed how many of a round's tokens are kept.
        policy: how many proposed tokens to verify.
        max_new_tokens: no round goes past it.
        block_size: tokens in a drafted block, the anchor included.
        prefill_chunk: prompt tokens in one pass.
    """

    target: Target
    cache: Any
    drafter: Drafter | None
    sampler: Sampler
    cut: CutFunction
    policy: Policy
    max_new_tokens: int
    block_size: int
    prefill_chunk: int
    meter: Meter
    ids: list[int]  # every token so far; the last is the anchor, which the cache does not hold yet
    new_tokens: int = 0

    def prefill(self, prompt: Sequence[int]) -> Iterator[int]:
        """Read the prompt but for its last token, chunk by chunk; yields how many tokens were read so far."""
        yield from self.read(prompt[:-1])
        self.ids.append(prompt[-1])

    def read(self, tokens: Sequence[int]) -> Iterator[int]:
        """Let cache and context hold these tokens too, chunk by chunk; yields how many were read so far."""
        for start in range(0, len(tokens), self.prefill_chunk):
            chunk = tokens[start : start + self.prefill_chunk]
            read = self.target.verify(mx.array(list(chunk)), self.cache, self._taps)
            with self._undone_on_error(read):
                # The chunk's logits stay lazy and are never computed.
                mx.eval(read.features)
                self.target.settle(self.cache)
            self.ids.extend(chunk)
            if self.drafter:
                self.drafter.inject(read.features, len(chunk))
                self.drafter.settle()
            del read
            mx.clear_cache()
            yield start + len(chunk)

    def rounds(self) -> Iterator[Round]:
        """Emit rounds until the cut ends generation; the first is a plain step on the last prompt token."""
        last = self._step()
        yield last
        while last.finish_reason is None:
            if self.drafter is None:
                yield from self._plain_rounds()
                return
            last = self._speculate() if self._remaining > 1 else self._step()
            yield last

    def _speculate(self) -> Round:
        """Draft, verify, agree, cut, commit."""
        assert self.drafter is not None
        self.meter.start()
        proposal = self.drafter.propose(self.ids[-1], self.block_size)
        # The draft runs while the verify pass is being built.
        mx.async_eval(proposal.tokens)
        self.meter.drafted(proposal.tokens)
        n = min(self.policy.choose(proposal.tokens.shape[0]), self._remaining - 1)
        proposed = proposal.tokens[:n]
        verified = self.target.verify(
            mx.concatenate([mx.array(self.ids[-1:]), proposed]), self.cache, self.drafter.taps
        )
        with self._undone_on_error(verified):
            self.meter.verified(verified.logits, verified.features)
            accepted, draws = self._agreed(verified, proposed)
            return self._commit(verified, draws[: accepted + 1], n, accepted)

    def _step(self) -> Round:
        """One plain step that still taps features, so that drafting can go on after it."""
        self.meter.start()
        verified = self.target.verify(mx.array(self.ids[-1:]), self.cache, self._taps)
        with self._undone_on_error(verified):
            self.meter.verified(verified.logits, verified.features)
            return self._commit(verified, self._draw(verified, None), 0, 0)

    @contextmanager
    def _undone_on_error(self, verified: Pass) -> Iterator[None]:
        """When what follows a pass is interrupted or fails, the pass has not happened."""
        try:
            yield
        except BaseException:
            self.target.commit(self.cache, verified.tape, 0)
            raise

    def _agreed(self, verified: Pass, proposed: mx.array) -> tuple[int, list[int]]:
        """How many proposed tokens the target would have drawn too, and its own token for each row."""
        walk = self.sampler.walk(verified.logits, proposed)
        if walk is None:
            draws = self._draw(verified, proposed)
            return agree(_ints(proposed), draws), draws
        mx.eval(walk, verified.features)
        accepted, *draws = _ints(walk)
        return accepted, draws

    def _draw(self, verified: Pass, proposed: mx.array | None) -> list[int]:
        """The target's token for each row; the round's only wait for the device."""
        history = self._history(proposed)
        draws = self.sampler.draw(verified.logits, len(self.ids), history)
        waiting = [draws, verified.features] if proposed is None else [draws, verified.features, proposed]
        mx.eval(*waiting)
        tokens = self._tokens(draws)
        if UNDECIDED in tokens:
            tokens = self._tokens(self.sampler.draw_whole(verified.logits, len(self.ids), history))
        return tokens

    def _tokens(self, draws: mx.array) -> list[int]:
        """Draws on the host; text from logits that are no numbers would be garbage without a word."""
        tokens = _ints(draws)
        if NO_NUMBERS in tokens:
            raise NumericalError(
                f"The logits of {self.target.name} are no numbers after {len(self.ids)} tokens; try dtype 'bfloat16' "
                "or 'float32'."
            )
        return tokens

    def _commit(self, verified: Pass, emitted: Sequence[int], n: int, accepted: int) -> Round:
        keep, finish_reason = self.cut(emitted)
        # The cache takes the anchor and all kept tokens but the last, which is the next anchor: `keep` rows.
        self.target.commit(self.cache, verified.tape, keep)
        if self.drafter:
            self.drafter.inject(verified.features, keep)
        self._extend(emitted[:keep])
        return Round(tuple(emitted[:keep]), n, min(accepted, keep), finish_reason)

    def _plain_rounds(self) -> Iterator[Round]:
        """One token a pass, the next pass enqueued before this one is read, as in mlx-lm."""
        current, drawn = self._enqueue(mx.array(self.ids[-1:]), None)
        while True:
            with self._undone_on_error(current):
                ahead = self._enqueue(drawn, drawn) if self._remaining > 1 else None
                (token,) = self._tokens(drawn)
                if token == UNDECIDED:
                    if ahead:
                        self.target.commit(self.cache, ahead[0].tape, 0)
                    drawn = self.sampler.draw_whole(current.logits, len(self.ids), self._history(None))
                    ahead = self._enqueue(drawn, drawn) if self._remaining > 1 else None
                    (token,) = self._tokens(drawn)
                _, finish_reason = self.cut([token])
            self._extend([token])
            # For whoever looks or stops here, the pass that runs ahead has not happened.
            if ahead:
                self.target.commit(self.cache, ahead[0].tape, 0)
            try:
                yield Round((token,), 0, 0, finish_reason)
            finally:
                if ahead:
                    mx.eval(ahead[1])
            if finish_reason is not None or ahead is None:
                return
            self.target.commit(self.cache, ahead[0].tape, 1)
            current, drawn = ahead

    def _enqueue(self, ids: mx.array, since: mx.array | None) -> tuple[Pass, mx.array]:
        """Start a one-row pass and its draw; `since` holds the token that `self.ids` does not have yet."""
        verified = self.target.verify(ids, self.cache, ())
        position = len(self.ids) + (since is not None)
        with self._undone_on_error(verified):
            drawn = self.sampler.draw(verified.logits, position, self._history(since))
            mx.async_eval(drawn)
        return verified, drawn

    def _history(self, since: mx.array | None) -> mx.array | None:
        if not self.sampler.reads_history:
            return None
        known = mx.array(self.ids)
        return known if since is None else mx.concatenate([known, since])

    def _extend(self, tokens: Sequence[int]) -> None:
        self.ids.extend(tokens)
        before, self.new_tokens = self.new_tokens, self.new_tokens + len(tokens)
        if before // _CLEAR_EVERY != self.new_tokens // _CLEAR_EVERY:
            mx.clear_cache()

    @property
    def _taps(self) -> tuple[int, ...]:
        return self.drafter.taps if self.drafter else ()

    @property
    def _remaining(self) -> int:
        return self.max_new_tokens - self.new_tokens


def _ints(array: mx.array) -> list[int]:
    """Token ids [n] on the host; waits for the device."""
    values: list[int] = array.tolist()  # type: ignore[assignment]
    return values
