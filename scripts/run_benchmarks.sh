#!/bin/sh
# Runs every benchmark of benchmarks/ on a quiet machine; what each prints, its figures and its plot
# are kept, with a description of the machine.
#
#   scripts/run_benchmarks.sh [--peers] [--quick] [DIRECTORY]
#
# DIRECTORY is benchmarks/results where none is given. --peers installs what the capture is compared
# with into benchmarks/.peers first, from the package index; without it, what is there is taken.
# --quick runs the benchmarks of the capture on very little: only a test. PYTHON is the interpreter
# that has this package and torch, python3 where it is not set. Ends with 1 when a benchmark failed.
set -u

root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
case $python in
  /*) ;;
  */*) python=$PWD/$python ;; # a path, which must outlive the cd below
esac
quick='' peers='' results=$root/benchmarks/results
for argument; do
  case $argument in
    --quick) quick=--quick ;;
    --peers) peers=yes ;;
    -*) echo "usage: $0 [--peers] [--quick] [DIRECTORY]" >&2; exit 2 ;;
    *) results=$argument ;;
  esac
done
mkdir -p "$results" || exit 1
results=$(cd "$results" && pwd)
cd "$root" || exit 1
export HF_HUB_OFFLINE=1

describe() {
  date -u '+%Y-%m-%d %H:%M UTC'
  git log -1 --format='commit %h of %cs' 2>/dev/null
  uname -srm
  grep -m 1 'model name' /proc/cpuinfo
  echo "cores: $(getconf _NPROCESSORS_ONLN)"
  grep MemTotal /proc/meminfo
  df -hT "$results"
  "$python" --version
  "$python" -m pip --disable-pip-version-check list 2>/dev/null |
    grep -i -E '^(torch|transformers|numpy|safetensors|zstandard|lz4|llm.instrumentation) '
  "${GO:-go}" version 2>/dev/null
  fio --version 2>/dev/null
}
describe | tee "$results/machine.txt"

[ -z "$peers" ] || "$python" benchmarks/capture_peers/install.py

rm -f "$results/.failed"
for script in benchmarks/[!_]*.py; do
  name=$(basename "$script" .py)
  case $name in
    speed_kept | throughput | ratio | memory | hook_cost)
      set -- $quick --out "$results" --json "$results/$name.json" ;;
    memtrace) # the traces' own
      [ -z "$quick" ] || continue
      set -- ;;
    *)
      [ -z "$quick" ] || continue
      set -- --json "$results/$name.json" ;;
  esac
  echo "== $script"
  # A pipe to tee would hide the status.
  { "$python" "$script" "$@" 2>&1 || echo "$name" >>"$results/.failed"; } | tee "$results/$name.md"
done
if [ -e "$results/.failed" ]; then
  echo "failed: $(tr '\n' ' ' <"$results/.failed")" >&2
  rm "$results/.failed"
  exit 1
fi
echo "== results are in $results"
