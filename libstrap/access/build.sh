#!/bin/sh
# Builds libstrap-access into the folder OUT:
#
#     libstrap/access/build.sh OUT
#
# OUT gets libstrap-access.a, libstrap-access.so, the headers and strap-access.cmake.
# Environment: CC (C compiler and arguments, shell-quoted), AR, CFLAGS.
set -eu

fail() {
  echo "libstrap/access/build.sh: $*" >&2
  exit 1
}

[ $# -eq 1 ] || fail "usage: libstrap/access/build.sh OUT"
case $1 in
  /*) out=$1 ;;
  *) out=$PWD/$1 ;;
esac
cd -- "$(dirname -- "$0")"

: "${CC:=cc}" "${AR:=ar}" "${CFLAGS:=-O2 -g}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM

echo 'int probe;' >"$work/probe.c"
eval "$CC -c \"\$work/probe.c\" -o \"\$work/probe.o\"" || fail "the C compiler does not work: $CC"
flags="-std=gnu11 -Wall -Wextra -Werror -fPIC -fvisibility=hidden -I../../c_include"
case $(eval "$CC -dumpmachine") in
  x86_64*) flags="$flags -mcx16" ;; # 128-bit atomics without libatomic
esac

for unit in output threads interface environment tsan atomics libc asan; do
  eval "$CC $flags $CFLAGS -c $unit.c -o \"\$work/$unit.o\""
done
# The archive has two members. environment.o is no member of its own: nothing refers to its
# constructor by name, so the linker would leave it out. asan.o is one, so that the linker
# leaves it out of programs that have the hooks of the real AddressSanitizer.
(
  cd "$work"
  eval "$CC -r -nostdlib -o strap_access.o output.o threads.o interface.o environment.o tsan.o atomics.o libc.o"
  $AR rcsD libstrap-access.a strap_access.o asan.o
  # nodelete: threads that end call back into the library, so it must stay loaded.
  eval "$CC -shared -Wl,-soname,libstrap-access.so.1 -Wl,-z,nodelete -Wl,-z,noexecstack -Wl,-z,defs \
    -o libstrap-access.so.1 strap_access.o asan.o -lpthread"
)

mkdir -p -- "$out"
cp ../../c_include/strap.h strap_access.h strap-access.cmake "$work/libstrap-access.a" "$out"
cp "$work/libstrap-access.so.1" "$out/libstrap-access.so.1.new"
mv -f "$out/libstrap-access.so.1.new" "$out/libstrap-access.so.1"
ln -sf libstrap-access.so.1 "$out/libstrap-access.so"
