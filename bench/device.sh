#!/usr/bin/env bash
# The tests that need a GPU, then the benchmarks of the kernels, of loading, and of all-reduces over the GPUs that are
# there, in six minutes at most and without the network:
#
#     bash bench/device.sh               results in bench/results
#     OUT=folder bash bench/device.sh    in another folder
#     COMMIT=abc bash bench/device.sh    of a tree without its git history
#     DRY_RUN=1 bash bench/device.sh     the same steps on a CPU, in two minutes; the tests are only collected
#
# Needs torch, triton, pytest and pytest-benchmark; the package need not be installed. What is finished when it is cut
# off stays. The exit status is not 0 if a test or a benchmark failed.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
out=${OUT:-bench/results}
seconds=${SECONDS_IN_ALL:-345}
# Of the groups' tests, and of each benchmark but the kernels'.
tests_limit=80 limit=35
mkdir -p "$out"

left() { echo $((seconds - SECONDS)); }
# So many seconds, or what is left.
within() {
    local rest
    rest=$(left)
    echo $((rest > $1 ? $1 : rest > 1 ? rest : 1))
}

# Of several processes, each compiles its own part of the kernels while one GPU waits.
workers=()
"$python" -c "import xdist" 2>/dev/null && workers=(-n 8)

tests=("$python" -m pytest tests/kernels tests/test_read_on_gpu.py -m gpu --junitxml="$out/gpu-tests.xml")
# Apart, as a collective that waits for ever would take the other tests along; it is then said where.
groups=("$python" -m pytest tests/test_group_on_gpu.py tests/test_graph_on_gpu.py tests/test_ways_on_gpu.py -m gpu
    -vv -rs -o faulthandler_timeout=40 --junitxml="$out/group-tests.xml")
load=("$python" bench/load_cuda.py --output "$out/load_cuda.csv")
gpus=$("$python" -c "import torch; print(torch.cuda.device_count() or 2)")
# Of one rank no figure is worth reading; its sums must still be right. The host's name need not resolve.
reduce=("$python" -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node "$gpus"
    bench/all_reduce.py --seconds "$((gpus > 1 ? 25 : 5))" --output "$out/all_reduce.csv")
bench=("$python" bench/kernels.py --output "$out/kernels.csv")
if [ -n "${DRY_RUN:-}" ]; then
    tests+=(--collect-only)
    groups+=(--collect-only)
    load+=(--dry-run)
    reduce+=(--dry-run)
    bench+=(--dry-run)
    export TRITON_INTERPRET=1 OMP_NUM_THREADS=1
    seconds=${SECONDS_IN_ALL:-110}
    tests_limit=$seconds limit=$((seconds / 4))
else
    tests+=("${workers[@]}")
fi

status=0
# What a step says goes to the end of the log too.
step() {
    timeout --kill-after=5 "$@" 2>&1 | tee -a "$out/log.txt"
    [ "${PIPESTATUS[0]}" -eq 0 ] || status=1
}
rm -f "$out/log.txt"

# Interrupted, pytest still says what it has seen.
step --signal=INT $((seconds * 2 / 5)) "${tests[@]}"
step --signal=INT "$tests_limit" "${groups[@]}"

# The benchmark stops by itself; a case may take a few seconds longer. It always has a minute; those after it have what
# is left then.
for_bench=$(($(left) - 2 * limit))
for_bench=$((for_bench > 60 ? for_bench : 60))
step "$for_bench" "${bench[@]}" --seconds $((for_bench - 20))
step "$(within "$limit")" "${load[@]}"
step "$(within "$limit")" "${reduce[@]}"

if [ -f "$out/kernels.csv" ]; then
    "$python" bench/choose.py "$out/kernels.csv" --output "$out/measured.py" || status=1
fi
if [ -f "$out/all_reduce.csv" ]; then
    "$python" bench/choose_windows.py "$out/all_reduce.csv" --output "$out/windows.py" || status=1
fi
exit $status
