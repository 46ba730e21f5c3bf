// Twins of the parsers with regular expressions, for tests to compare with.

package parse

import (
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
)

// The twin does with regular expressions what perfScript and pageFaults do byte by byte. It parses
// one line at a time and ignores call chains.

const (
	ws = `[ \t\r\v\f]`
	no = `[^ \t\r\v\f]`
)

func expression(s string) *regexp.Regexp {
	return regexp.MustCompile(`(?s)^` + strings.NewReplacer("_", ws, "~", no).Replace(s))
}

var (
	reToken    = expression(`_*(~+)`)
	rePerf     = expression(`(?:(?:-1|\d{1,18})/)?(-1|\d{1,18})_+(?:\[(\d{1,18})\]_+)?(?:[KUHGgMESp]{1,6}_+)?(\d{1,18})\.(\d+):(.*)$`)
	reFtrace   = expression(`~*-(\d{1,18})_+(?:\([^)]{0,14}\)_*)?\[(\d{1,18})\]_+(?:~+_+)??(\d{1,18})\.(\d+):(.*)$`)
	reEvent    = expression(`_+(.*?):(?:(_+)(.*)|)$`)
	reSideBand = regexp.MustCompile(`^[ \t\r\v\f]+PERF_RECORD_`)
	reStore    = regexp.MustCompile(`(?i)[mM][eE][mM]-[sS][tT][oO][rR][eE]`)
	reAccess   = regexp.MustCompile(`(?i)mem-load|mem-store|fault`)
	reOther    = regexp.MustCompile(`(?s)^(?:.* )?(?:cpu-clock|task-clock|cycles|cpu-cycles|instructions|branches|context-switches|cpu-migrations)(?::[^ ]*)?$`)
	reFaults   = regexp.MustCompile(`(?s)^(?:.* )?(?:page-faults|minor-faults|major-faults|faults)(?::[^ ]*)?$`)
	reAddress  = expression(`([0-9a-fA-F]+)(_.*|)$`)
	reSource   = expression(`(?:.*_|)([0-9a-fA-F]+)_+$`)
	reHex      = regexp.MustCompile(`^[0-9a-fA-F]+$`)
	reOffset   = regexp.MustCompile(`\+0x[0-9a-fA-F]+$`)
	rePageSize = regexp.MustCompile(`^(?:\d{1,18}[KMG]|N/A)$`)
	reAnyOff   = regexp.MustCompile(`\+(?:0x)?[0-9a-fA-F]+$`)
	reColumns  = expression(`(?:_+(?:[0-9a-fA-F]~*|N/A))*_*$`)
	reFault    = expression(`address=0x([0-9a-fA-F]+)_+ip=(~*)_+error\x5fcode=0x([0-9a-fA-F]+)(?:_.*|)$`)
)

type twinHead struct {
	time, thread, cpu int64
	event, blanks     string // blanks are those behind the event
	rest              string
}

func twinHeadOf(line string) (h twinHead, what verdict) {
	for at := 0; ; {
		token := reToken.FindStringSubmatchIndex(line[at:])
		if token == nil {
			return h, malformed
		}
		for _, re := range []*regexp.Regexp{rePerf, reFtrace} {
			m := re.FindStringSubmatch(line[at+token[2]:])
			if m == nil {
				continue
			}
			whole, _ := strconv.ParseInt(m[3], 10, 64)
			fraction, _ := strconv.ParseInt((m[4] + "000000000")[:9], 10, 64)
			if whole > (math.MaxInt64-fraction)/1e9 {
				continue
			}
			h = twinHead{time: whole*1e9 + fraction, thread: none, cpu: none}
			if m[1] != "-1" {
				h.thread, _ = strconv.ParseInt(m[1], 10, 64)
			}
			if m[2] != "" {
				h.cpu, _ = strconv.ParseInt(m[2], 10, 64)
			}
			if reSideBand.MatchString(m[5]) {
				return h, skipped
			}
			e := reEvent.FindStringSubmatch(m[5])
			if e == nil || strings.Trim(e[1], " \t\r\v\f") == "" {
				return h, malformed
			}
			h.event, h.blanks, h.rest = e[1], e[2], e[3]
			return h, accepted
		}
		at += token[1]
	}
}

