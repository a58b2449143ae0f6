"""The folder of durable capsules."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from .capsule import Capsule, checked_capsule_name
from .durable import SUFFIX, CapsuleDescription, describe_capsule, load_capsule, save_capsule, storage_error
from .errors import CapsuleStorageError, UnknownCapsuleError


class CapsuleFolder:
    """Capsule files by name, one folder. It is made when the first capsule is saved."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._prefix = os.path.join(path, "")

    def __contains__(self, name: str) -> bool:
        return self.file_of(name).is_file()

    def file_of(self, name: str) -> Path:
        """Where the capsule called `name` is or would be; CapsuleNameError for a name that no capsule may have."""
        return Path(self._file(name))

    def _file(self, name: str) -> str:
        """The same in a form that is sooner made, for what waits for it."""
        return f"{self._prefix}{checked_capsule_name(name)}{SUFFIX}"

    def names(self) -> tuple[str, ...]:
        """Names of the files that are there, sorted; none if the folder does not exist."""
        return tuple(sorted(file.name.removesuffix(SUFFIX) for file in self.path.glob(f"[!.]*{SUFFIX}")))

    def nbytes(self) -> int:
        """Bytes of all capsule files."""
        total = 0
        for name in self.names():
            with suppress(FileNotFoundError):  # dropped meanwhile
                total += self.file_of(name).stat().st_size
        return total

    def save(self, capsule: Capsule) -> Path:
        """Write `capsule`, replacing an older file of its name; CapsuleStorageError and its kinds if that fails."""
        path = self.file_of(capsule.name)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise storage_error(path, error) from None
        save_capsule(capsule, path)
        return path

    def load(self, name: str) -> Capsule:
        """Read and check the capsule called `name`; UnknownCapsuleError, CapsuleFileError and its kinds."""
        try:
            return load_capsule(self._file(name), name)
        except CapsuleStorageError:
            self._existing(name)  # which says so if there is no such file
            raise

    def describe(self, name: str) -> CapsuleDescription:
        """What the file of `name` says of itself; cheap, as its payload is not read."""
        return describe_capsule(self._existing(name))

    def delete(self, name: str) -> int:
        """Delete the file of `name` and return its bytes."""
        path = self._existing(name)
        try:
            size = path.stat().st_size
            path.unlink()
        except OSError as error:
            raise storage_error(path, error) from None
        return size

    def _existing(self, name: str) -> Path:
        path = self.file_of(name)
        if not path.is_file():
            known = ", ".join(self.names()) or "none"
            raise UnknownCapsuleError(f"no durable capsule is called '{name}' in {self.path}; there are: {known}")
        return path
