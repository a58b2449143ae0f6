"""The policy node with seeded weights, two cameras that film photographs, and an arm that swings: no robot needed.

ros2 launch flashrt_ros demo.launch.py
ros2 topic echo /action_chunk
"""

import sys

from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument, ExecuteProcess, IncludeLaunchDescription, SetEnvironmentVariable
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch.substitutions import EnvironmentVariable, LaunchConfiguration, PathJoinSubstitution
from launch_ros.substitutions import FindPackageShare

PACKAGE = "flashrt_ros"
PROFILE_VARIABLE = "FASTRTPS_DEFAULT_PROFILES_FILE"
SOURCES = (("camera", "front"), ("camera", "wrist"), ("robot",))


def share(*path: str) -> PathJoinSubstitution:
    """A file that comes with the package; looked for only when something is launched."""
    return PathJoinSubstitution([FindPackageShare(PACKAGE), *path])


def source(module: str, *arguments: str) -> ExecuteProcess:
    """One process of the demo's robot."""
    command = [sys.executable, "-m", f"{PACKAGE}.node.demo.{module}", *arguments]
    return ExecuteProcess(cmd=command, name="_".join((module, *arguments)), output="screen")


def generate_launch_description() -> LaunchDescription:
    """What `ros2 launch` runs."""
    profile = EnvironmentVariable(PROFILE_VARIABLE, default_value=share("config", "fastdds.xml"))
    policy = IncludeLaunchDescription(
        PythonLaunchDescriptionSource(share("launch", "policy.launch.py")),
        launch_arguments={
            "params_file": LaunchConfiguration("params_file"),
            "instruction": LaunchConfiguration("instruction"),
        }.items(),
    )
    return LaunchDescription(
        [
            DeclareLaunchArgument(
                "params_file",
                default_value=share("config", "pi05_tiny.yaml"),
                description="Parameters of the policy node; its views must be front and wrist.",
            ),
            DeclareLaunchArgument(
                "instruction",
                default_value="pick up the coffee cup",
                description="Instruction to begin with; publish others on /instruction.",
            ),
            # Cameras and node must agree on it, or most frames never arrive.
            SetEnvironmentVariable(PROFILE_VARIABLE, profile),
            *(source(*arguments) for arguments in SOURCES),
            policy,
        ]
    )
