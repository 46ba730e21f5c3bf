#!/bin/sh
# Runs all benchmarks of benchmarks/. Use a quiet machine. It keeps the output, figures and plot of
# each benchmark, and a description of the machine.
#
#   scripts/run_benchmarks.sh [--peers] [--quick] [DIRECTORY]
#
# DIRECTORY receives the results (default benchmarks/results). --peers first installs the peers of
# the capture benchmarks from the package index into benchmarks/.peers; without it only installed
# peers run. --quick runs the capture benchmarks alone, with little data: only a test. The
# environment variable PYTHON is the interpreter that has this package and torch (default python3).
# Exits with 1 if a benchmark failed.
set -u

root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
case $python in
  /*) ;;
  */*) python=$PWD/$python ;; # make the path absolute, before the cd below
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
    *)
      [ -z "$quick" ] || continue
      set --
      if grep -q -e --json "$script"; then set -- --json "$results/$name.json"; fi ;;
  esac
  echo "== $script"
  # The pipe to tee hides the exit status, so a file keeps it.
  { "$python" "$script" "$@" 2>&1 || echo "$name" >>"$results/.failed"; } | tee "$results/$name.md"
done
if [ -e "$results/.failed" ]; then
  echo "failed: $(tr '\n' ' ' <"$results/.failed")" >&2
  rm "$results/.failed"
  exit 1
fi
echo "== results are in $results"
