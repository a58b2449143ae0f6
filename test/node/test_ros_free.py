"""The rules of the node know nothing of ROS: importing them loads neither the client library nor a
message."""

from __future__ import annotations

import subprocess
import sys

MODULES = ("cdr", "frame", "encodings", "conversions", "compressed", "jpeg", "png", "images", "freshness", "joints",
           "chunk_checks", "stall", "epochs", "statistics")  # fmt: skip
FORBIDDEN = {"rclpy", "sensor_msgs", "std_msgs", "builtin_interfaces", "rosidl_parser", "cv2", "cv_bridge"}
# After each import, the forbidden packages that are loaded by then.
REPORT = """
import importlib, sys
for module in sys.argv[2:]:
    importlib.import_module(f"flashrt_ros.node.{module}")
    print(module, *{name.split(".")[0] for name in sys.modules} & set(sys.argv[1].split()))
"""


def test_importing_the_rules_loads_no_ros_and_no_image_library() -> None:
    command = [sys.executable, "-c", REPORT, " ".join(FORBIDDEN), *MODULES]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert result.stdout.split("\n")[:-1] == list(MODULES)
