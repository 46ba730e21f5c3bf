// Parses the samples that perf script prints.

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
// It also reads the columns of `perf mem record`: pid/tid (the tid is the thread), no cpu, addr
// [data_src words] [weight ...] ip sym+0xoff (dso) [phys_addr ...].
//
// A sample without a data address is unaddressed. Some samples were printed without the column of
// addresses (-F +addr), so that another column stands in its place. perfScript knows them by one
// of these signs:
//
//   - nothing stands behind the event;
//   - the first column is aligned as perf aligns the ip;
//   - the words of the data source have no number before them;
//   - in one of perf's page faults, the ip and its symbol follow the first number directly, without
//     a symbol of the address between them.
//
// A weight or a physical address in the place of the address is taken for the address if there is
// no sign. Other samples have no data address because their event counts no accesses, as cpu-clock.
// An address of 0 is none either, unless the event or the data source says that there was an
// access.
//
// The data source says whether a sample is a load or a store. If it does not, or is missing, the
// sample is a store if the name of its event contains mem-store, else a load. A sample is skipped if
// its data source names neither load nor store and its address is 0: instruction sampling gives
// these samples for instructions that access no memory. A page fault with the address 0 is an access
// nevertheless.
//
// The symbol of a sample with a call chain is that of the chain's first entry. The symbol before
// the chain is that of the address. The weight, in cycles, becomes access_latency_ns if the clock
// is known. A weight of 0 means that there is none.
type perfScript struct {
	cyclesPerNS float64

	head  head
	code  code
	chain bool // the next line may begin a call chain with the symbol of the last row
}

func (p *perfScript) begin() { p.chain = false }

func (p *perfScript) line(text []byte, out *rows) verdict {
	if what := headOf(text, &p.head); what != accepted {
		return p.other(text, what, out)
	}
	return p.sample(out)
}

// sample reads the text behind the head.
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
	known := false // whether the data source says what the access was
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
	p.chain = c.numbers == 0 || c.onlyNumbers // without an ip, a symbol may be that of the address
	out.add(&w)
	return accepted
}

// isIPEnd reports whether the first column behind the event is perf's ip. end is where the column
// ends, counted from the colon of the event. perf prints the ip behind two blanks, with a width of
// 16. It prints an address behind one blank, so that an address ends one byte earlier. Flags may
// stand before the ip (-F +flags, since perf 4.10). Those of a sample that is no branch are blanks:
// 24 of them, or 22 from an older perf.
func isIPEnd(end int) bool {
	const ipEnd = 2 + columnWidth
	return end == ipEnd || end == ipEnd+24 || end == ipEnd+22
}

// eventName returns the name of an event, without the period before it and the modifiers behind it.
func eventName(event []byte) []byte {
	name := event[bytes.LastIndexByte(event, ' ')+1:]
	if modifier := bytes.IndexByte(name, ':'); modifier >= 0 {
		name = name[:modifier]
	}
	return name
}

// faults reports whether an event is one of perf's software events of page faults. If perf prints
// symbols, it prints one for the address of these events too, at least [unknown]. So a number is
// not the address if the ip follows it directly.
func faults(event []byte) bool {
	switch string(eventName(event)) {
	case "page-faults", "faults", "minor-faults", "major-faults":
		return true
	}
	return false
}

// countsOther reports whether an event of perf counts something other than accesses to memory.
// Events of AMD's IBS may have one of these names too (cycles:P). So sample calls countsOther only
// if the data source names neither load nor store.
func countsOther(event []byte) bool {
	switch string(eventName(event)) {
	case "cpu-clock", "task-clock", "cycles", "cpu-cycles", "instructions", "branches",
		"context-switches", "cpu-migrations":
		return true
	}
	return false
}

// accesses reports whether each sample of an event is an access, also a sample with the address 0.
func accesses(event []byte) bool {
	name := bytes.ToLower(event)
	return bytes.Contains(name, []byte("mem-load")) || bytes.Contains(name, []byte("mem-store")) || bytes.Contains(name, fault)
}

// other reads a line that is no sample. If it is the first line of a call chain, the last row gets
// its symbol and dso from it.
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

// onlyNumbers reports whether a line is blank, or holds only a physical address and page sizes.
// perf prints these on a line of their own behind a call chain.
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

// pageSize reports whether a token is a page size, as 4K, 2M or 1G, or N/A.
func pageSize(token []byte) bool {
	_, end, ok := decimal(token, 0)
	return ok && end == len(token)-1 && bytes.IndexByte(units, token[end]) >= 0 || bytes.Equal(token, notAvailable)
}

var units = []byte("KMG")

// opOfEvent returns Store if the event contains mem-store, in upper or lower case, else Load.
func opOfEvent(event []byte) trace.Op {
	const store = "mem-store"
	for i := 0; i+len(store) <= len(event); i++ {
		if event[i]|0x20 == store[0] && strings.EqualFold(string(event[i:i+len(store)]), store) {
			return trace.Store
		}
	}
	return trace.Load
}

// latency converts a weight in cycles to ns. It returns none if weight is 0 or not decimal, the
// clock is unknown, or the result does not fit.
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
