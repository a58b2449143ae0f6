"""The payload of a capsule file, read and digested in pieces side by side, as one SHA-256 is slower than the disk."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import lru_cache
from io import FileIO
from itertools import pairwise

import numpy as np

PIECE = 1 << 20  # bytes of one digest
_MAX_THREADS = 16


def digest(block: np.ndarray, generator: np.ndarray) -> str:
    """SHA-256 over the SHA-256 digests of the block's pieces of 1 MiB and of the generator, in hexadecimal."""
    pieces = [block[start : start + PIECE] for start in range(0, len(block), PIECE)] + [generator]
    return _root(list(_pool().map(lambda piece: hashlib.sha256(piece.data).digest(), pieces)))


class PayloadReading:
    """A payload on its way to memory: pieces are read and digested by other threads until `digest` asks for the result.

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
        cuts = [*range(0, block_bytes, PIECE), block_bytes, len(data)]
        self._pieces: list[Future[bytes]] = [
            _pool().submit(_read_and_digest, file.fileno(), data[begin:end].data, start + begin)
            for begin, end in pairwise(cuts)
        ]

    def __enter__(self) -> PayloadReading:
        return self

    def __exit__(self, *_: object) -> None:
        wait(self._pieces)

    def digest(self) -> str:
        """What `digest` says of the bytes that were read; OSError if they could not be."""
        return _root([piece.result() for piece in self._pieces])


def _read_and_digest(descriptor: int, target: memoryview, offset: int) -> bytes:
    done = 0
    while done < len(target):
        count = os.preadv(descriptor, [target[done:]], offset + done)
        if not count:
            raise OSError(f"the file became shorter while it was read, at byte {offset + done}")
        done += count
    return hashlib.sha256(target).digest()


def _root(digests: list[bytes]) -> str:
    return hashlib.sha256(b"".join(digests)).hexdigest()


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    """Threads that stay: starting them costs more than a piece."""
    threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    return ThreadPoolExecutor(threads, thread_name_prefix="capsule-payload")


os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has the object, but none of its threads
