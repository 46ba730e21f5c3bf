package parse

import (
	"bytes"
	"math"
	"strings"

	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
)

// perfScript reads samples as perf script prints them:
//
//	comm pid [cpu] time: [period] event: addr sym[+off] [dso]
//
// and with the columns of `perf mem record`: pid/tid (the tid is the thread), no
// cpu, addr [data_src words] [weight ...] ip sym+0xoff (dso) [phys_addr ...].
//
// A sample without a data address is unaddressed: one that was printed without the
// column (-F +addr), which perf's alignment of the ip, a data source without its
// number and a page fault's address without its symbol tell, and one of an event that
// counts no accesses, such as cpu-clock, or whose address is 0 where neither the event
// nor the data source says that there was an access. A weight or a physical address
// that stands where the address would looks like one.
//
// A sample whose data source says so is a store or a load; otherwise one is a store
// whose event's name contains mem-store, else a load. One that has a data source,
// but neither an operation nor an address, as instruction sampling gives for other
// instructions, is skipped; a page fault is an access anyway. The symbol of a sample with a call chain is its first
// entry, not the address's, which stands before it. The weight, in cycles, becomes access_latency_ns where the clock is known;
// 0 is no weight.
type perfScript struct {
	cyclesPerNS float64

	head  head
	code  code
	chain bool // the next line may have the symbol of the last row
}

func (p *perfScript) begin() { p.chain = false }

func (p *perfScript) line(text []byte, out *rows) verdict {
	if what := headOf(text, &p.head); what != accepted {
		return p.other(text, what, out)
	}
	return p.sample(out)
}

// sample reads what stands behind the head.
func (p *perfScript) sample(out *rows) verdict {
	p.chain = false
	h := &p.head
	address, end, ok := hexadecimal(h.rest, 0)
	switch {
	case len(h.rest) == 0:
		return unaddressed
	case !ok || end < len(h.rest) && class[h.rest[end]]&isSpace == 0:
		return malformed
	case isIPEnd(h.blanks + end):
		return unaddressed
	}
	w := row{
		time: h.time, address: address, op: opOfEvent(h.event),
		level: noLevel, latency: none, cpu: h.cpu, thread: h.thread, length: none,
	}
	rest := h.rest[end:]
	source, behind, found := dataSourceOf(rest)
	if found == malformed {
		return unaddressed
	}
	sourced := found == accepted
	known := false // what the access was
	if sourced {
		var op trace.Op
		if op, known = opOf(source); known {
			w.op = op
		} else if address == 0 && !faults(h.event) {
			return skipped
		}
		w.level = levelOf(source)
		rest = behind
	}
	if !known && (countsOther(h.event) || address == 0 && !accesses(h.event)) {
		return unaddressed
	}
	c := &p.code
	codeOf(rest, c)
	if c.numbers > 1 || sourced && c.onlyNumbers {
		w.latency = p.latency(c.first)
	}
	if !sourced && c.numberFirst && faults(h.event) {
		return unaddressed
	}
	w.symbol, w.dso = c.symbol, c.dso
	p.chain = c.numbers == 0 || c.onlyNumbers // no ip, so a symbol may be the address's
	out.add(&w)
	return accepted
}

// isIPEnd tells whether perf's ip ends there, counted from the colon of the event, where no
// other column but the flags stands between them: behind two blanks, with a width of 16. An
// address, behind one blank, ends one before that. The flags of a sample that is no branch are
// blanks: 24, or 22 where perf is older (-F +flags since perf 4.10).
func isIPEnd(end int) bool {
	const ipEnd = 2 + columnWidth
	return end == ipEnd || end == ipEnd+24 || end == ipEnd+22
}

// eventName is the name of an event without the period before it and the modifiers behind it.
func eventName(event []byte) []byte {
	name := event[bytes.LastIndexByte(event, ' ')+1:]
	if modifier := bytes.IndexByte(name, ':'); modifier >= 0 {
		name = name[:modifier]
	}
	return name
}

// faults knows perf's software events of page faults. Where perf prints symbols, it prints that
// of the address, too, be it [unknown]: a number before the ip and its symbol is no address.
func faults(event []byte) bool {
	switch string(eventName(event)) {
	case "page-faults", "faults", "minor-faults", "major-faults":
		return true
	}
	return false
}

// countsOther knows perf's events that count something else than accesses to memory. Those of
// AMD's IBS that have these names (cycles:P) are told by their data source.
func countsOther(event []byte) bool {
	switch string(eventName(event)) {
	case "cpu-clock", "task-clock", "cycles", "cpu-cycles", "instructions", "branches",
		"context-switches", "cpu-migrations":
		return true
	}
	return false
}

// accesses tells whether each sample of an event is an access, also one to address 0.
func accesses(event []byte) bool {
	name := bytes.ToLower(event)
	return bytes.Contains(name, []byte("mem-load")) || bytes.Contains(name, []byte("mem-store")) || bytes.Contains(name, fault)
}

// other is a line that is no sample.
func (p *perfScript) other(text []byte, what verdict, out *rows) verdict {
	chain := p.chain
	p.chain = false
	switch {
	case what == skipped || onlyNumbers(text) || text[spaceEnd(text, 0)] == '#':
		return skipped
	case text[0] != '\t':
		return malformed
	}
	if chain {
		codeOf(text, &p.code)
		last := out.len() - 1
		out.symbol.codes[last] = out.symbol.code(p.code.symbol)
		out.dso.codes[last] = out.dso.code(p.code.dso)
	}
	return skipped
}

// onlyNumbers tells whether a line has nothing but blanks or what perf prints behind
// a call chain, on a line of its own: a physical address and page sizes.
func onlyNumbers(text []byte) bool {
	for i := 0; ; {
		start := spaceEnd(text, i)
		if start == len(text) {
			return true
		}
		end := number(text, start, i)
		if end < 0 {
			if end = tokenEnd(text, start); !pageSize(text[start:end]) {
				return false
			}
		}
		i = end
	}
}

// pageSize knows 4K, 2M, 1G and N/A.
func pageSize(token []byte) bool {
	_, end, ok := decimal(token, 0)
	return ok && end == len(token)-1 && bytes.IndexByte(units, token[end]) >= 0 || bytes.Equal(token, notAvailable)
}

var units = []byte("KMG")

// opOfEvent goes by the name of the event: mem-store in it, in any case, is a store.
func opOfEvent(event []byte) trace.Op {
	const store = "mem-store"
	for i := 0; i+len(store) <= len(event); i++ {
		if event[i]|0x20 == store[0] && strings.EqualFold(string(event[i:i+len(store)]), store) {
			return trace.Store
		}
	}
	return trace.Load
}

// latency is a weight in ns, none where it is no weight or the clock unknown.
func (p *perfScript) latency(weight []byte) int64 {
	cycles, end, ok := decimal(weight, 0)
	if !ok || end < len(weight) || cycles == 0 || p.cyclesPerNS == 0 {
		return none
	}
	ns := math.Round(float64(cycles) / p.cyclesPerNS)
	if ns >= math.MaxInt64 {
		return none
	}
	return int64(ns)
}
