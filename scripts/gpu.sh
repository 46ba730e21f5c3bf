#!/bin/sh
# Checks and measures captures on a machine with a CUDA device that reaches no package registry.
#
#   scripts/gpu.sh prepare                  here: build the wheel, fetch small ones into .gpu/
#   scripts/gpu.sh run OUT [OPTIONS]        there: run all stages, results go to the folder OUT
#   scripts/gpu.sh run OUT --rehearse       here: the same stages on the CPU, in small
#
# The checkout and .gpu/ are all that has to be carried. OPTIONS are those of benchmarks/gpu/run.py:
# --stages whole,correctness and --seconds 470. PYTHON is the interpreter (default python3).
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
usage() { sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2; }

[ $# -ge 1 ] || usage
verb=$1; shift
case $verb in
  prepare)
    PYTHONPATH=$root/benchmarks exec "$python" -m gpu.prepare "$@" ;;
  run)
    [ $# -ge 1 ] || usage
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    PYTHONPATH=$root/benchmarks "$python" -m gpu.install "$site" "$@"
    # The made-up device of a rehearsal patches the library of the checkout.
    PYTHONPATH=$site:$root/benchmarks${PYTHONPATH:+:$PYTHONPATH} "$python" -m gpu.run "$@" ;;
  *) usage ;;
esac
