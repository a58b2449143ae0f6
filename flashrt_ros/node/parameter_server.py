"""The parameter table on a live node: declared at construction, guarded while the policy is configured.

rclpy ends the construction of a node whose parameter file has a wrong type, a value out of range, or a name that nobody
declared passes unseen. Here each of them is kept as a problem, and `settings` refuses with it, so that configure fails
with one line and works after the parameter was set rightly, in the same process.
"""

from __future__ import annotations

from collections.abc import Callable

from rcl_interfaces.msg import FloatingPointRange, IntegerRange, ParameterDescriptor, SetParametersResult
from rclpy.node import Node
from rclpy.parameter import Parameter as RosParameter

from .parameters import (
    PARAMETERS,
    Parameter,
    ParameterError,
    Settings,
    Value,
    find,
    is_policy_setting,
    settings_from,
    unknown_text,
)

_OF_ROS = ("use_sim_time", "start_type_description_service")
_OF_ROS_PREFIX = "qos_overrides."


class ParameterServer:
    """The parameters of one node.

    Args:
        node: made with `allow_undeclared_parameters=True`, which the families need.
        locked: true while nothing may be changed, because the policy was built from it.
    """

    def __init__(self, node: Node, locked: Callable[[], bool]) -> None:
        self._node = node
        self._locked = locked
        self._problems: dict[str, str] = {}
        # rclpy offers the values of the parameter files only through this attribute, or by declaring all of them.
        overrides: dict[str, RosParameter] = node._parameter_overrides
        for row in PARAMETERS:
            self._declare(row, overrides.get(row.name))
        for name, override in overrides.items():
            if not node.has_parameter(name):
                self._adopt(name, override.value)
        node.add_pre_set_parameters_callback(_doubles_from_integers)
        node.add_on_set_parameters_callback(self._on_set)

    @property
    def autostart(self) -> bool:
        """Whether the node is to activate itself."""
        return bool(self._node.get_parameter("autostart").value)

    def settings(self) -> Settings:
        """Everything that is set now; ParameterError if any of it is unknown or wrong."""
        if self._problems:
            raise ParameterError("; ".join(self._problems.values()))
        parameters = self._node.get_parameters_by_prefix("")
        values = {name: _plain(p.value) for name, p in parameters.items() if not _of_ros(name)}
        return settings_from(values, self._node.get_fully_qualified_name())

    def _declare(self, row: Parameter, override: RosParameter | None) -> None:
        value = row.default
        if override is not None:
            try:
                value = row.checked(row.name, _plain(override.value))
            except ParameterError as error:
                self._problems[row.name] = str(error)
        # rclpy takes an empty list for bytes, so an empty list of strings is one empty string.
        self._node.declare_parameter(
            row.name, value or [""] if isinstance(value, list) else value, _descriptor(row), True
        )

    def _adopt(self, name: str, value: object) -> None:
        """Declare what a file sets beyond the table: a family's parameter, a policy's setting, or an unknown one."""
        row = find(name)
        if row is not None:
            self._note(row, name, value)
        elif not is_policy_setting(name) and not _of_ros(name):
            advice = f"correct the file, or: ros2 param delete {self._node.get_fully_qualified_name()} {name}"
            self._problems[name] = f"{unknown_text(name)}; {advice}"
        description = row.description if row else "A setting of the policy."
        descriptor = ParameterDescriptor(description=description, dynamic_typing=True)
        self._node.declare_parameter(name, value, descriptor, ignore_override=True)

    def _note(self, row: Parameter, name: str, value: object) -> None:
        """Remember, or forget, that `name` has a wrong value."""
        self._problems.pop(name, None)
        try:
            row.checked(name, _plain(value))
        except ParameterError as error:
            self._problems[name] = str(error)

    def _on_set(self, changes: list[RosParameter]) -> SetParametersResult:
        for change in changes:
            refusal = self._refusal(change)
            if refusal:
                return SetParametersResult(successful=False, reason=refusal)
        for change in changes:
            self._problems.pop(change.name, None)
        return SetParametersResult(successful=True)

    def _refusal(self, change: RosParameter) -> str:
        """Why `change` is not allowed; empty if it is."""
        name, deleted = change.name, change.type_ is RosParameter.Type.NOT_SET
        if _of_ros(name) or (deleted and name in self._problems):
            return ""
        row = find(name)
        if row is None and not is_policy_setting(name):
            return unknown_text(name)
        if self._locked():
            return f"'{name}' cannot change while the policy is configured: deactivate and clean up first"
        try:
            if row is not None and not deleted:
                row.checked(name, _plain(change.value))
        except ParameterError as error:
            return str(error)
        return ""


def _doubles_from_integers(changes: list[RosParameter]) -> list[RosParameter]:
    """`ros2 param set … rate_hz 10` sends an integer; the table wants a double."""
    return [_as_double(change) for change in changes]


def _as_double(change: RosParameter) -> RosParameter:
    row = find(change.name)
    if row is None or not isinstance(row.default, float) or change.type_ is not RosParameter.Type.INTEGER:
        return change
    return RosParameter(change.name, RosParameter.Type.DOUBLE, float(change.value))


def _descriptor(row: Parameter) -> ParameterDescriptor:
    descriptor = ParameterDescriptor(description=row.description, read_only=row.read_only)
    if row.choices:
        descriptor.additional_constraints = f"one of {', '.join(row.choices)}"
    elif isinstance(row.default, float):
        descriptor.floating_point_range = [FloatingPointRange(from_value=float(row.low), to_value=float(row.high))]
    elif isinstance(row.default, int) and not isinstance(row.default, bool):
        descriptor.integer_range = [IntegerRange(from_value=int(row.low), to_value=int(row.high))]
    return descriptor


def _of_ros(name: str) -> bool:
    return name in _OF_ROS or name.startswith(_OF_ROS_PREFIX)


def _plain(value: object) -> Value | None:
    """Arrays of a message as lists; everything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value  # type: ignore[return-value]
