"""Processes that train together: each takes batches of its own, all take the same steps.

MLX's own groups (`mlx.launch`) do the talking, over loopback or between machines. A process that was started alone is
a group of one, and nothing is sent.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn


class Workers:
    """This process among those that train one network."""

    def __init__(self) -> None:
        """Join the group that this process was launched in."""
        self._group = mx.distributed.init()
        self.rank = self._group.rank()
        self.size = self._group.size()

    @property
    def leads(self) -> bool:
        """Whether this process measures, reports and writes."""
        return self.rank == 0

    def average(self, gradients: Any) -> Any:
        """The mean of all processes' gradients; lazy."""
        return nn.average_gradients(gradients, self._group)

    def leading(self, seconds: float) -> float:
        """The first process's clock, so that all end at one step."""
        return self._summed(seconds if self.leads else 0.0) if self.size > 1 else seconds

    def any(self, stopped: bool) -> bool:
        """Whether any of them is to stop."""
        return self._summed(float(stopped)) > 0 if self.size > 1 else stopped

    def agree(self, number: int) -> bool:
        """Whether all have the same number."""
        return self.size == 1 or self._summed(float(number)) == self.size * number

    def _summed(self, number: float) -> float:
        total: float = mx.distributed.all_sum(mx.array(number), group=self._group).item()  # type: ignore[assignment]
        return total
