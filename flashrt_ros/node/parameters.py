"""Every parameter of the node, declared once: name, type, default, range and description.

Nothing here knows of ROS. `parameter_server` declares this table on a node and turns what users set into one
`Settings`.

Three families have names that depend on the robot: `views.<view>.…`, `limits.<joint>.…`, and `policy.…`,
whose settings belong to the policy and are checked by it.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Value = bool | int | float | str | list[str]


class ParameterError(ValueError):
    """A parameter is missing, unknown, of the wrong type or out of range; the text says which, and what to
    do."""


@dataclass(frozen=True)
class Parameter:
    """One row of the table. The type is that of the default; `low` and `high` include their ends.

    A `*` in the name stands for a view or a joint.
    """

    name: str
    default: Value
    description: str
    low: float = -math.inf
    high: float = math.inf
    choices: tuple[str, ...] = ()
    read_only: bool = False

    @property
    def kind(self) -> str:
        """The type as people write it in a file."""
        return _KINDS[type(self.default)]

    def matches(self, name: str) -> bool:
        """Whether `name` is this parameter, or one of this family."""
        return name == self.name if "*" not in self.name else bool(self.member(name))

    def member(self, name: str) -> str:
        """What stands for the `*` in `name`; empty if `name` is not of this family."""
        prefix, _, suffix = self.name.partition("*")
        fits = name.startswith(prefix) and name.endswith(suffix) and len(name) > len(prefix) + len(suffix)
        return name[len(prefix) : -len(suffix)] if fits else ""

    def checked(self, name: str, value: object) -> Value:
        """`value` as this parameter's type; an integer is accepted where a double is expected.

        Raises:
            ParameterError: another type, out of range, or none of the choices.
        """
        result = self._typed(name, value)
        if isinstance(result, int | float) and not self.low <= result <= self.high:
            raise ParameterError(f"parameter '{name}' is {result:g}, expected {_range_text(self.low, self.high)}")
        if self.choices and result not in self.choices:
            raise ParameterError(f"parameter '{name}' is '{result}', expected one of {', '.join(self.choices)}")
        return result

    def _typed(self, name: str, value: object) -> Value:
        if isinstance(self.default, list):
            # An empty list in a YAML file has no type, so it arrives as nothing.
            items = [] if value is None else value
            if isinstance(items, list | tuple) and all(isinstance(item, str) for item in items):
                return [item for item in items if item]
        elif isinstance(self.default, float) and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        elif type(value) is type(self.default):
            return value
        given = type(value)
        raise ParameterError(
            f"parameter '{name}' is {value!r} ({_KINDS.get(given, given.__name__)}), expected {_a(self.kind)}"
        )


_KINDS: Mapping[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "double",
    str: "string",
    list: "string array",
}

STALL_POLICIES = ("none", "hold", "stop")

PARAMETERS: tuple[Parameter, ...] = (
    Parameter(
        "autostart",
        False,
        "Configure and activate as soon as the node runs, without a lifecycle manager.",
        read_only=True,
    ),
    Parameter("policy.name", "", "Folder of the policy under flashrt_ros.policies, for example pi05."),
    Parameter("device", "cpu", "Where the policy runs: cpu, cuda or cuda:N. A device that is missing is an error."),
    Parameter("cpu_threads", 0, "Threads of one CPU operation, for the whole process; 0: PyTorch decides.", 0, 1024),
    Parameter("seed", 0, "Seed of the sampling noise: equal seeds and inputs give equal actions.", 0, 2**31 - 1),
    Parameter("warmup", 2, "Decisions at configure on a blank image, kept out of the statistics.", 0, 1000),
    Parameter("rate_hz", 5.0, "Decisions a second (Hz). A tick that finds the policy busy is skipped.", 0.01, 1000),
    Parameter(
        "image_wait",
        0.0,
        "Longest wait, after a tick, for a new frame of every view, so that a decision sees the newest picture (s). "
        "0: decide at once with what is there.",
        0,
        1,
    ),
    Parameter("instruction", "", "Instruction until a message on the topic `instruction` replaces it; empty: none."),
    Parameter("max_age", 0.5, "Largest header age and receive age of an observation (s).", 0.001, 3600),
    Parameter("future_tolerance", 0.1, "How far a stamp may lie ahead of the node's clock (s).", 0, 3600),
    Parameter("max_skew", 0.1, "Largest difference between the stamps of two views (s).", 0, 3600),
    Parameter("action_joints", [], "Joints that chunks command, in this order; empty: all actions of the policy."),
    Parameter("max_first_step", math.inf, "Largest distance from the measured position to step 0 (rad or m).", 0),
    Parameter("max_step", math.inf, "Largest distance from one step to the next (rad or m).", 0),
    Parameter(
        "stall_policy",
        "none",
        "After `stall_after` refused chunks in a row, once: none (publish nothing), hold (one chunk that repeats the "
        "measured positions) or stop (deactivate).",
        choices=STALL_POLICIES,
    ),
    Parameter("stall_after", 5, "Refused chunks in a row that make a stall.", 1, 1_000_000),
    Parameter("status_period", 1.0, "Time between two status messages (s).", 0.05, 3600),
    Parameter("capsules.device_mib", 64, "Budget of capsules in GPU memory, or in memory on a CPU (MiB).", 0, 1 << 20),
    Parameter("capsules.host_mib", 256, "Budget of capsules in pinned host memory (MiB).", 0, 1 << 20),
    Parameter("capsules.folder", "", "Folder of durable capsules; empty: flashrt_ros/capsules in ~/.local/share."),
    Parameter("capsules.sessions", 4, "Sessions that may be open at once: the first one and its forks.", 1, 64),
    Parameter("capsules.timeout", 2.0, "Longest wait of a capsule service for the decision in flight (s).", 0.01, 600),
    Parameter("stop_timeout", 5.0, "Longest wait for the decision in flight at deactivation and stop (s).", 0.1, 600),
)  # fmt: skip

FAMILIES: tuple[Parameter, ...] = (
    Parameter(
        "views.*.topic",
        "",
        "Topic of this view; empty: <view>/image_raw, with /compressed where that is set.",
    ),
    Parameter("views.*.compressed", False, "The topic carries sensor_msgs/CompressedImage (JPEG or PNG)."),
    Parameter("limits.*.lower", -math.inf, "Lowest position that this joint may be sent to (rad or m)."),
    Parameter("limits.*.upper", math.inf, "Highest position that this joint may be sent to (rad or m)."),
    Parameter("limits.*.max_first_step", math.inf, "Overrides `max_first_step` for this joint (rad or m).", 0),
    Parameter("limits.*.max_step", math.inf, "Overrides `max_step` for this joint (rad or m).", 0),
)

POLICY_PREFIX = "policy."
# Settings that people look for under other names; they are the policy's own, so no row above has them.
_POLICY_HINTS = ("policy.checkpoint", "policy.preset")


def find(name: str) -> Parameter | None:
    """The row of the table, or of the families, that `name` belongs to; None for a policy's setting and for
    the unknown."""
    return next((row for row in (*PARAMETERS, *FAMILIES) if row.matches(name)), None)


def is_policy_setting(name: str) -> bool:
    """Whether `name` goes to the policy as it is."""
    return name.startswith(POLICY_PREFIX) and find(name) is None


def unknown_text(name: str) -> str:
    """What to tell a user who set a parameter that does not exist."""
    shown = {row.name.replace("*", "<name>"): row.name for row in (*PARAMETERS, *FAMILIES)}
    close = difflib.get_close_matches(name, [*shown, *_POLICY_HINTS], n=1, cutoff=0.5)
    nearest = f"the nearest is '{close[0]}'" if close else f"known: {', '.join([*shown, 'policy.<setting>'])}"
    return f"unknown parameter '{name}'; {nearest}"


@dataclass(frozen=True)
class ViewSettings:
    """Where a view's frames come from. `topic` may still be remapped."""

    topic: str
    compressed: bool = False

    @staticmethod
    def of(view: str, topic: str = "", compressed: bool = False) -> ViewSettings:
        """The settings of `view`, with the default topic where none is given."""
        return ViewSettings(topic or f"{view}/image_raw{'/compressed' if compressed else ''}", compressed)


