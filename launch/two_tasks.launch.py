"""The demo's nodes, and a client that switches between two tasks: by instructions first, then by capsules.

ros2 launch flashrt_ros two_tasks.launch.py
"""

import sys

from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument, ExecuteProcess, IncludeLaunchDescription
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch.substitutions import LaunchConfiguration, PathJoinSubstitution
from launch_ros.substitutions import FindPackageShare

PACKAGE = "flashrt_ros"


def generate_launch_description() -> LaunchDescription:
    """What `ros2 launch` runs."""
    demo = PathJoinSubstitution([FindPackageShare(PACKAGE), "launch", "demo.launch.py"])
    client = [sys.executable, "-m", f"{PACKAGE}.node.demo.two_tasks", "--rounds", LaunchConfiguration("rounds")]
    return LaunchDescription(
        [
            DeclareLaunchArgument(
                "rounds", default_value="5", description="How often each task is taken up, each way."
            ),
            # First, because it sets the profile of Fast DDS that the client needs too.
            IncludeLaunchDescription(PythonLaunchDescriptionSource(demo)),
            ExecuteProcess(cmd=client, name="two_tasks", output="screen"),
        ]
    )
