"""Points at the one build of this package: CMakeLists.txt, run by colcon, or by pip (pyproject.toml)."""

import sys

if __name__ == "__main__":
    sys.exit("flashrt_ros has no build in setup.py: run `pip install .` here, or `colcon build` on a robot.")
