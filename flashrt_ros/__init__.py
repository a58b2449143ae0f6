"""Execution contracts for robot policies, and the ROS 2 node that drives them."""

from pkgutil import extend_path

__version__ = "0.1.0"

# The sources may lie in a checkout, the generated `flashrt_ros.msg` and `flashrt_ros.srv` in an installed
# copy further down sys.path. Without this line the first of the two folders would hide the other.
__path__ = extend_path(__path__, __name__)
