#!/bin/sh
# Builds hook.so, PyTorch's forward hook and the torch tracer's hot path in C, as the file OUT:
#
#     libstrap/build-hook.sh OUT
#
# This is the one home of its build flags, as build.sh is of the library's.
# Environment: GO (the go command, which knows the machine to build for), CC (C compiler
# and arguments, shell-quoted).
set -eu

fail() {
  echo "libstrap/build-hook.sh: $*" >&2
  exit 1
}

[ $# -eq 1 ] || fail "usage: libstrap/build-hook.sh OUT"
case $1 in
  /*) out=$1 ;;
  *) out=$PWD/$1 ;;
esac
cd -- "$(dirname -- "$0")/.."

: "${GO:=go}"
export GOTOOLCHAIN=local
command -v "$GO" >/dev/null || fail "no Go compiler: '$GO' is not a command (set GO)"
: "${CC:=$("$GO" env CC)}"
# Python's functions are those of the interpreter that loads it, as ELF finds by itself.
undefined=
if [ "$("$GO" env GOOS)" = darwin ]; then undefined="-undefined dynamic_lookup"; fi
mkdir -p -- "$(dirname -- "$out")"
eval "$CC -std=gnu11 -O2 -Wall -Wextra -fPIC -shared $undefined -Ic_include \
  -o \"\$out.new\" libstrap/hook/*.c"
mv -f -- "$out.new" "$out" # in one step, for it may be in use
