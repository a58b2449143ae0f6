"""Both ends of the model: an instruction and a state become tokens, and the model's row becomes joint commands."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

import numpy as np

from ...ops.embed import ABSENT
from ..base import PolicyError, PromptError, SettingsError
from .checkpoint import Normalisers
from .config import Pi05Config
from .normalisation import Normaliser
from .plan import variant_name
from .prompt import clean, prompt_text
from .tokenizer import Tokenizer

StateKey = tuple[str, tuple[int, ...], bytes]
"""Equal for states of equal type, shape and values."""


@dataclass(frozen=True)
class Prompt:
    """A tokenised text: int32[largest bucket] ids, padded with -1; how many there are; the bucket that holds them.

    `variant` is the shape key of that bucket.
    """

    text: str
    tokens: np.ndarray
    count: int
    bucket: int
    variant: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "variant", variant_name(self.bucket))


class Pi05Processor:
    """Tokenises, normalises and converts for one configuration.

    Raises SettingsError if the tokenizer knows more tokens than the model.
    """

    def __init__(self, config: Pi05Config, tokenizer: Tokenizer, normalisers: Normalisers) -> None:
        if tokenizer.size > config.vocabulary:
            raise SettingsError(
                f"the tokenizer has {tokenizer.size} tokens, but the model's vocabulary is {config.vocabulary}; "
                "this is another model's tokenizer"
            )
        self._config, self._tokenizer, self._normalisers = config, tokenizer, normalisers
        self._columns = _columns(config)
        self._action = _of_columns(normalisers.action, self._columns)
        relative = config.relative_actions
        added = [relative and name not in config.absolute_actions for name in config.action_names]
        self._relative = np.flatnonzero(added)
        self._sources = np.array(
            [config.state_names.index(config.action_names[i]) for i in self._relative], dtype=np.int64
        )
        self._last_text: tuple[tuple[str, StateKey | None], str] | None = None
        self._last_prompt: Prompt | None = None
        self._last_content: tuple[Prompt, int] | None = None
        self._last_offsets: tuple[StateKey, np.ndarray] | None = None

    def text(self, instruction: str, state: np.ndarray | None) -> str:
        """The prompt's text.

        Args:
            state: float32[len(state_names)] in the robot's units; may be None only where the prompt holds no state.

        Raises:
            PromptError: the instruction is empty, or the state is missing.
        """
        key = (instruction, None if state is None else _key(state))
        if self._last_text is None or self._last_text[0] != key:
            self._last_text = key, self._written(instruction, state)
        return self._last_text[1]

    def _written(self, instruction: str, state: np.ndarray | None) -> str:
        if not clean(instruction).strip():
            raise PromptError("the instruction is empty; say what the robot is to do")
        if not self._config.state_in_prompt:
            return prompt_text(instruction, None)
        if state is None or self._normalisers.state is None:
            raise PromptError("the prompt holds the robot's state, and no state has arrived yet")
        return prompt_text(instruction, self._normalisers.state.normalise(self._checked(state)))

    def tokens(self, text: str) -> np.ndarray:
        """int32[largest bucket] ids of `text`, padded with -1; PromptError if they are too many, or it is no text."""
        return self.prompt(text).tokens

    def prompt(self, text: str) -> Prompt:
        """`text` tokenised, the last one from memory; PromptError as of `tokens`."""
        if self._last_prompt is None or self._last_prompt.text != text:
            self._last_prompt = self._tokenised(text)
        return self._last_prompt

    def is_content(self, prompt: Prompt, content: int) -> bool:
        """Whether the tokens of `prompt` were found to be what the session's content number `content` stands for."""
        last = self._last_content
        return last is not None and last[0] is prompt and last[1] == content

    def note_content(self, prompt: Prompt, content: int) -> None:
        """Remember that a buffer of that content number holds the tokens of `prompt`."""
        self._last_content = prompt, content

    def _tokenised(self, text: str) -> Prompt:
        ids = self._encoded(text)
        longest = self._config.prompt_buckets[-1]
        if len(ids) > longest:
            raise PromptError(
                f"the prompt has {len(ids)} tokens, the longest bucket holds {longest}; shorten the instruction"
            )
        padded = np.full(longest, ABSENT, np.int32)
        padded[: len(ids)] = ids
        return Prompt(text, padded, len(ids), self.bucket(padded))

    def _encoded(self, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise PromptError("the instruction holds half a character (a lone surrogate); send valid Unicode") from None
        return self._tokenizer.encode(text)

    def bucket(self, tokens: np.ndarray) -> int:
        """The smallest bucket that holds `tokens`."""
        count = int((tokens != ABSENT).sum())
        return next(bucket for bucket in self._config.prompt_buckets if count <= bucket)

    def actions(self, rows: np.ndarray, state: np.ndarray | None) -> np.ndarray:
        """float32[chunk, len(action_names)] in the robot's units, absolute, from the model's padded rows.

        Raises:
            PolicyError: actions are relative and there is no state to add them to.
        """
        actions = self._action.unnormalise(rows[:, self._columns])
        if self._relative.size:
            actions += self._offsets(state)
        return actions

    def _offsets(self, state: np.ndarray | None) -> np.ndarray:
        """float32[len(action_names)]: what to add to each action; those of the last state from memory."""
        if state is None:
            raise PolicyError("actions are relative to the robot's state, and no state has arrived yet")
        key = _key(state)
        if self._last_offsets is None or self._last_offsets[0] != key:
            offsets = np.full(len(self._config.action_names), -0.0, np.float32)  # adding it changes no bit of any value
            offsets[self._relative] = self._checked(state)[self._sources]
            self._last_offsets = key, offsets
        return self._last_offsets[1]

    def digest(self) -> str:
        """SHA-256 over the tokenizer and the statistics."""
        state = self._normalisers.state
        parts = (self._tokenizer.digest, state.digest() if state else "", self._normalisers.action.digest())
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()

    def _checked(self, state: np.ndarray) -> np.ndarray:
        expected = len(self._config.state_names)
        if state.shape != (expected,):
            raise PolicyError(f"state has shape {list(state.shape)}, expected [{expected}]: one value a state name")
        if not np.isfinite(state).all():
            name = self._config.state_names[int(np.flatnonzero(~np.isfinite(state))[0])]
            raise PolicyError(f"state of '{name}' is not finite; refusing to act on it")
        return state.astype(np.float32)


def _key(state: np.ndarray) -> StateKey:
    return state.dtype.char, state.shape, state.tobytes()


def _columns(config: Pi05Config) -> slice | np.ndarray:
    """Where the actions are among the columns of the model's rows; as a slice where they lie side by side."""
    columns = np.array(config.action_columns)
    first = int(columns[0])
    together = np.array_equal(columns, np.arange(first, first + len(columns)))
    return slice(first, first + len(columns)) if together else columns


def _of_columns(normaliser: Normaliser, columns: slice | np.ndarray) -> Normaliser:
    """The same statistics, of those columns only."""
    return replace(normaliser, low=normaliser.low[columns], span=normaliser.span[columns])
