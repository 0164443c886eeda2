#!/usr/bin/env bash
# All tests and tables that need a GPU, on a machine with one, where the project's tests can run: at most nine minutes.
#
#     benchmarks/device.sh [FOLDER]
#
# What each part prints is in FOLDER (benchmarks/results/<card> if none is named), as text and as JSON; what is skipped,
# fails, or takes longer than its time is said in the end. Without a GPU the parts say that there is none, and the tests of
# NCCL run over gloo and on the test device.
set -uo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
card=$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -1 | tr -cs 'A-Za-z0-9\n' '-' || true)
folder=${1:-benchmarks/results/${card:-cpu}}
mkdir -p "$folder"
said=()

# Run a part for at most so many seconds: part NAME SECONDS COMMAND...
part() {
    local name=$1 seconds=$2 code=0 start=$SECONDS
    shift 2
    echo "== $name"
    timeout --kill-after=10 "$seconds" "$@" 2>&1 | tee "$folder/$name.txt" | tail -n 40 || code=$?
    case $code in
    0) ;;
    124 | 137) said+=("$name: stopped after $seconds s") ;;
    *) said+=("$name: exit code $code") ;;
    esac
    if grep -qE "nothing was measured|[0-9]+ skipped" "$folder/$name.txt"; then
        said+=("$name: $(grep -hE "nothing was measured|[0-9]+ skipped" "$folder/$name.txt" | tail -1)")
    fi
    echo "$name: $((SECONDS - start)) s"
}

tests=(python -m pytest -p no:xdist -o addopts= --import-mode=importlib --strict-markers -q -rs)
part versions 20 python -c '
import platform, torch
print(f"Python {platform.python_version()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
if torch.cuda.is_available():
    print(torch.cuda.get_device_name(0), "NCCL", ".".join(map(str, torch.cuda.nccl.version())))'
part cuda 110 "${tests[@]}" -m cuda tests/whole/cuda
part nccl 180 "${tests[@]}" -m nccl ${card:+-k GPUs} tests/whole/ranks/test_backends.py
part one_gpu 100 python -m benchmarks.one_gpu --rounds 8 --json "$folder/one_gpu.json"
part ranks 80 python -m benchmarks.distributed --nccl --rounds 8 --json "$folder/ranks.json"
part profiles 40 python -m benchmarks.profiles --device cuda:0 --out "$folder/profiles.svg"

if [ ${#said[@]} -gt 0 ]; then
    printf '%s\n' "${said[@]}" | tee "$folder/skipped.txt"
fi
