"""The noise of a session."""

from __future__ import annotations

from functools import cache

import torch


class Noise:
    """A generator of N(0, 1) whose `state` is at hand at any time.

    That is uint8[n], from which the next noise follows, and never written again, so that anybody may keep it. Reading
    it out and putting it back is done when noise is drawn, which happens while a GPU is at work, and not when a capsule
    is taken or restored, which it waits for.
    """

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator()
        self.state: torch.Tensor
        self.seed(seed)

    def seed(self, seed: int) -> None:
        """Begin anew."""
        self._generator.manual_seed(seed)
        self.state = self._generator.get_state()
        self._put_back = False

    def go_back(self, state: torch.Tensor) -> None:
        """Let the next noise follow from `state`, which must not be written afterwards."""
        self.state, self._put_back = state, True

    def draw(self, target: torch.Tensor) -> None:
        """Fill `target`, a float32 tensor on the host."""
        if self._put_back:
            self._generator.set_state(self.state)
            self._put_back = False
        target.normal_(generator=self._generator)
        self.state = self._generator.get_state()


@cache
def state_bytes() -> int:
    """Bytes of a generator's state."""
    return torch.Generator().get_state().numel()
