#!/bin/sh
# Runs Go fuzzers one after the other, and prints how many inputs a second each of them tried.
#
#   scripts/fuzz.sh [PACKAGE...]
#
# PACKAGE is a package as for go test; without one, all packages are fuzzed. Environment: GO is the
# go command. FUZZTIME is the time of each fuzzer (default 20s). FUZZRATE is the minimum rate in
# inputs per second (default 1000).
#
# Exits with 1 if a fuzzer finds a failure or is slower than the minimum rate. A fuzzer may be
# slower if its comment gives the reason in a line that begins with "Slow:".
set -u

cd "$(dirname "$0")/.." || exit 1
: "${GO:=go}" "${FUZZTIME:=20s}" "${FUZZRATE:=1000}"
[ $# -gt 0 ] || set -- ./...
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM

# Prints the inputs per second of a log of go test. Its last line with a count is of the whole time.
rate() {
  awk '/^fuzz: elapsed: [0-9hms]+, execs: / {
    seconds = 0; rest = $3
    while (match(rest, /^[0-9]+[hms]/)) {
      unit = substr(rest, RLENGTH, 1)
      seconds += substr(rest, 1, RLENGTH - 1) * (unit == "h" ? 3600 : unit == "m" ? 60 : 1)
      rest = substr(rest, RLENGTH + 1)
    }
    if (seconds > 0) found = $5 / seconds
  } END { printf "%d", found }' "$1"
}

# Prints the "Slow:" line of a fuzzer's comment.
reason() { # FOLDER FUZZER
  awk -v func_="func $2(" '
    /^\/\/ Slow: / { why = substr($0, 4) }
    index($0, func_) == 1 && why { print why; exit }
    !/^\/\// { why = "" }' "$1"/*_test.go
}

bad=0
"$GO" list -f '{{.ImportPath}} {{.Dir}}' "$@" >"$work/packages" || exit 1
printf '%-30s %-24s %12s\n' package fuzzer 'inputs/s' >"$work/table"
while read -r package folder; do
  "$GO" test -list '^Fuzz' "$package" >"$work/fuzzers" </dev/null || { cat "$work/fuzzers"; exit 1; }
  for fuzzer in $(grep '^Fuzz' "$work/fuzzers"); do
    echo "$package $fuzzer"
    # Go tries ten times to make a new input smaller. Without -fuzzminimizetime it would take a
    # minute for each new input, and a fuzzer finds many.
    "$GO" test -run '^$' -fuzz "^$fuzzer\$" -fuzztime "$FUZZTIME" -fuzzminimizetime 10x "$package" \
      >"$work/log" 2>&1 </dev/null
    failed=$?
    # Go before 1.27 may fail when the time is over, without a fault: https://go.dev/issue/75804
    if grep -q '^    context deadline exceeded$' "$work/log" &&
      ! grep -qE 'Failing input|^panic: |_test\.go:' "$work/log"; then
      failed=0
    fi
    rate=$(rate "$work/log")
    note=
    if [ "$failed" -ne 0 ]; then
      bad=1 note='FAILED'
      cat "$work/log"
    elif [ "$rate" -lt "$FUZZRATE" ]; then
      note=$(reason "$folder" "$fuzzer")
      [ -n "$note" ] || { bad=1 note="TOO SLOW: below $FUZZRATE, and its comment has no \"Slow:\""; }
    fi
    printf '%-30s %-24s %12s  %s\n' "${package##*/internal/}" "$fuzzer" "$rate" "$note" >>"$work/table"
  done
done <"$work/packages"
cat "$work/table"
exit "$bad"
