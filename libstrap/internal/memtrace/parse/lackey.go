// Parses the accesses that Valgrind's lackey prints.

package parse

import "github.com/libstrap/strap/libstrap/internal/memtrace/trace"

// InstructionSymbol is the symbol of rows that are instruction fetches.
const InstructionSymbol = "[instruction]"

// lackey reads the accesses that Valgrind's lackey prints:
//
//	I  04016b70,3    an instruction fetch
//	 L 1fff000678,8  a load; S: a store; M: a load and then a store
//
// Addresses are hexadecimal, sizes are decimal and in bytes. lackey prints no times, so the
// timestamp of a row is its number in the trace: it gives the order and nothing else. lackey
// prints no symbol, thread or cpu either. The lines of Valgrind itself, ==pid== and --pid--, and
// superblocks (SB) are skipped.
type lackey struct{ instructions bool }

func (p *lackey) begin() {}

func (p *lackey) line(text []byte, out *rows) verdict {
	if len(text) < 4 || text[2] != ' ' {
		return p.other(text)
	}
	w := row{level: noLevel, latency: none, cpu: none, thread: none}
	var modify bool
	switch string(text[:2]) {
	case " L":
	case " S":
		w.op = trace.Store
	case " M":
		modify = true
	case "I ":
		w.symbol = []byte(InstructionSymbol)
	default:
		return p.other(text)
	}
	var end int
	var ok bool
	if w.address, end, ok = hexadecimal(text, 3); !ok || end >= len(text) || text[end] != ',' {
		return malformed
	}
	if w.length, end, ok = decimal(text, end+1); !ok || !blank(text[end:]) {
		return malformed
	}
	if w.length == 0 || w.length > trace.MostLength || uint64(w.length-1) > ^w.address { // past the end of memory
		return malformed
	}
	if w.symbol != nil && !p.instructions {
		return skipped
	}
	out.add(&w)
	if modify {
		w.op = trace.Store
		out.add(&w)
	}
	return accepted
}

func (p *lackey) other(text []byte) verdict {
	if blank(text) || len(text) > 2 && (text[0] == '=' && text[1] == '=' || text[0] == '-' && text[1] == '-' || string(text[:3]) == "SB ") {
		return skipped
	}
	return malformed
}
