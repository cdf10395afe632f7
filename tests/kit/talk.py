"""Turns of a conversation on planned drafters, ended in every way there is, each held against a cold run."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import mlx.core as mx
from hypothesis import strategies as st

from dflash_mlx import DFlashGenerator, engine
from dflash_mlx.conversation import common_prefix
from dflash_mlx.target import kept
from tests.kit.planned import PlannedDrafter
from tests.loading.checkpoints import VOCAB

ENDINGS = ["length", "stop id", "stop string", "left", "error", "interrupt", "interrupted reading"]
FAILING = ENDINGS[4:]

TURNS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 7), min_size=1, max_size=4),  # accepted tokens, round by round
        st.sampled_from(ENDINGS),
        st.integers(1, 14),  # where it ends
        st.integers(0, 9),  # tokens of the history that the next prompt does not repeat
        st.lists(st.integers(0, 99), min_size=1, max_size=12),  # what the user says next
    ),
    min_size=2,
    max_size=4,
)


class Talk:
    """Turns of one conversation on planned drafters, each held against a cold run over the same ids."""

    def __init__(self, runner: DFlashGenerator, cold: DFlashGenerator, options: dict[str, Any]):
        self.runner, self.cold, self.options = runner, cold, options
        self.reused = -1

    def turn(self, ids: list[int], plan: Sequence[int], ending: str, length: int) -> list[int]:
        """Answer `ids` up to this ending; gives the tokens of the answer that were seen."""
        truth = self.cold.generate(ids, max_new_tokens=length + 9, **self.options)
        expected = list(truth.token_ids)
        reach = expected_reuse(self.runner, ids)
        options = {**self.options, "max_new_tokens": length}
        if ending == "stop string":
            options["stop"] = truth.text[length : length + 2] or "never"
        if ending in ("error", "interrupt"):
            options["logits_processors"] = [_fails_after(length, ending)]
        stop = (expected[length - 1],) if ending == "stop id" else ()
        draft = PlannedDrafter([*ids, *expected], plan, vocab_size=VOCAB)
        if ending == "interrupted reading":
            draft.inject = _interrupted(draft.inject)  # type: ignore[method-assign]
        with planned(self.runner, draft, stop):
            seen = self._read(ids, options, stop_after=3 if ending == "left" else None)
        assert seen == expected[: len(seen)]
        assert not seen or self.reused == reach
        self._check_kept([*ids, *expected], ending, reach, len(ids) + len(seen) - 1)
        return seen

    def _check_kept(self, whole: list[int], ending: str, reach: int, seen: int) -> None:
        """The last state holds the very tokens that were seen but the last; after a failure perhaps a few more."""
        if ending == "interrupted reading" and reach == 0:
            return  # nothing was held before, and nothing is now
        state = self.runner._kept._states[-1]
        assert list(state.ids) == whole[: len(state.ids)]
        if ending == "interrupted reading":
            assert len(state.ids) == reach or (len(state.ids) < reach and not kept.goes_back(state.cache))
        else:
            assert len(state.ids) == seen or (ending in FAILING and len(state.ids) > seen)

    def _read(self, ids: list[int], options: dict[str, Any], *, stop_after: int | None) -> list[int]:
        stream, seen, self.reused = self.runner.stream(ids, **options), [], -1
        try:
            for number, chunk in enumerate(stream, 1):
                seen += chunk.tokens
                self.reused = chunk.stats.reused_tokens
                if number == stop_after:
                    break
        except (RuntimeError, KeyboardInterrupt) as error:
            assert str(error) == "planned"
        finally:
            stream.close()  # type: ignore[attr-defined]
        return seen


def expected_reuse(runner: DFlashGenerator, ids: list[int]) -> int:
    """The longest beginning of `ids` that a kept state can be brought to; at least one token is left to be read."""
    most = 0
    for state in runner._kept._states:
        shared = min(common_prefix(state.ids, ids), len(ids) - 1)
        if shared < len(state.ids) and not kept.goes_back(state.cache):
            shared = max((m.length for m in state.marks if m.length <= shared), default=0)
        most = max(most, shared)
    return most


@contextmanager
def planned(runner: DFlashGenerator, draft: PlannedDrafter, stop_ids: tuple[int, ...] = ()) -> Iterator[None]:
    """Let a generator draft by plan, and end at these ids."""
    before, drafter = runner._engine, engine.Drafter
    target = replace(before.pair.target, eos_ids=stop_ids)
    engine.Drafter = lambda *_, **__: draft  # type: ignore[assignment, misc]
    runner._engine = replace(before, pair=replace(before.pair, target=target))
    try:
        yield
    finally:
        engine.Drafter = drafter  # type: ignore[misc]
        runner._engine = before


def _fails_after(calls: int, ending: str) -> Callable[[mx.array, mx.array], mx.array]:
    left = [calls]

    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt("planned") if ending == "interrupt" else RuntimeError("planned")
        return logits

    return processor


def _interrupted(inject: Callable[[mx.array, int], None]) -> Callable[[mx.array, int], None]:
    """Ctrl-C at the worst moment: the target has read, the drafter has not."""

    def stop(features: mx.array, keep: int) -> None:
        raise KeyboardInterrupt("planned")

    return stop


def talk_through(runner: DFlashGenerator, cold: DFlashGenerator, options: dict[str, Any], turns: Any) -> None:
    """Turns drawn from `TURNS`."""
    runner._kept.clear()
    talk, ids = Talk(runner, cold, options), [5, 9, 11, *range(40, 64)]
    for plan, ending, length, dropped, said in turns:
        seen = talk.turn(ids, plan, ending, length)
        history = [*ids, *seen]
        ids = [*history[: max(1, len(history) - dropped)], *said]
