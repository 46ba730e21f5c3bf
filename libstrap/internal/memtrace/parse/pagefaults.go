package parse

import (
	"bytes"

	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
)

// pageFaults reads page faults, the first touches of pages. Of the tracepoints
// exceptions:page_fault_user and page_fault_kernel, as perf script and tracefs
// print them:
//
//	comm pid [cpu] time: exceptions:page_fault_user: address=0x7f.. ip=0x40.. error_code=0x6
//	comm-tid [cpu] d..1. time: page_fault_user: address=0x7f.. ip=0x40.. error_code=0x6
//
// Bit 1 of the error code tells a store from a load; the ip is the symbol. And of
// perf's software events (page-faults, minor-faults, major-faults), recorded with
// their addresses (-d) and printed with them (-F +addr):
//
//	comm pid/tid [cpu] time: 1 page-faults: addr [sym (dso)] ip sym+0xoff (dso)
//
// These do not say what the access was; they are loads, as every sample that is not
// said to be a store. Those printed without the address are unaddressed, as in
// perfScript. Samples of other events are skipped.
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

// nextField is what stands behind blanks and the name.
func nextField(text, name []byte) ([]byte, bool) {
	start, ok := space(text, 0)
	if !ok {
		return nil, false
	}
	return bytes.CutPrefix(text[start:], name)
}
