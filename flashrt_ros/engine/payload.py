"""The payload of a capsule file, read and digested in pieces side by side, as one SHA-256 is slower than the disk."""

from __future__ import annotations

import hashlib
import os
from functools import partial
from itertools import count, pairwise

import numpy as np

from .crew import SharedWork, closed_gate, pass_gate

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
        file: descriptor of the file that the payload is in.
        start: its first byte in the file.
        block_bytes: length of its block, uint8[block_bytes].
        generator_bytes: length of the noise generator's state behind it.
    """

    def __init__(self, file: int, start: int, block_bytes: int, generator_bytes: int) -> None:
        data = np.empty(block_bytes + generator_bytes, dtype=np.uint8)
        target = data.data
        cuts = [*range(0, block_bytes, PIECE), block_bytes, len(data)]
        pieces = [target[begin:end] for begin, end in pairwise(cuts)]
        last = max(0, len(pieces) - 2)  # the generator's state comes with the last piece of the block
        parts = [(cut, piece, [piece]) for cut, piece in zip(cuts[:last], pieces[:last], strict=True)]
        parts.append((cuts[last], target[cuts[last] :], pieces[last:]))
        self._file = file
        self._parts = len(parts)
        self._read = count(1)  # safe to advance by any thread
        self._all_read = closed_gate()
        calls = [partial(self._read_and_digest, start + cut, part, pieces) for cut, part, pieces in parts]
        self._work = SharedWork(calls, most_helpers=len(calls))
        self.block, self.generator = data[:block_bytes], data[block_bytes:]  # while others wake

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
        pass_gate(self._all_read, _LONGEST_WAIT)

    def digest(self, piece_bytes: int = PIECE) -> str:
        """What `digest` says of the bytes that were read, after the rest of them; OSError if they could not be.

        They were digested in pieces of PIECE, which is known before the file's manifest is parsed. For pieces of
        another size, which files of other versions may have, they are digested once more.
        """
        digests = self._work.finish()
        return _root(digests) if piece_bytes == PIECE else digest(self.block, self.generator, piece_bytes)

    def _read_and_digest(self, offset: int, part: memoryview, pieces: list[memoryview]) -> bytes:
        """Fill `part`, and return the digests of the pieces that it consists of, one behind the other."""
        try:
            _read(self._file, offset, part)
        finally:
            if next(self._read) == self._parts:
                self._all_read.release()
        return b"".join(map(_sha256, pieces))


def _read(file: int, offset: int, target: memoryview) -> None:
    done = 0
    while done < len(target):
        got = os.preadv(file, [target[done:]], offset + done)
        if not got:
            raise OSError(f"the file became shorter while it was read, at byte {offset + done}")
        done += got


def _sha256(piece: memoryview) -> bytes:
    return hashlib.sha256(piece).digest()


def _root(digests: list[bytes]) -> str:
    return hashlib.sha256(b"".join(digests)).hexdigest()