@dataclass(frozen=True)
class JointLimits:
    """What one joint may do, in radians or metres; infinity means no limit, None the limit of all joints."""

    lower: float = -math.inf
    upper: float = math.inf
    max_first_step: float | None = None
    max_step: float | None = None


@dataclass(frozen=True)
class CapsuleSettings:
    """Budgets in MiB, the folder of durable capsules, the limit of sessions, and the bounded wait in seconds."""

    device_mib: int
    host_mib: int
    folder: str
    sessions: int
    timeout: float


@dataclass(frozen=True)
class Settings:
    """All parameters at one moment, typed and checked. The fields are described in the table."""

    policy: str
    policy_settings: Mapping[str, object]
    device: str
    cpu_threads: int
    seed: int
    warmup: int
    rate_hz: float
    image_wait: float
    instruction: str
    max_age: float
    future_tolerance: float
    max_skew: float
    action_joints: tuple[str, ...]
    max_first_step: float
    max_step: float
    stall_policy: str
    stall_after: int
    status_period: float
    stop_timeout: float
    capsules: CapsuleSettings
    views: Mapping[str, ViewSettings] = field(default_factory=dict)
    limits: Mapping[str, JointLimits] = field(default_factory=dict)

    def view(self, name: str) -> ViewSettings:
        """The settings of view `name`, given or default."""
        return self.views.get(name) or ViewSettings.of(name)


