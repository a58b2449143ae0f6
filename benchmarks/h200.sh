#!/usr/bin/env bash
# Everything that the committed results of one GPU are made of.
#
#   OUT=results bash benchmarks/h200.sh [STEP...]
#
# Steps, with what they write and about how long they take on an H200 with 16 cores (estimates where no result says so):
#   tests       nothing: test/gpu                                                      3 min
#   checkpoint  $WORK/checkpoint, 8.3 GB, if it is not there                           15 s
#   verify      h200_pi05_parity.json, parity with LeRobot                             3 to 4 min, needs LeRobot
#   profile     h200_pi05_profile.json, h200_pi05_layer.png                            1 min, needs LeRobot
#   bench       h200_pi05.json, all cases with plain baselines and two starts          2 min a case
#   lerobot     h200_pi05.json, one case beside LeRobot too, most of it torch.compile  4 to 6 min, needs LeRobot
#   full        h200_pi05.json, the plan with one graph a decision                     30 s
#   roofline    roofline_pi05.json                                                     5 s
#   capsules    h200_capsules.json                                                     35 s
#   parts       h200_products.json, h200_attention.json, h200_expert.json: kernels     2 min
#   tiers       h200_pi05.json and files of each tier: calibrated, gated, timed        3 min a tier
#   node        h200_node.json, the node end to end                                    2 min, needs ROS
#   accelerate  h200_accelerate.json, unmodified models                                1 to 8 min a model, needs LeRobot
# Without arguments: checkpoint verify profile bench lerobot full roofline, about 20 minutes. What a step needs of an earlier
# one is kept in $WORK, so that steps can also run one by one. A step that fails does not keep the next ones from running.
#   OUT       where results are copied after every step (default: benchmarks/results)
#   WORK      checkpoint, results so far, installed wheels (default: /tmp/flashrt)
#   WHEELS    folders of wheels to install first, on a machine without a network (default: .whl .whl_acc; ROS from
#             .whl_ros; see scripts/offline_wheels.sh)
#   CASES     views x chunk (default: 2x10,2x50,3x10,3x50)
#   BASELINES of the step `tiers` (default: plain_graph,plain_compiled_layer_graph; lerobot_eager needs LeRobot)
#   TIERS     of the step `tiers` (default: 8-bit 4-bit-expert 4-bit), at the first case
#   MODELS, COMPILE  of the step `accelerate`: which models, and which of them through torch.compile too (default: all, none)
#   SETTINGS  more arguments for verify, bench and profile, such as "--set dtype=bfloat16"
#   BENCH     more arguments for bench, such as "--rounds 5"
#   LIMIT     seconds that one command of a step may take (default: none)
# A rehearsal without a GPU: DEVICE=cpu PRESET=pi05_tiny TOKENS=111 CASES=2x10 BENCH="--rounds 1 --calls 2"
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
OUT=${OUT:-benchmarks/results}
WORK=${WORK:-/tmp/flashrt}
read -r -a wheels <<<"${WHEELS:-.whl .whl_acc}"
CASES=${CASES:-2x10,2x50,3x10,3x50}
DEVICE=${DEVICE:-cuda}
PRESET=${PRESET:-pi05}
TOKENS=${TOKENS:-200}
read -r -a settings <<<"${SETTINGS:-}"
read -r -a bench_more <<<"${BENCH:-}"
checkpoint=$WORK/checkpoint
results=$WORK/results
parity=$results/h200_pi05_parity.json
first_case=${CASES%%,*}
steps=("$@")
[ ${#steps[@]} -gt 0 ] || steps=(checkpoint verify profile bench lerobot full roofline)

install() { # FOLDER_TO OPTION FOLDER...: wheels, once
	local to=$1 option=$2 found=() folder
	shift 2
	for folder in "$@"; do found+=("$folder"/*.whl); done
	[ -d "$to" ] || [ ! -f "${found[0]:-}" ] ||
		python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --no-warn-script-location \
			"$option" "$to" "${found[@]}"
}
limited() { timeout --signal=INT -k 10 "${LIMIT:-0}" "$@"; }

flashrt() {
	local start=$SECONDS status=0
	limited python3 -W ignore -m flashrt_ros.cli "$@" || status=$?
	echo "== flashrt $1: exit $status after $((SECONDS - start)) s"
	return $status
}

measured() { # a command that runs the checkpoint on the device
	flashrt "$@" --checkpoint "$checkpoint" --device "$DEVICE" --set "preset=$PRESET" "${settings[@]}"
}

bench() {
	local with=()
	[ ! -f "$parity" ] || with=(--parity "$parity")
	measured bench pi05 --tokens "$TOKENS" --mechanisms "${with[@]}" --out "$results/h200_pi05.json" \
		"${bench_more[@]}" "$@"
}

script() { # NAME RESULT... [-- ARGUMENT...]: a benchmark that writes to benchmarks/results
	local name=$1 written=()
	shift
	while [ $# -gt 0 ] && [ "$1" != -- ]; do written+=("benchmarks/results/$1") && shift; done
	[ $# -eq 0 ] || shift
	limited python3 -W ignore "benchmarks/$name.py" "$@" && cp "${written[@]}" "$results"/
}

step_tests() { limited python3 -m pytest -q -p no:cacheprovider test/gpu; }

step_checkpoint() { [ -d "$checkpoint" ] || flashrt make-checkpoint --preset "$PRESET" --out "$checkpoint"; }

step_verify() { measured verify --out "$parity"; } # below the bar is a result too

step_profile() {
	measured profile pi05 --case 2x10 --tokens "$TOKENS" --baselines lerobot_eager,plain_graph \
		--out "$results/h200_pi05_profile.json" --png "$results/h200_pi05_layer.png"
}

step_bench() { bench --cases "$CASES" --load --baselines plain_graph,plain_compiled_layer_graph; }

step_lerobot() { bench --cases "$first_case" --baselines all; }

step_full() { bench --cases "$first_case" --set plan=full; }

step_roofline() { flashrt roofline --measured "$results/h200_pi05.json" --out "$results/roofline_pi05.json"; }

step_capsules() {
	script capsules h200_capsules.json -- --device "$DEVICE" --checkpoint "$checkpoint" --set "preset=$PRESET"
}

step_parts() {
	script products h200_products.json && script attention h200_attention.json && script expert h200_expert.json
}

step_tiers() {
	local tiers=() tier calibration case status=0
	for tier in ${TIERS:-8-bit 4-bit-expert 4-bit}; do
		calibration=$results/h200_pi05_$tier.safetensors
		case=(--tier "$tier" --case "$first_case" --tokens "$TOKENS" --photographs "${PHOTOGRAPHS:-16}")
		measured calibrate "${case[@]}" --out "$calibration" || return
		measured verify "${case[@]}" --calibration "$calibration" --seed 1 \
			--weights "random, scaled (flashrt make-checkpoint --seed 0)" --out "$results/h200_pi05_$tier.json" ||
			{ status=1 && echo "$tier: below the bar, or failed"; } # times need no verdict
		tiers+=(--tiers "$tier=$calibration")
	done
	bench --cases "$first_case" "${tiers[@]}" --load --baselines "${BASELINES:-plain_graph,plain_compiled_layer_graph}" ||
		return
	flashrt plot "$results/h200_pi05.json" --out "$results/h200_pi05_tiers.png" ||
		echo "no picture; draw it elsewhere: flashrt plot h200_pi05.json --out h200_pi05_tiers.png"
	return $status
}

step_node() ( # in an environment of its own, where ROS comes from wheels
	local ros=$WORK/ros site libraries folder
	install "$ros" --prefix .whl_ros || return
	if [ -d "$ros" ]; then
		site=$(echo "$ros"/lib/python3.*/site-packages) libraries=$ros/lib
		for folder in "$site"/*.libs; do libraries=$libraries:$folder; done
		export PYTHONPATH="$PWD:$site" AMENT_PREFIX_PATH=$ros
		export LD_LIBRARY_PATH="$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
	fi
	script node_gpu h200_node.json -- --checkpoint "$checkpoint" --device "$DEVICE" --set "preset=$PRESET" \
		--chunk "${first_case#*x}" --tokens "$TOKENS" --logs "$results/node_logs"
)

step_accelerate() {
	limited python3 -W ignore -m benchmarks.drop_in --device "$DEVICE" ${MODELS:+--models "$MODELS"} \
		--compile "${COMPILE:-}" --out "$results/h200_accelerate.json"
}

failed=()
for step in "${steps[@]}"; do
	if ! declare -F "step_$step" >/dev/null; then
		known=$(declare -F | sed -n 's/^declare -f step_//p' | tr '\n' ' ')
		echo "unknown step '$step'; there are: ${known% }" >&2
		exit 2
	fi
done
shopt -s nullglob
mkdir -p "$OUT" "$results"
install "$WORK/site" --target "${wheels[@]}" || exit 1
export PYTHONPATH="$WORK/site:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
for step in "${steps[@]}"; do
	"step_$step" || failed+=("$step")
	cp -r "$results"/. "$OUT"/
done
[ ${#failed[@]} -eq 0 ] || { echo "== failed: ${failed[*]}" >&2 && exit 1; }
