// Reads the part of a line of perf or ftrace before the fields of its event.

package parse

import "bytes"

// head is the part of a line of perf or ftrace before the fields of its event:
//
//	comm pid [cpu] time: 1000 event:          perf script
//	comm pid/tid U    time: event:            perf script, other columns
//	comm-tid (tgid) [cpu] d..1. time: event:  tracefs
//
// A comm may hold any text. So headOf tries each token of the line as the pid or tid, and takes the
// first one that fits one of these forms.
type head struct {
	thread int64 // none if perf prints -1, for unknown
	cpu    int64 // none if it is not printed
	time   int64
	event  []byte // with the period before it, if that is printed
	blanks int    // number of blanks behind the event's colon
	rest   []byte // text behind these blanks
}

// sideBand begins the records that perf script prints and that are no samples.
var sideBand = []byte("PERF_RECORD_")

// headOf finds the head of a line. The verdict is accepted if the line has one, skipped if the
// head belongs to a record that is no sample, and malformed if there is no head.
func headOf(line []byte, h *head) verdict {
	for i := spaceEnd(line, 0); i < len(line); {
		if c := class[line[i]]; c&isDigit != 0 || line[i] == '-' {
			if end, ok := perfHead(line, i, h); ok {
				return h.setEvent(line, end)
			}
		}
		end := tokenEnd(line, i)
		if class[line[end-1]]&isDigit != 0 {
			if dash := bytes.LastIndexByte(line[i:end], '-'); dash >= 0 {
				if end, ok := ftraceHead(line, i+dash+1, end, h); ok {
					return h.setEvent(line, end)
				}
			}
		}
		i = spaceEnd(line, end)
	}
	return malformed
}

// perfHead reads a head of perf from the pid at i on, up to the colon behind the time. end is behind
// the colon.
func perfHead(line []byte, i int, h *head) (end int, ok bool) {
	pid, i, ok := thread(line, i)
	if !ok {
		return 0, false
	}
	if i < len(line) && line[i] == '/' {
		if pid, i, ok = thread(line, i+1); !ok {
			return 0, false
		}
	}
	i, ok = space(line, i)
	if !ok {
		return 0, false
	}
	h.thread, h.cpu = pid, none
	if i < len(line) && line[i] == '[' {
		if i, ok = h.setCPU(line, i); !ok {
			return 0, false
		}
	}
	if end, ok := h.setTime(line, i); ok {
		return end, true
	}
	if i, ok = space(line, miscEnd(line, i)); !ok {
		return 0, false
	}
	return h.setTime(line, i)
}

// miscEnd returns where the letters of perf's column misc end. They give the processor's mode, and
// properties of records that are no samples.
func miscEnd(line []byte, i int) int {
	for end := min(len(line), i+len("KUHGgS")); i < end && bytes.IndexByte(miscLetters, line[i]) >= 0; {
		i++
	}
	return i
}

var miscLetters = []byte("KUHGgMESp")

// maxTGID bounds the bytes of a tgid with its parentheses.
const maxTGID = 16

// ftraceHead is like perfHead for a head of tracefs. The tid stands at i and has to fill the token
// up to end.
func ftraceHead(line []byte, i, end int, h *head) (_ int, ok bool) {
	tid, i, ok := decimal(line, i)
	if !ok || i != end {
		return 0, false
	}
	h.thread = tid
	if i = spaceEnd(line, i); i < len(line) && line[i] == '(' {
		closing := bytes.IndexByte(line[i:min(len(line), i+maxTGID)], ')')
		if closing < 0 {
			return 0, false
		}
		i = spaceEnd(line, i+closing+1)
	}
	if i >= len(line) || line[i] != '[' {
		return 0, false
	}
	if i, ok = h.setCPU(line, i); !ok {
		return 0, false
	}
	if end, ok := h.setTime(line, i); ok {
		return end, true
	}
	if i, ok = space(line, tokenEnd(line, i)); !ok { // irq-info
		return 0, false
	}
	return h.setTime(line, i)
}

func (h *head) setCPU(line []byte, i int) (end int, ok bool) {
	cpu, i, ok := decimal(line, i+1)
	if !ok || i >= len(line) || line[i] != ']' {
		return 0, false
	}
	h.cpu = cpu
	return space(line, i+1)
}

func (h *head) setTime(line []byte, i int) (end int, ok bool) {
	h.time, i, ok = seconds(line, i)
	if !ok || i >= len(line) || line[i] != ':' {
		return 0, false
	}
	return i + 1, true
}

// setEvent reads the event behind the time. The event ends in a colon with a blank or the end of
// the line behind it.
func (h *head) setEvent(line []byte, i int) verdict {
	i, ok := space(line, i)
	if !ok {
		return malformed
	}
	if bytes.HasPrefix(line[i:], sideBand) {
		return skipped
	}
	for start := i; ; i++ {
		colon := bytes.IndexByte(line[i:], ':')
		if colon < 0 {
			return malformed
		}
		i += colon
		if i+1 == len(line) || class[line[i+1]]&isSpace != 0 {
			h.event = line[start:i]
			rest := spaceEnd(line, i+1)
			h.blanks, h.rest = rest-(i+1), line[rest:]
			if len(h.event) == 0 {
				return malformed
			}
			return accepted
		}
	}
}

// thread reads a pid or tid. perf prints -1 for an unknown one.
func thread(line []byte, i int) (v int64, end int, ok bool) {
	if bytes.HasPrefix(line[i:], minusOne) {
		return none, i + len(minusOne), true
	}
	return decimal(line, i)
}

var minusOne = []byte("-1")

// space reads one or more blanks. ok is false if there is none.
func space(line []byte, i int) (end int, ok bool) {
	end = spaceEnd(line, i)
	return end, end > i
}
