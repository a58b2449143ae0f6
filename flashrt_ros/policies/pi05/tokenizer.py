"""PaliGemma's tokenizer: SentencePiece with a BOS token."""

from __future__ import annotations

import hashlib
from pathlib import Path

import sentencepiece

from ..base import SettingsError


class Tokenizer:
    """Text to token ids, from a local SentencePiece model file.

    Raises SettingsError if the file is missing, is no SentencePiece model, or has no BOS token.
    """

    def __init__(self, path: Path) -> None:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise SettingsError(
                f"cannot read tokenizer '{path}': {error.strerror}; set 'tokenizer' to PaliGemma's tokenizer.model"
            ) from None
        self._model = sentencepiece.SentencePieceProcessor()
        try:
            self._model.LoadFromSerializedProto(content)
        except RuntimeError:
            raise SettingsError(f"tokenizer '{path}' is not a SentencePiece model; download the file again") from None
        if self._model.bos_id() < 0:
            raise SettingsError(f"tokenizer '{path}' has no BOS token, PaliGemma's has one; this is another model's")
        self.digest = hashlib.sha256(content).hexdigest()

    @property
    def size(self) -> int:
        """Number of different ids."""
        return int(self._model.GetPieceSize())

    def encode(self, text: str) -> list[int]:
        """Ids of `text` behind a BOS token."""
        return [self._model.bos_id(), *self._model.EncodeAsIds(text)]