// twinToken is a token of a text. Its column begins at left, the token itself at start.
type twinToken struct {
	text        string
	left, start int
}

func twinTokens(text string) (tokens []twinToken) {
	for at := 0; ; {
		m := reToken.FindStringSubmatchIndex(text[at:])
		if m == nil {
			return tokens
		}
		tokens = append(tokens, twinToken{text[at+m[2] : at+m[3]], at, at + m[2]})
		at += m[1]
	}
}

func (t twinToken) end() int { return t.start + len(t.text) }

func (t twinToken) number() bool {
	return reHex.MatchString(t.text) && (t.text[0] <= '9' || t.end()-t.left >= 16)
}

func twinDataSource(text string) (source uint64, behind string, what verdict) {
	hex := ""
	before, behind, found := strings.Cut(text, "|OP ")
	if found {
		if m := reSource.FindStringSubmatch(before); m != nil {
			hex = m[1]
		}
	} else if before, behind, found = strings.Cut(text, "|SNP "); found {
		for _, t := range twinTokens(before) {
			if t.number() {
				hex = t.text
				if t.end() == len(before) {
					hex = ""
				}
			}
		}
	} else {
		return 0, "", skipped
	}
	source, err := strconv.ParseUint(hex, 16, 64)
	if err != nil {
		return 0, "", malformed
	}
	for _, tag := range []string{"|SNP ", "|LCK ", "|BLK "} {
		if _, after, ok := strings.Cut(behind, tag); ok {
			behind = after
		}
	}
	for _, t := range twinTokens(behind) {
		if t.number() {
			return source, behind[t.left:], accepted
		}
	}
	return source, "", accepted
}

// twinCode returns the symbol, the dso and the numbers before them. bare says that there are only
// numbers.
func twinCode(text string) (symbol, dso string, numbers []string, bare bool) {
	text = strings.TrimRight(text, " \t\r\v\f")
	skip := func() {
		for _, t := range twinTokens(text) {
			if !t.number() {
				text = text[t.start:]
				return
			}
			numbers = append(numbers, t.text)
		}
		text = ""
	}
	skip()
	bare = text == "" && len(numbers) > 0
	if open, end := twinParentheses(text); end >= 0 {
		dso = text[open+1 : end]
		if dso == "inlined" {
			dso = ""
		}
		text = strings.TrimRight(text[:open], " \t\r\v\f")
		for i := len(text) - 1; i >= 0; i-- {
			if text[i] == ')' {
				if t := twinTokens(text[i+1:]); len(t) > 0 && t[0].number() {
					text = text[i+1:]
					skip()
					break
				}
			}
		}
		symbol = text
	} else if tokens := twinTokens(text); len(tokens) > 0 {
		end := 0
		for i, t := range tokens {
			if reOffset.MatchString(text[:t.end()]) {
				end = i
				break
			}
		}
		symbol = text[:tokens[end].end()]
		if end+1 < len(tokens) {
			dso = tokens[end+1].text
		}
	}
	symbol = strings.TrimSuffix(symbol, reAnyOff.FindString(symbol))
	if symbol == "" && len(numbers) > 0 {
		symbol = numbers[len(numbers)-1]
	}
	return symbol, dso, numbers, bare
}

func twinParentheses(text string) (open, end int) {
	end = strings.LastIndexByte(text, ')')
	if end < 0 || !reColumns.MatchString(text[end+1:]) && text[end+1:] != "" {
		return -1, -1
	}
	for open = end - 1; open >= 0; open-- {
		inside := text[open : end+1]
		if strings.Count(inside, "(") == strings.Count(inside, ")") {
			if open > 0 && !strings.ContainsRune(" \t\r\v\f", rune(text[open-1])) {
				return -1, -1
			}
			return open, end
		}
	}
	return -1, -1
}

