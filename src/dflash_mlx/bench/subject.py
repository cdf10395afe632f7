"""A loaded pair as the thing that is measured: a prompt in, a whole answer out, nothing kept between answers."""

from typing import Any

from dflash_mlx.answering import answer, collected
from dflash_mlx.conversation import Conversations
from dflash_mlx.core import Difference, Result
from dflash_mlx.decoding import Policy
from dflash_mlx.engine import Engine
from dflash_mlx.errors import UsageError
from dflash_mlx.loading import render_history
from dflash_mlx.prompting import requested
from dflash_mlx.request import Options, Request
from dflash_mlx.yardstick import first_difference, plain_answer


class Pair:
    """Answers as `arms.Subject` asks; the options are those of `request.Options`."""

    def __init__(self, engine: Engine) -> None:
        """Take a pair with a drafter.

        Raises:
            UsageError: there is none to compare.
        """
        if engine.pair.draft is None:
            raise UsageError("There is nothing to measure: no drafter is loaded.")
        self.engine = engine

    def count(self, prompt: str, *, think: bool | None = None) -> int:
        """Tokens of a prompt, the template's included; it may be longer than the target takes."""
        pair = self.engine.pair
        think = pair.thinking if think is None else think
        return len(render_history(pair.target.tokenizer, [{"role": "user", "content": prompt}], think=think))

    def yardstick(self, prompt: str, **options: Any) -> Result:
        """Answer by mlx-lm's own plain loop."""
        request, engine = self._request(prompt, options), self.engine
        return plain_answer(
            engine.pair.target.model,
            request,
            engine.stats(request),
            engine.transcript(request),
            prefill_chunk=engine.prefill_chunk,
        )

    def trial(self, prompt: str, *, policy: Policy | None = None, **options: Any) -> Result:
        """Answer from empty caches, drafting as `policy` says; None: as the measured costs say."""
        return collected(answer(self.engine, self._request(prompt, options), Conversations(0), policy=policy))

    def parting(self, prompt: str, plain: Result, drafted: Result, **options: Any) -> Difference | None:
        """Where two texts of the same request part, and by what gap; costs a pass only where they do."""
        request = self._request(prompt, options)
        return first_difference(self.engine.pair.target.model, request, plain.token_ids, drafted.token_ids)

    def _request(self, prompt: str, options: dict[str, Any]) -> Request:
        return requested(self.engine.pair, prompt, Options.checked(options))
