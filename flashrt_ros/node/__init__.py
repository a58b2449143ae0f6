"""The ROS side of the package: the lifecycle node, and the rules that it applies to what arrives and what leaves.

The rules know nothing of ROS and are tested and measured without it: `cdr`, `images` (with `frame`, `encodings`,
`conversions`, `compressed`, `jpeg`, `png`), `freshness`, `joints`, `chunk_checks`, `stall`, `epochs` and `statistics`
import neither `rclpy` nor a message package.
"""
