#!/usr/bin/env bash
# Everything that only a GPU can show, in one command of at most eight minutes: the tests that need one,
# the attention benchmark, what draws cost, steps of known models' shapes with recorded acceptance, and, given
# a checkpoint, decoding and its exactness. Installs nothing and needs no network.
#
#   bench/gpu_check.sh OUT_DIR [CKPT]
#
# Leaves OUT_DIR/gpu_check.json (one object) and OUT_DIR/log.txt (all output). A part that fails or runs
# out of time does not stop the next. Exit codes: 0; 1 when a part failed or there is no GPU; 2 for wrong
# arguments. PYTHON names another interpreter than python3; without pytest in it the tests fail.

set -u

if [ $# -lt 1 ] || [ $# -gt 2 ]; then
    echo "usage: bench/gpu_check.sh OUT_DIR [CKPT]" >&2
    exit 2
fi
mkdir -p "$1" || exit 2
out=$(cd "$1" && pwd)
checkpoint=
if [ $# -eq 2 ]; then
    checkpoint=$(cd "$2" && pwd) || exit 2
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
python=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
# Nothing here may wait for a network.
export HF_HUB_OFFLINE=1

log=$out/log.txt
parts=$out/parts.tsv
: > "$log"
: > "$parts"
rm -f "$out"/{gpu_check,attn_mask,sampling,replay_7b,replay_smollm2,decode,exactness}.json "$out/tests.xml"

# part NAME SECONDS COMMAND...: run it within SECONDS and note how it ended.
part() {
    local name=$1 limit=$2 began code
    shift 2
    echo "== $name: $*" | tee -a "$log"
    began=$(date +%s)
    timeout --kill-after=10 "$limit" "$@" >> "$log" 2>&1
    code=$?
    printf '%s\t%s\t%s\t%s\t%s\n' "$name" "$code" "$(($(date +%s) - began))" "$limit" \
        "$(wc -l < "$log")" >> "$parts"
    echo "== $name: exit code $code" | tee -a "$log"
}

# Steps of a shape with random weights that accept what SmolLM2 accepted.
replay() {
    part "replay_$1" "$2" "$python" bench/replay.py --replay bench/trace.json --shape "$3" --configs "15,5,15" \
        --limit 2 --repeats 1 --json-out "$out/replay_$1.json"
}

part tests 140 "$python" -m pytest -m gpu tests/kernels/test_gpu.py tests/kernels/test_gpu_step.py \
    tests/kernels/test_gpu_draw.py -rs --continue-on-collection-errors \
    --junitxml "$out/tests.xml" -p no:cacheprovider
part attn_mask 115 "$python" bench/attn_mask.py --quick --seconds 70 --json-out "$out/attn_mask.json"
part sampling 25 "$python" bench/sampling.py --dtype bfloat16 --json-out "$out/sampling.json"
replay 7b 70 llama-2-7b
replay smollm2 30 smollm2-135m
if [ -n "$checkpoint" ]; then
    part decode 55 "$python" bench/decode.py --ckpt "$checkpoint" --limit 2 --repeats 1 \
        --max-new-tokens 64 --configs "5,4,5;15,5,15" --json-out "$out/decode.json"
    part exactness 40 "$python" bench/exactness.py --ckpt "$checkpoint" --limit 3 \
        --max-new-tokens 64 --dtype bfloat16 --json-out "$out/exactness.json"
fi
"$python" bench/gpu_report.py "$out" 2>> "$log"
