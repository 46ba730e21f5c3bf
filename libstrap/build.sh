#!/bin/sh
# Builds libstrap, the C shared library, as the file OUT:
#
#     libstrap/build.sh OUT
#
# This is the one home of its build flags; the Makefile, the wheel and the tests
# all call it. Environment: GO (the go command), CC (C compiler and arguments,
# shell-quoted), GOOS and GOARCH to build for another machine.
set -eu

fail() {
  echo "libstrap/build.sh: $*" >&2
  exit 1
}

[ $# -eq 1 ] || fail "usage: libstrap/build.sh OUT"
case $1 in
  /*) out=$1 ;;
  *) out=$PWD/$1 ;;
esac
cd -- "$(dirname -- "$0")/.."

: "${GO:=go}"
export CGO_ENABLED=1 GOTOOLCHAIN=local
command -v "$GO" >/dev/null || fail "no Go compiler: '$GO' is not a command (set GO)"
: "${CC:=$("$GO" env CC)}"
export CC
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' python/llm_instrumentation/_version.py)
[ -n "$version" ] || fail "no __version__ in python/llm_instrumentation/_version.py"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM

os=$("$GO" env GOOS)
if [ "$os" = linux ]; then
  printf '#include <stdlib.h>\nlibc __GLIBC__\n' >"$work/libc.c"
  libc=$(eval "$CC -E -P \"\$work/libc.c\"" | tail -n 1)
  case $libc in
    "libc __GLIBC__")
      # Go's shared libraries cannot be loaded there: https://github.com/golang/go/issues/13492
      fail "musl is not supported: build on, or for, a glibc system (CC is $CC)" ;;
    "libc "*) ;;
    *) fail "the C compiler or the C library's headers do not work: $CC (set CC)" ;;
  esac
fi

# An empty build id, and no path of this machine in the result: the same sources
# and tools give the same bytes.
ldflags="-s -w -buildid="
export CGO_CFLAGS="${CGO_CFLAGS--O2 -g} -DSTRAP_VERSION=\"$version\""
if [ "$os" != darwin ]; then
  cp libstrap/symbols.map "$work"
  # nodelete: the Go runtime cannot be unloaded.
  link="-Wl,-soname,libstrap.so.1 -Wl,-z,nodelete -Wl,-z,noexecstack"
  ldflags="$ldflags '-extldflags=$link \"-Wl,--version-script=$work/symbols.map\"'"
fi
"$GO" build -trimpath -buildvcs=false -buildmode=c-shared -ldflags="$ldflags" \
  -o "$work/libstrap.so" ./libstrap/capi

# Replaced in one step, for a process may have the old library open.
mkdir -p -- "$(dirname -- "$out")"
cp "$work/libstrap.so" "$out.new"
mv -f "$out.new" "$out"
