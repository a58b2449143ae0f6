#!/usr/bin/env bash
# Fetches what a GPU machine without a network lacks, as wheels for its Python, into folders beside this checkout:
#
#   bash scripts/offline_wheels.sh lerobot      .whl       LeRobot, the reference of `flashrt verify` and a baseline (16 MB)
#   bash scripts/offline_wheels.sh accelerate   .whl_acc   what more the models of benchmarks/drop_in.py import (6 MB)
#   bash scripts/offline_wheels.sh ros          .whl_ros   rclpy, Fast DDS, messages, and this package itself (44 MB)
#
# Copy the checkout with these folders; benchmarks/h200.sh installs from them. The machine needs PyTorch, NumPy, OpenCV and
# cuda-core of its own. Environment:
#   FOR      version of its Python (default: 3.12)
#   PYTHON   for `ros`: a Python of that version here, with a compiler, to build this package (default: python$FOR)
set -euo pipefail
cd "$(dirname "$0")/.."
FOR=${FOR:-3.12}
PYTHON=${PYTHON:-python$FOR}
platforms=()
for glibc in 17 24 27 28 31 34 35 39; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)

fetch() { # REQUIREMENTS FOLDER: exactly these, and nothing that they ask for
	mkdir -p "$2"
	python3 -m pip download -q --no-deps --only-binary=:all: --python-version "$FOR" --implementation cp "${platforms[@]}" \
		-d "$2" -r "$1"
}

fetch_ros() { # two of its packages exist as sources only, and ours has to be built
	local listed
	listed=$(mktemp)
	trap 'rm -f "$listed"' RETURN
	grep -v '^\(empy\|lark-parser\)==' requirements/offline/ros.txt >"$listed"
	fetch "$listed" .whl_ros
	grep '^\(empy\|lark-parser\)==' requirements/offline/ros.txt >"$listed"
	python3 -m pip wheel -q --no-deps -w .whl_ros -r "$listed"
	rm -f .whl_ros/flashrt_ros-*.whl
	PIP_CONSTRAINT=requirements/constraints.txt "$PYTHON" -m pip wheel -q --no-deps -w .whl_ros .
}

[ $# -gt 0 ] || set -- help
for what in "$@"; do
	case $what in
	lerobot) fetch requirements/offline/lerobot.txt .whl ;;
	accelerate) fetch requirements/offline/accelerate.txt .whl_acc ;;
	ros) fetch_ros ;;
	*)
		sed -n '2,/^set /s/^# \{0,1\}//p' "$0" >&2
		echo "unknown '$what'; there are: lerobot accelerate ros" >&2
		exit 2
		;;
	esac
	echo "$what: done"
done
