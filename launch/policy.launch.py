"""The policy node, as its parameter file describes it.

ros2 launch flashrt_ros policy.launch.py params_file:=my_robot.yaml
ros2 launch flashrt_ros policy.launch.py --show-args
"""

from launch import LaunchContext, LaunchDescription
from launch.action import Action
from launch.actions import DeclareLaunchArgument, OpaqueFunction
from launch.substitutions import EnvironmentVariable, LaunchConfiguration, PathJoinSubstitution
from launch_ros.actions import LifecycleNode
from launch_ros.parameter_descriptions import ParameterValue
from launch_ros.substitutions import FindPackageShare

PACKAGE = "flashrt_ros"
BOOLEAN = ["true", "false"]
TOPICS = ("joint_states", "instruction", "action_chunk")
OVERRIDES = {"checkpoint": "policy.checkpoint", "device": "device", "instruction": "instruction"}
PROFILE_VARIABLE = "FASTRTPS_DEFAULT_PROFILES_FILE"

# Image buffers of a megabyte are otherwise returned to the kernel, and fetched again, with every frame.
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "1000000000",
    "MALLOC_TRIM_THRESHOLD_": "1000000000",
    "MALLOC_TOP_PAD_": "67108864",
}


def share(*path: str) -> PathJoinSubstitution:
    """A file that comes with the package; looked for only when something is launched."""
    return PathJoinSubstitution([FindPackageShare(PACKAGE), *path])


def arguments() -> list[DeclareLaunchArgument]:
    """Everything that can be said on the command line."""
    profile = EnvironmentVariable(PROFILE_VARIABLE, default_value=share("config", "fastdds.xml"))
    return [
        DeclareLaunchArgument("name", default_value="policy", description="Name of the node."),
        DeclareLaunchArgument("namespace", default_value="", description="Namespace of the node and of its topics."),
        DeclareLaunchArgument(
            "params_file",
            default_value=share("config", "pi05.yaml"),
            description="Parameters of the node; config/pi05.yaml and config/pi05_tiny.yaml are examples.",
        ),
        DeclareLaunchArgument(
            "autostart",
            default_value="true",
            choices=BOOLEAN,
            description="The node configures and activates itself; otherwise use ros2 lifecycle.",
        ),
        DeclareLaunchArgument(
            "use_sim_time", default_value="false", choices=BOOLEAN, description="Take the time from /clock."
        ),
        DeclareLaunchArgument(
            "checkpoint", default_value="", description="Overrides policy.checkpoint of the parameter file, if given."
        ),
        DeclareLaunchArgument(
            "device", default_value="", description="Overrides device of the file: cpu, cuda, cuda:N."
        ),
        DeclareLaunchArgument(
            "instruction", default_value="", description="Instruction to begin with; empty: wait for the topic."
        ),
        *(
            DeclareLaunchArgument(f"{topic}_topic", default_value=topic, description=f"Topic to use for {topic}.")
            for topic in TOPICS
        ),
        DeclareLaunchArgument(
            "remap",
            default_value="",
            description="More remappings, for cameras too: 'front/image_raw:=/cam0/image wrist/image_raw:=/cam1/image'",
        ),
        DeclareLaunchArgument(
            "dds_profile",
            default_value=profile,
            description="Fast DDS profile with shared memory that holds images; the cameras need the same one.",
        ),
        DeclareLaunchArgument("log_level", default_value="info", description="debug, info, warn, error or fatal."),
    ]


def overrides(context: LaunchContext) -> dict[str, object]:
    """Parameters that were given as arguments, so that they win over the file."""
    given: dict[str, object] = {
        name: ParameterValue(LaunchConfiguration(name), value_type=bool) for name in ("autostart", "use_sim_time")
    }
    for argument, parameter in OVERRIDES.items():
        text = LaunchConfiguration(argument).perform(context)
        if text:
            given[parameter] = ParameterValue(text, value_type=str)
    return given


def remappings(context: LaunchContext) -> list[tuple[str, str]]:
    """The topics' arguments, and each `from:=to` of the argument `remap`."""
    pairs = [(topic, LaunchConfiguration(f"{topic}_topic").perform(context)) for topic in TOPICS]
    for text in LaunchConfiguration("remap").perform(context).split():
        old, separator, new = text.partition(":=")
        if not (old and separator and new):
            raise ValueError(f"argument remap: '{text}' is not of the form from:=to")
        pairs.append((old, new))
    return [(old, new) for old, new in pairs if old != new]


def start(context: LaunchContext) -> list[Action]:
    """The node's process."""
    return [
        LifecycleNode(
            package=PACKAGE,
            executable="policy_node",
            name=LaunchConfiguration("name"),
            namespace=LaunchConfiguration("namespace"),
            parameters=[LaunchConfiguration("params_file"), overrides(context)],
            remappings=remappings(context),
            additional_env={**ALLOCATOR, PROFILE_VARIABLE: LaunchConfiguration("dds_profile")},
            ros_arguments=["--log-level", LaunchConfiguration("log_level")],
            output="screen",
            emulate_tty=True,
        )
    ]


def generate_launch_description() -> LaunchDescription:
    """What `ros2 launch` runs."""
    return LaunchDescription([*arguments(), OpaqueFunction(function=start)])