def settings_from(values: Mapping[str, object], node: str) -> Settings:
    """Check `values` by name against the table and collect them.

    Args:
        values: whatever was set; parameters of ROS itself may be among them.
        node: full name of the node, for the text.

    Raises:
        ParameterError: an unknown name, a wrong value, or no policy.
    """
    known: dict[str, Any] = {row.name: row.checked(row.name, values.get(row.name, row.default)) for row in PARAMETERS}
    del known["autostart"]
    capsules = {name.partition(".")[2]: known.pop(name) for name in list(known) if name.startswith("capsules.")}
    policy = known.pop("policy.name")
    if not policy:
        raise ParameterError(
            "parameter 'policy.name' is not set, so there is no policy and no checkpoint to load; set it, and if a "
            f"parameter file does, check that the file is addressed to this node: '{node}:' or '/**:'"
        )
    settings = {n[len(POLICY_PREFIX) :]: v for n, v in values.items() if is_policy_setting(n)}
    return Settings(
        policy=policy,
        policy_settings=settings,
        action_joints=tuple(known.pop("action_joints")),
        capsules=CapsuleSettings(**capsules),
        views={view: ViewSettings.of(view, **given) for view, given in _family("views", values)},
        limits={joint: JointLimits(**given) for joint, given in _family("limits", values)},
        **known,
    )


def _family(prefix: str, values: Mapping[str, object]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each view or joint of a family, with the fields that were set for it."""
    members: dict[str, dict[str, Any]] = {}
    for row in FAMILIES:
        for name in values:
            if row.name.startswith(f"{prefix}.*") and (member := row.member(name)):
                leaf = row.name.rpartition(".")[2]
                members.setdefault(member, {})[leaf] = row.checked(name, values[name])
    return iter(members.items())


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _range_text(low: float, high: float) -> str:
    if math.isinf(high):
        return f"at least {low:g}"
    return f"at most {high:g}" if math.isinf(low) else f"{low:g} to {high:g}"
