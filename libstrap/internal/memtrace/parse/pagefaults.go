// Parses the tracepoints of page faults.

package parse

import (
	"bytes"

	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
)

// pageFaults reads page faults, which are the first touches of pages. It reads the tracepoints
// exceptions:page_fault_user and page_fault_kernel, as perf script and tracefs print them:
//
//	comm pid [cpu] time: exceptions:page_fault_user: address=0x7f.. ip=0x40.. error_code=0x6
//	comm-tid [cpu] d..1. time: page_fault_user: address=0x7f.. ip=0x40.. error_code=0x6
//
// Bit 1 of the error code tells a store from a load. The ip becomes the symbol.
//
// It also reads perf's software events page-faults, minor-faults and major-faults, if they are
// recorded with addresses (-d) and printed with them (-F +addr):
//
//	comm pid/tid [cpu] time: 1 page-faults: addr [sym (dso)] ip sym+0xoff (dso)
//
// These events do not tell a store from a load. They become loads, as in perfScript. Those printed
// without the address are unaddressed, as in perfScript too. Samples of other events are skipped.
type pageFaults struct{ perfScript }

var (
	fault        = []byte("fault")
	tracepoints  = []byte("page_fault_") // user, kernel
	lost         = []byte("[LOST ")
	addressField = []byte("address=0x")
	ipField      = []byte("ip=")
	errorField   = []byte("error_code=0x")
)

func (p *pageFaults) line(text []byte, out *rows) verdict {
	what := headOf(text, &p.head)
	switch {
	case what == malformed && bytes.Contains(text, lost):
		return skipped
	case what != accepted:
		return p.other(text, what, out)
	case !bytes.Contains(p.head.event, fault):
		p.chain = false
		return skipped
	case bytes.Contains(p.head.event, tracepoints):
		return p.tracepoint(out)
	default:
		return p.sample(out)
	}
}

func (p *pageFaults) tracepoint(out *rows) verdict {
	p.chain = false
	h := &p.head
	if !bytes.HasPrefix(h.rest, addressField) {
		return malformed
	}
	address, end, ok := hexadecimal(h.rest, len(addressField))
	if !ok {
		return malformed
	}
	fields, ok := nextField(h.rest[end:], ipField)
	if !ok {
		return malformed
	}
	end = tokenEnd(fields, 0)
	ip := fields[:end]
	if fields, ok = nextField(fields[end:], errorField); !ok {
		return malformed
	}
	why, end, ok := hexadecimal(fields, 0)
	if !ok || end < len(fields) && class[fields[end]]&isSpace == 0 {
		return malformed
	}
	w := row{
		time: h.time, address: address, symbol: ip,
		level: noLevel, latency: none, cpu: h.cpu, thread: h.thread, length: none,
	}
	if why&2 != 0 {
		w.op = trace.Store
	}
	out.add(&w)
	return accepted
}

// nextField returns the text behind one or more blanks and the name. It returns false without them.
func nextField(text, name []byte) ([]byte, bool) {
	start, ok := space(text, 0)
	if !ok {
		return nil, false
	}
	return bytes.CutPrefix(text[start:], name)
}
