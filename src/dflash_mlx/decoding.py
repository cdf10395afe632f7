"""The round loop: token ids in, committed rounds out. Knows nothing of text, files or the terminal.

One round drafts a block, lets the target verify it in one pass, keeps what are the target's own draws, undoes
the rest and only then yields. Between rounds the cache holds exactly the emitted tokens but the last, and
nothing lazy is left behind.
"""

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from dflash_mlx.acceptance import agree
from dflash_mlx.core import CutFunction, Drafter, Pass, Round, Target
from dflash_mlx.errors import NumericalError
from dflash_mlx.pace import Pace
from dflash_mlx.policy import Plan
from dflash_mlx.sampling import NO_NUMBERS, UNDECIDED, Sampler

_CLEAR_EVERY = 256  # tokens between two returns of freed buffers to the system, as in mlx-lm


class Policy(Protocol):
    """Decides, before each round, whether to draft and how many proposed tokens to verify."""

    def plan(self, *, depth: int, most: int) -> Plan:
        """What to do after `depth` tokens, when at most `most` proposals can be verified."""

    def choose(self, confidences: Sequence[float]) -> int:
        """How many to verify of the drafted block; asked where the plan looks."""

    def observe(self, verified: int, accepted: int) -> None:
        """The round that was planned verified so many proposals, and the first `accepted` were right."""


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
        policy: whether to draft and how many proposed tokens to verify; not asked without a drafter.
        max_new_tokens: no round goes past it.
        block_size: tokens in a drafted block, the anchor included.
        prefill_chunk: prompt tokens in one pass; a Pace learns how many that may be.
    """

    target: Target
    cache: Any
    drafter: Drafter | None
    sampler: Sampler
    cut: CutFunction
    policy: Policy
    max_new_tokens: int
    block_size: int
    prefill_chunk: int | Pace
    meter: Meter
    ids: list[int]  # every token so far; the last is the anchor, which the cache does not hold yet
    new_tokens: int = 0

    def prefill(self, prompt: Sequence[int]) -> Iterator[int]:
        """Read the prompt but for its last token, chunk by chunk; yields how many tokens were read so far."""
        yield from self.read(prompt[:-1])
        self.ids.append(prompt[-1])

    def read(self, tokens: Sequence[int]) -> Iterator[int]:
        """Let cache and context hold these tokens too, chunk by chunk; yields how many were read so far."""
        pace = self.prefill_chunk
        done = 0
        while done < len(tokens):
            since = time.perf_counter()
            chunk = tokens[done : done + (pace.tokens if isinstance(pace, Pace) else pace)]
            read = self.target.verify(mx.array(list(chunk)), self.cache, self._taps)
            longest = 0.0
            with self._undone_on_error(read):
                # The chunk's logits stay lazy and are never computed.
                for _ in self.target.settling(self.cache):
                    now = time.perf_counter()
                    longest, since = max(longest, now - since), now
                mx.eval(read.features)
            self.ids.extend(chunk)
            if self.drafter:
                self.drafter.inject(read.features, len(chunk))
                self.drafter.settle()
            del read
            mx.clear_cache()
            done += len(chunk)
            if isinstance(pace, Pace):
                pace.took(len(chunk), max(longest, time.perf_counter() - since))
            yield done

    def rounds(self) -> Iterator[Round]:
        """Emit rounds until the cut ends generation; the first is a plain step on the last prompt token."""
        last = self._step()
        yield last
        while last.finish_reason is None:
            if self.drafter is None:
                yield from self._plain_rounds(self._remaining)
                return
            most = min(self.block_size, self._remaining) - 1
            plan = self.policy.plan(depth=len(self.ids), most=most)
            if plan.verify == 0 or most == 0:
                last = yield from self._plain_rounds(plan.steps)
            else:
                last = self._speculate(plan, most)
                yield last

    def _speculate(self, plan: Plan, most: int) -> Round:
        """Draft, verify, agree, cut, commit."""
        assert self.drafter is not None
        self.meter.start()
        self.drafter.see(self.ids)
        proposal = self.drafter.propose(self.ids[-1], self.block_size)
        n = min(plan.verify, most)
        if plan.look:
            # The second wait for the device in this round, where the policy finds that it pays.
            mx.eval(proposal.tokens, proposal.confidences)
            n = min(self.policy.choose(_floats(proposal.confidences)), most)
        else:
            # The draft runs while the verify pass is being built.
            mx.async_eval(proposal.tokens)
        self.meter.drafted(proposal.tokens)
        proposed = proposal.tokens[:n]
        verified = self.target.verify(
            mx.concatenate([mx.array(self.ids[-1:]), proposed]), self.cache, self.drafter.taps
        )
        with self._undone_on_error(verified):
            self.meter.verified(verified.logits, verified.features)
            accepted, draws = self._agreed(verified, proposed) if n else (0, self._draw(verified, None))
            committed = self._commit(verified, draws[: accepted + 1], n, accepted, drafted=True)
        self.policy.observe(n, accepted)
        return committed

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

    def _commit(
        self, verified: Pass, emitted: Sequence[int], n: int, accepted: int, *, drafted: bool = False
    ) -> Round:
        keep, finish_reason = self.cut(emitted)
        # The cache takes the anchor and all kept tokens but the last, which is the next anchor: `keep` rows.
        self.target.commit(self.cache, verified.tape, keep)
        if self.drafter:
            self.drafter.inject(verified.features, keep)
        self._extend(emitted[:keep])
        return Round(tuple(emitted[:keep]), n, min(accepted, keep), finish_reason, drafted)

    def _plain_rounds(self, steps: int) -> Generator[Round, None, Round]:
        """At most `steps` tokens, one a pass, the next pass enqueued before this one is read, as in mlx-lm.

        Features are tapped all the same, so that the drafter's context is complete when drafting begins again.
        """
        self.meter.start()
        current, drawn = self._enqueue(mx.array(self.ids[-1:]), None)
        while True:
            steps -= 1
            more = steps > 0 and self._remaining > 1
            with self._undone_on_error(current):
                ahead = self._enqueue(drawn, drawn) if more else None
                self.meter.verified(drawn)
                (token,) = self._tokens(drawn)
                if token == UNDECIDED:
                    if ahead:
                        self.target.commit(self.cache, ahead[0].tape, 0)
                    drawn = self.sampler.draw_whole(current.logits, len(self.ids), self._history(None))
                    ahead = self._enqueue(drawn, drawn) if more else None
                    (token,) = self._tokens(drawn)
                _, finish_reason = self.cut([token])
                if self.drafter:
                    mx.eval(current.features)
                    self.drafter.inject(current.features, 1)
            self._extend([token])
            # For whoever looks or stops here, the pass that runs ahead has not happened.
            if ahead:
                self.target.commit(self.cache, ahead[0].tape, 0)
            emitted = Round((token,), 0, 0, finish_reason)
            try:
                yield emitted
            except BaseException:
                # Whoever goes on does not wait here: the next pass is built while this one is computed.
                if ahead:
                    mx.eval(ahead[1], ahead[0].features)
                raise
            if finish_reason is not None or ahead is None:
                return emitted
            self.target.commit(self.cache, ahead[0].tape, 1)
            current, drawn = ahead
            self.meter.start()

    def _enqueue(self, ids: mx.array, since: mx.array | None) -> tuple[Pass, mx.array]:
        """Start a one-row pass and its draw; `since` holds the token that `self.ids` does not have yet."""
        verified = self.target.verify(ids, self.cache, self._taps)
        position = len(self.ids) + (since is not None)
        with self._undone_on_error(verified):
            drawn = self.sampler.draw(verified.logits, position, self._history(since))
            mx.async_eval(drawn, verified.features)
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


def _floats(array: mx.array) -> list[float]:
    """Numbers [n] on the host; waits for the device."""
    values: list[float] = array.tolist()  # type: ignore[assignment]
    return values
