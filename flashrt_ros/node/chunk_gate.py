"""From a policy's actions to a chunk of the robot's joints that may be published, or the cause why not."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .chunk_checks import ChunkLimits, FaultCode, check_chunk
from .joints import ActionMap, JointError

Chunk = NDArray[np.float32]

# flashrt_ros/Refusal numbers the causes that concern a chunk from here on, those of FaultCode in its order.
_CHUNK_CAUSES = 50


@dataclass(frozen=True)
class ChunkRefusal:
    """Why a whole chunk is dropped: a cause of flashrt_ros/Refusal, and the reason in words."""

    cause: int
    text: str


@dataclass(frozen=True)
class ChunkGate:
    """What every chunk must pass: `steps` rows, the columns of `actions`, within `limits`."""

    steps: int
    actions: ActionMap
    limits: ChunkLimits

    def judge(self, actions: Chunk, measured: NDArray[np.float32] | None) -> Chunk | ChunkRefusal:
        """The chunk, float32[steps, joints], or why it is dropped.

        Args:
            actions: float32[steps, policy's actions].
            measured: float32[joints], measured positions; None only if the limits do not need them.
        """
        try:
            chunk = self.actions.select(actions)
        except JointError as error:
            return ChunkRefusal(_CHUNK_CAUSES + FaultCode.SHAPE, str(error))
        fault = check_chunk(chunk, self.steps, self.limits, measured)
        return chunk if fault is None else ChunkRefusal(_CHUNK_CAUSES + fault.code, fault.text)
