"""What the engine refuses to do, and why."""

from __future__ import annotations


class EngineError(RuntimeError):
    """The engine was asked for something that it must not do."""


class StaleInputError(EngineError):
    """A stage, or a reader, would have used a value whose own inputs have moved on.

    `buffer` is the input that moved, `writer` the stage that consumed it at version `consumed` (None: never) while it
    is now at version `current`.
    """

    def __init__(self, reader: str, writer: str, buffer: str, consumed: int | None, current: int) -> None:
        self.reader, self.writer, self.buffer = reader, writer, buffer
        self.consumed, self.current = consumed, current
        seen = "never ran" if consumed is None else f"consumed '{buffer}' at version {consumed}"
        super().__init__(
            f"{reader} would use stale data: stage '{writer}' {seen}, and '{buffer}' is now at version {current}; "
            f"replay '{writer}' first, or call act()"
        )


class StaleVariantError(StaleInputError):
    """A stage ran for another shape key than the one that is selected now."""

    def __init__(self, reader: str, writer: str, ran_for: str, selected: str) -> None:
        super().__init__(reader, writer, "shape key", 0, 0)
        self.ran_for, self.selected = ran_for, selected

    def __str__(self) -> str:
        return (
            f"{self.reader} would use stale data: stage '{self.writer}' ran for shape '{self.ran_for}', and "
            f"'{self.selected}' is selected now; replay '{self.writer}' first, or call act()"
        )


class UnfilledWindowError(EngineError):
    """A window that a stage reads has never been filled."""


class UncapturedShapeError(EngineError):
    """A shape was asked for that no graph was captured for; nothing is ever captured outside configure."""


class RoleError(EngineError):
    """A buffer was written in a way that its role forbids."""


class WindowError(EngineError):
    """Data does not fit the window that it was meant for."""


class StateError(EngineError):
    """A session was used before configure, after close, twice at once, or was configured twice."""


class ClosedError(StateError):
    """The session was closed; its memory and graphs are gone."""


class BusyError(StateError):
    """The session is being driven already: by another thread, by a stage body, or by a window that is still open."""


class DeviceError(EngineError):
    """The device that was asked for is missing or unusable."""


class DriverError(DeviceError):
    """The GPU's driver refused what was to be enqueued."""


class CapsuleError(EngineError):
    """A capsule could not be saved, found, restored or written; the session is as if it had not been asked."""


class CapsuleNameError(CapsuleError):
    """A name that no capsule may have."""


class UnknownCapsuleError(CapsuleError):
    """No capsule of that name."""


class CapsuleExistsError(CapsuleError):
    """The name is taken."""


class CapsuleKeptError(CapsuleError):
    """The capsule is marked `keep`, and changing it all the same was not asked for."""


class BudgetFullError(CapsuleError):
    """The byte budget cannot take another capsule without evicting one that is marked `keep`."""


class FingerprintError(CapsuleError):
    """The capsule was saved under another contract; `fields` says in what they differ."""

    def __init__(self, name: str, fields: tuple[str, ...]) -> None:
        self.fields = fields
        super().__init__(
            f"capsule '{name}' was saved under another contract; these differ: {', '.join(fields)}. "
            "Run the configuration that it was saved under, or snapshot anew"
        )


class CapsuleFileError(CapsuleError):
    """A capsule file is truncated, altered, foreign, or of a newer schema; `field` says which part."""

    def __init__(self, path: object, field: str, reason: str) -> None:
        self.field = field
        super().__init__(f"{path}: {reason} (field '{field}'); the file was not used")


class ForeignFileError(CapsuleFileError):
    """Not a capsule file at all, or one of a schema that this version does not read."""


class CapsuleStorageError(CapsuleError):
    """The file system refused to read or write a capsule file."""


class DiskFullError(CapsuleStorageError):
    """No space is left for a capsule file."""


class ReadOnlyError(CapsuleStorageError):
    """The folder of a capsule file cannot be written."""


class SessionLimitError(EngineError):
    """A session can't be opened, used or closed now."""


class UnknownSessionError(SessionLimitError):
    """No session of that name is open."""


class SessionExistsError(SessionLimitError):
    """A session of that name is open already."""
