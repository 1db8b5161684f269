#!/usr/bin/env bash
# The tests that need a GPU, then the benchmarks of loading, of all-reduces over the GPUs that are there, and of the
# kernels, in six minutes at most and without the network:
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
# Of the steps between the kernels' tests and benchmarks.
tests_limit=80 limit=45
mkdir -p "$out"

left() { echo $((seconds - SECONDS)); }

# Of several processes, each compiles its own part of the kernels while one GPU waits.
workers=()
"$python" -c "import xdist" 2>/dev/null && workers=(-n 8)

tests=("$python" -m pytest tests/kernels tests/test_read_on_gpu.py -m gpu --junitxml="$out/gpu-tests.xml")
# Apart, as a collective that waits for ever would take the other tests along.
groups=("$python" -m pytest tests/test_group_on_gpu.py tests/test_graph_on_gpu.py tests/test_ways_on_gpu.py -m gpu -rs
    --junitxml="$out/group-tests.xml")
load=("$python" bench/load_cuda.py --output "$out/load_cuda.csv")
gpus=$("$python" -c "import torch; print(torch.cuda.device_count() or 2)")
reduce=("$python" -m torch.distributed.run --standalone --nproc-per-node "$gpus"
    bench/all_reduce.py --seconds 25 --output "$out/all_reduce.csv")
bench=("$python" bench/kernels.py --output "$out/kernels.csv")
if [ -n "${DRY_RUN:-}" ]; then
    tests+=(--collect-only)
    groups+=(--collect-only)
    load+=(--dry-run)
    reduce+=(--dry-run)
    bench+=(--dry-run)
    export TRITON_INTERPRET=1 OMP_NUM_THREADS=1
    seconds=${SECONDS_IN_ALL:-110}
    tests_limit=$seconds limit=$seconds
else
    tests+=("${workers[@]}")
fi

# Interrupted, pytest still says what it has seen.
timeout --signal=INT --kill-after=10 $((seconds * 2 / 5)) "${tests[@]}" 2>&1 | tee "$out/gpu-tests.txt"
status=$?

timeout --signal=INT --kill-after=5 "$tests_limit" "${groups[@]}" 2>&1 | tee "$out/group-tests.txt"
[ $? -eq 0 ] || status=1

timeout --kill-after=5 "$limit" "${load[@]}" 2>&1 | tee "$out/load_cuda.txt"
[ $? -eq 0 ] || status=1

# Of one rank no figure is worth reading; its sums must still be right.
timeout --kill-after=5 "$limit" "${reduce[@]}" 2>&1 | tee "$out/all_reduce.txt"
[ $? -eq 0 ] || status=1

# The benchmark stops by itself; a case may take a few seconds longer, and so may what follows.
timeout --kill-after=5 "$(left)" "${bench[@]}" --seconds $(($(left) - 25)) 2>&1 | tee "$out/kernels.txt"
[ $? -eq 0 ] || status=1

if [ -f "$out/kernels.csv" ]; then
    "$python" bench/choose.py "$out/kernels.csv" --output "$out/measured.py" || status=1
fi
if [ -f "$out/all_reduce.csv" ]; then
    "$python" bench/choose_windows.py "$out/all_reduce.csv" --output "$out/windows.py" || status=1
fi
exit $status