// twinPerfScript parses a line. It returns the row as showTwin writes it, or "" without a row.
func twinPerfScript(line string, cyclesPerNS float64) (row string, what verdict) {
	h, what := twinHeadOf(line)
	if what != accepted {
		return "", twinOther(line, what)
	}
	return twinSample(h, cyclesPerNS)
}

func twinOther(line string, what verdict) verdict {
	trimmed := strings.TrimLeft(line, " \t\r\v\f")
	if trimmed == "" || trimmed[0] == '#' || line[0] == '\t' {
		return skipped
	}
	for _, t := range twinTokens(line) {
		if !t.number() && !rePageSize.MatchString(t.text) {
			return what
		}
	}
	return skipped
}

func twinSample(h twinHead, cyclesPerNS float64) (string, verdict) {
	m := reAddress.FindStringSubmatch(h.rest)
	if h.rest == "" {
		return "", unaddressed
	}
	if m == nil {
		return "", malformed
	}
	address, err := strconv.ParseUint(m[1], 16, 64)
	if err != nil {
		return "", malformed
	}
	if slices.Contains([]int{18, 40, 42}, len(h.blanks)+len(m[1])) {
		return "", unaddressed
	}
	op := trace.Load
	if reStore.MatchString(h.event) {
		op = trace.Store
	}
	rest, level := m[2], noLevel
	source, behind, found := twinDataSource(rest)
	sourced, known := found == accepted, false
	if found == malformed {
		return "", unaddressed
	}
	if sourced {
		switch did := source & 0x1f; {
		case did&1 == 0 && did&6 == 2, did&7 == 0 && did != 0:
			op, known = trace.Load, true
		case did&7 == 4:
			op, known = trace.Store, true
		case address == 0 && !reFaults.MatchString(h.event):
			return "", skipped
		}
		rest, level = behind, levelOf(source)
	}
	if !known && (reOther.MatchString(h.event) || address == 0 && !reAccess.MatchString(h.event)) {
		return "", unaddressed
	}
	if _, dso := twinParentheses(strings.TrimRight(rest, " \t\r\v\f")); !sourced && dso >= 0 &&
		twinTokens(rest)[0].number() && reFaults.MatchString(h.event) {
		return "", unaddressed
	}
	symbol, dso, numbers, bare := twinCode(rest)
	latency := none
	if len(numbers) > 1 || sourced && bare {
		if cycles, err := strconv.ParseInt(numbers[0], 10, 64); err == nil && cycles > 0 && len(numbers[0]) <= 18 {
			latency = int64(math.Round(float64(cycles) / cyclesPerNS))
		}
	}
	return showTwin(h, op, address, symbol, dso, level, latency), accepted
}

func twinPageFaults(line string, cyclesPerNS float64) (row string, what verdict) {
	h, what := twinHeadOf(line)
	switch {
	case what == malformed && strings.Contains(line, "[LOST "):
		return "", skipped
	case what != accepted:
		return "", twinOther(line, what)
	case !strings.Contains(h.event, "fault"):
		return "", skipped
	case !strings.Contains(h.event, "page_fault_"):
		return twinSample(h, cyclesPerNS)
	}
	m := reFault.FindStringSubmatch(h.rest)
	if m == nil {
		return "", malformed
	}
	address, err1 := strconv.ParseUint(m[1], 16, 64)
	code, err2 := strconv.ParseUint(m[3], 16, 64)
	if err1 != nil || err2 != nil {
		return "", malformed
	}
	return showTwin(h, trace.Op(code>>1&1), address, m[2], "", noLevel, none), accepted
}

func showTwin(h twinHead, op trace.Op, address uint64, symbol, dso string, level int32, latency int64) string {
	return fmt.Sprintf("time %d op %d address %x symbol %q dso %q level %d latency %d cpu %d thread %d",
		h.time, op, address, validUTF8(symbol), validUTF8(dso), level, latency, h.cpu, h.thread)
}
