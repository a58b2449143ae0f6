"""The prompt's text: the instruction, and the state as numbers."""

from __future__ import annotations

import numpy as np

_BINS = 256
_EDGES = np.linspace(-1, 1, _BINS + 1)[:-1]


def clean(instruction: str) -> str:
    """The instruction as the model was trained to read it: stripped, `_` and newlines as spaces."""
    return instruction.strip().replace("_", " ").replace("\n", " ")


def discretise(state: np.ndarray) -> np.ndarray:
    """Bins of a normalised state: 0 to 255 between -1 and 1, and -1 below; int64[n] from float[n]."""
    bins: np.ndarray = np.digitize(state, _EDGES) - 1
    return bins


def prompt_text(instruction: str, state: np.ndarray | None) -> str:
    """The text to tokenise. `state` float32[n] is normalised and unpadded; None where the prompt holds no state."""
    if state is None:
        return f"{clean(instruction)}\n"
    bins = " ".join(str(number) for number in discretise(state))
    return f"Task: {clean(instruction)}, State: {bins};\nAction: "
