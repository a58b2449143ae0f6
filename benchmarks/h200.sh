#!/usr/bin/env bash
# Everything that the committed results of one GPU are made of: parity, timing, profile, roofline.
#
#   OUT=results bash benchmarks/h200.sh [checkpoint] [verify] [profile] [bench] [lerobot] [full] [roofline] [tiers]
#
# Without arguments all steps but the last run in this order, about 16 minutes on an H200 with 16 cores (times below: estimates).
# What a step needs of an earlier one is kept in $WORK, so that steps can also run one by one.
#   OUT       where the results are copied at the end, also of a run that broke off (default: benchmarks/results)
#   WORK      checkpoint (8.3 GB), results so far, installed wheels (default: /tmp/flashrt)
#   WHEELS    folder of wheels to install first, for a machine without a network (default: .whl, if it is there)
#   CASES     views x chunk (default: 2x10,2x50,3x10,3x50)
#   TIERS     precision tiers of the step `tiers` (default: 8-bit 4-bit-expert 4-bit), at the first case
#   SETTINGS  more arguments for verify, bench and profile, such as "--set dtype=bfloat16"
#   BENCH     more arguments for bench, such as "--rounds 5"
# A rehearsal without a GPU: DEVICE=cpu PRESET=pi05_tiny TOKENS=111 CASES=2x10 BENCH="--rounds 1 --calls 2"
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-benchmarks/results}
WORK=${WORK:-/tmp/flashrt}
WHEELS=${WHEELS:-.whl}
CASES=${CASES:-2x10,2x50,3x10,3x50}
DEVICE=${DEVICE:-cuda}
PRESET=${PRESET:-pi05}
TOKENS=${TOKENS:-200}
read -r -a settings <<<"${SETTINGS:-}"
read -r -a bench_more <<<"${BENCH:-}"
checkpoint=$WORK/checkpoint
results=$WORK/results
parity=$results/h200_pi05_parity.json
steps=("$@")
[ ${#steps[@]} -gt 0 ] || steps=(checkpoint verify profile bench lerobot full roofline)

mkdir -p "$OUT" "$results"
trap 'cp "$results"/* "$OUT"/ 2>/dev/null || true' EXIT
if compgen -G "$WHEELS/*.whl" >/dev/null && [ ! -d "$WORK/site" ]; then
	python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$WORK/site" "$WHEELS"/*.whl
fi
export PYTHONPATH="$WORK/site:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

flashrt() {
	local start=$SECONDS status=0
	python3 -W ignore -m flashrt_ros.cli "$@" || status=$?
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

for step in "${steps[@]}"; do
	case $step in
	checkpoint) # 15 s
		[ -d "$checkpoint" ] || flashrt make-checkpoint --preset "$PRESET" --out "$checkpoint"
		;;
	verify) # 3 to 4 minutes; below the bar is a result too, so the other steps go on
		measured verify --out "$parity" || echo "verify: below the bar, or failed"
		;;
	profile) # 60 s
		measured profile pi05 --case 2x10 --tokens "$TOKENS" --baselines lerobot_eager,plain_graph \
			--out "$results/h200_pi05_profile.json" --png "$results/h200_pi05_layer.png"
		;;
	bench) # 80 s a case
		bench --cases "$CASES" --baselines plain_graph,plain_compiled_layer_graph
		;;
	lerobot) # 4 to 6 minutes, most of it torch.compile, which unrolls ten steps of LeRobot's model
		bench --cases 2x10 --baselines all
		;;
	full) # 30 s: the plan with one graph a decision
		bench --cases 2x10 --set plan=full
		;;
	roofline)
		flashrt roofline --measured "$results/h200_pi05.json" --out "$results/roofline_pi05.json"
		;;
	tiers) # a minute a tier for calibration and gate on photographs, two for its part of the bench (estimates)
		tiers=()
		for tier in ${TIERS:-8-bit 4-bit-expert 4-bit}; do
			calibration=$results/h200_pi05_$tier.safetensors
			case=(--tier "$tier" --case "${CASES%%,*}" --tokens "$TOKENS" --photographs "${PHOTOGRAPHS:-16}")
			measured calibrate "${case[@]}" --out "$calibration"
			measured verify "${case[@]}" --calibration "$calibration" --seed 1 \
				--weights "random, scaled (flashrt make-checkpoint --seed 0)" --out "$results/h200_pi05_$tier.json" ||
				echo "$tier: below the bar, or failed" # a result too, and times need no verdict
			tiers+=(--tiers "$tier=$calibration")
		done
		bench --cases "${CASES%%,*}" "${tiers[@]}" --baselines plain_graph
		flashrt plot "$results/h200_pi05.json" --out "$results/h200_pi05_tiers.png" ||
			echo "no picture; draw it elsewhere: flashrt plot h200_pi05.json --out h200_pi05_tiers.png"
		;;
	*)
		echo "unknown step '$step'; there are: checkpoint verify profile bench lerobot full roofline tiers" >&2
		exit 2
		;;
	esac
done
