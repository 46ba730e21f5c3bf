#!/bin/sh
# Builds strap-probe, a static program for Linux, as the file OUT:
#
#     libstrap/build-probe.sh OUT
#
# This is the one home of its build flags, as build.sh is of the library's.
# Environment: GO (the go command), GOARCH to build for another machine.
set -eu

fail() {
  echo "libstrap/build-probe.sh: $*" >&2
  exit 1
}

[ $# -eq 1 ] || fail "usage: libstrap/build-probe.sh OUT"
case $1 in
  /*) out=$1 ;;
  *) out=$PWD/$1 ;;
esac
cd -- "$(dirname -- "$0")/.."

: "${GO:=go}"
export CGO_ENABLED=0 GOOS=linux GOTOOLCHAIN=local
command -v "$GO" >/dev/null || fail "no Go compiler: '$GO' is not a command (set GO)"
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' python/llm_instrumentation/_version.py)
[ -n "$version" ] || fail "no __version__ in python/llm_instrumentation/_version.py"

# Replaced in one step, for it may be running. An empty build id, and no path of this
# machine in the result: the same sources and tools give the same bytes.
mkdir -p -- "$(dirname -- "$out")"
"$GO" build -trimpath -buildvcs=false -ldflags="-s -w -buildid= -X main.version=$version" \
  -o "$out.new" ./libstrap/cmd/strap-probe
mv -f -- "$out.new" "$out"
