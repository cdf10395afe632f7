"""Trials with given figures, and a pair that takes the time it is told: no model runs."""

from dflash_mlx.bench.arms import PLAIN, Task, Trial
from dflash_mlx.core import Difference, Result, Seconds, Stats


def answer(
    speed, *, tokens=11, prefill=1.0, accepted=(), verified=None, reason="length", peak=1.0, plain_rounds=0
):
    """A result of `tokens` tokens, all but the first decoded at `speed` tokens a second."""
    verified = [7] * len(accepted) if verified is None else list(verified)
    stats = Stats(
        new_tokens=tokens,
        prompt_tokens=20,
        rounds=len(accepted) or tokens - 1,
        verified=sum(verified),
        accepted=sum(accepted),
        verify_lengths=verified,
        accept_lengths=list(accepted),
        plain_rounds=plain_rounds,
        finish_reason=reason,
        seconds=Seconds(prefill=prefill, decode=(tokens - 1) / speed),
        peak_memory_gb=peak,
    )
    return Result("", "", tuple(range(tokens)), reason, stats)


def trial(kind="code", number=1, repeat=0, context=0, differences=None, **speeds):
    """A trial whose arms ran at these speeds, or gave these results; block_2 is the arm "block 2"."""
    results = {
        name.replace("_", " "): value if isinstance(value, Result) else answer(value)
        for name, value in speeds.items()
    }
    none = {name: None for name in results if name != PLAIN}
    return Trial(
        Task(kind, number, f"{kind} {number}", context, 99), repeat, results, none | (differences or {})
    )


class TimedPair:
    """Answers at the speed that `speeds` has for an arm (its rows; None: the own policy; 0: plain)."""

    def __init__(self, speeds=None, stop_after=None, differs=()):
        self.speeds = speeds or {}
        self.asked = []  # (rows, prompt, options) in order
        self._stop_after = stop_after
        self._differs = differs

    def yardstick(self, prompt, **options):
        return self._answer(0, prompt, options)

    def trial(self, prompt, *, policy=None, **options):
        rows = None if policy is None else policy.plan(depth=0, most=100).verify + 1
        return self._answer(rows, prompt, options)

    def parting(self, prompt, plain, drafted, **options):
        return Difference(3, 1, 2, 1e-5) if prompt in self._differs else None

    def _answer(self, rows, prompt, options):
        self.asked.append((rows, prompt, options))
        if self._stop_after is not None and len(self.asked) > self._stop_after:
            raise KeyboardInterrupt
        return answer(self.speeds.get(rows, 10.0), tokens=options["max_new_tokens"])
