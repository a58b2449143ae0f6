"""The payload of a capsule file, read and digested in pieces side by side, as one SHA-256 is slower than the disk."""

from __future__ import annotations

import hashlib
import os
import threading
from functools import partial
from io import FileIO
from itertools import count, pairwise

import numpy as np

from .crew import SharedWork

PIECE = 1 << 20  # bytes of one digest
LEAST_PIECE = 64 << 10  # smaller ones would take longer to hand out than to digest
_LONGEST_WAIT = 0.005  # seconds


def digest(block: np.ndarray, generator: np.ndarray, piece_bytes: int = PIECE) -> str:
    """SHA-256 over the SHA-256 digests of the block's pieces of `piece_bytes` and of the generator, in hexadecimal."""
    starts = range(0, len(block), piece_bytes)
    pieces = [block[start : start + piece_bytes].data for start in starts] + [generator.data]
    return _root(SharedWork([partial(_sha256, piece) for piece in pieces]).finish())


class PayloadReading:
    """A payload on its way to memory, read and digested in pieces by this thread and others.

    Leaving the context waits for them, so the file can be closed afterwards.

    Args:
        file: where the payload is.
        start: its first byte in the file.
        block_bytes: length of its block, uint8[block_bytes].
        generator_bytes: length of the noise generator's state behind it.
    """

    def __init__(self, file: FileIO, start: int, block_bytes: int, generator_bytes: int) -> None:
        data = np.empty(block_bytes + generator_bytes, dtype=np.uint8)
        self.block, self.generator = data[:block_bytes], data[block_bytes:]
        target = data.data
        cuts = [*range(0, block_bytes, PIECE), block_bytes, len(data)]
        self._descriptor = file.fileno()
        self._pieces = len(cuts) - 1
        self._read = count(1)  # safe to advance by any thread
        self._all_read = threading.Event()
        self._work = SharedWork(
            [partial(self._read_and_digest, start + begin, target[begin:end]) for begin, end in pairwise(cuts)]
        )

    def __enter__(self) -> PayloadReading:
        return self

    def __exit__(self, *_: object) -> None:
        self._work.abandon()

    def finish_reading(self) -> None:
        """Return when all is read or broke off, and what others took is still being digested.

        They do that without the interpreter, which they need before. So what this thread does next costs no time, and
        would hold them up earlier. Of the pieces it takes those that others cannot begin at once, as it would digest
        another one while nobody does what comes next. It does not wait for long: a slow disk, or helpers that are busy
        elsewhere, are no reason to do nothing.
        """
        while self._work.do_spare():
            pass
        self._all_read.wait(_LONGEST_WAIT)

    def digest(self, piece_bytes: int = PIECE) -> str:
        """What `digest` says of the bytes that were read, after the rest of them; OSError if they could not be.

        They were digested in pieces of PIECE, which is known before the file's manifest is parsed. For pieces of
        another size, which files of other versions may have, they are digested once more.
        """
        digests = self._work.finish()
        return _root(digests) if piece_bytes == PIECE else digest(self.block, self.generator, piece_bytes)

    def _read_and_digest(self, offset: int, target: memoryview) -> bytes:
        try:
            _read(self._descriptor, offset, target)
        finally:
            if next(self._read) == self._pieces:
                self._all_read.set()
        return _sha256(target)


def _read(descriptor: int, offset: int, target: memoryview) -> None:
    done = 0
    while done < len(target):
        got = os.preadv(descriptor, [target[done:]], offset + done)
        if not got:
            raise OSError(f"the file became shorter while it was read, at byte {offset + done}")
        done += got


def _sha256(piece: memoryview) -> bytes:
    return hashlib.sha256(piece).digest()


def _root(digests: list[bytes]) -> str:
    return hashlib.sha256(b"".join(digests)).hexdigest()
