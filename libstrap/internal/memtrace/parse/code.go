// Reads what perf prints behind an address: numbers, and the code that made the access.

package parse

import "bytes"

// code is what perf prints behind an address: columns of numbers, and the place in the program
// that made the access.
type code struct {
	numbers     int    // columns of numbers before the symbol
	first, last []byte // of these numbers
	symbol      []byte
	dso         []byte
	onlyNumbers bool // the text is numbers and nothing else
	numberFirst bool // the text begins with a number, and a dso in parentheses follows
}

var (
	inlined      = []byte("inlined")
	offset       = []byte("+0x")
	notAvailable = []byte("N/A")
)

// codeOf reads the text behind an address, or behind its data source:
//
//	[weight ...] [ip] sym[+0xoff] (dso) [phys_addr ...]   today's perf
//	sym[+0xoff] (dso) ip sym[+0xoff] (dso)                perf over page faults
//	sym[+off] [dso]                                       as documented
//
// If perf prints two symbols, that of the address and that of the instruction, codeOf takes the
// instruction's. It leaves out the parentheses, which perf adds to the dso. If no symbol follows
// the last number, which is the ip, then the ip becomes the symbol.
func codeOf(text []byte, c *code) {
	*c = code{}
	text = c.skipNumbers(trimEnd(text))
	c.onlyNumbers = len(text) == 0 && c.numbers > 0
	if open, end := dsoOf(text); open >= 0 {
		c.numberFirst = c.numbers > 0
		c.dso = text[open+1 : end]
		if bytes.Equal(c.dso, inlined) {
			c.dso = nil
		}
		c.symbol = withoutOffset(c.behindAddress(trimEnd(text[:open])))
	} else {
		end := symbolEnd(text)
		c.symbol = withoutOffset(text[:end])
		start := spaceEnd(text, end)
		c.dso = text[start:tokenEnd(text, start)]
	}
	if len(c.symbol) == 0 {
		c.symbol = c.last
	}
}

// behindAddress cuts the symbol and dso of the address off the beginning of text. They end at a
// closing parenthesis with a number, the ip, behind it. Without them it returns text.
func (c *code) behindAddress(text []byte) []byte {
	for i := len(text); ; {
		if i = bytes.LastIndexByte(text[:i], ')'); i < 0 {
			return text
		}
		if number(text, spaceEnd(text, i+1), i+1) >= 0 {
			return c.skipNumbers(text[i+1:])
		}
	}
}

// symbolEnd returns where a symbol without a dso in parentheses ends. It ends behind its offset,
// because symbols of C++ may contain blanks. A symbol without an offset ends at the first blank.
func symbolEnd(text []byte) int {
	first := tokenEnd(text, 0)
	for end := first; ; end = tokenEnd(text, spaceEnd(text, end)) {
		if i := hexStart(text[:end]); i < end && bytes.HasSuffix(text[:i], offset) {
			return end
		}
		if end == len(text) {
			return first
		}
	}
}

// skipNumbers counts the columns of numbers at the beginning of text, and returns the text behind
// them.
func (c *code) skipNumbers(text []byte) []byte {
	for i := 0; ; {
		start := spaceEnd(text, i)
		end := number(text, start, i)
		if end < 0 {
			return text[start:]
		}
		c.last = text[start:end]
		if c.numbers == 0 {
			c.first = c.last
		}
		c.numbers++
		i = end
	}
}

// columnWidth is the width of perf's columns of numbers, which are right-aligned.
const columnWidth = 16

// number returns the end of the token at start if the token is a number, else -1. A number has
// hexadecimal digits only. It begins with a decimal digit, or it fills the column that begins at
// left; without this rule the symbol "add" would be a number.
func number(text []byte, start, left int) int {
	end := start
	for end < len(text) && class[text[end]]&isHex != 0 {
		end++
	}
	if end == start || end < len(text) && class[text[end]]&isSpace == 0 {
		return -1
	}
	if class[text[start]]&isDigit == 0 && end-left < columnWidth {
		return -1
	}
	return end
}

// dsoOf returns where the parentheses around the dso open and close, or -1 if there are none. They
// are the last pair in text. A blank or nothing stands before them, and only the columns that
// onlyColumns knows stand behind them.
func dsoOf(text []byte) (open, end int) {
	end = bytes.LastIndexByte(text, ')')
	if end < 0 || !onlyColumns(text[end+1:]) {
		return -1, -1
	}
	depth := 0
	for i := end; i >= 0; i-- {
		switch text[i] {
		case ')':
			depth++
		case '(':
			depth--
		}
		if depth == 0 {
			if i > 0 && class[text[i-1]]&isSpace == 0 {
				return -1, -1
			}
			return i, end
		}
	}
	return -1, -1
}

// onlyColumns reports whether text holds only the columns that perf prints behind the dso: a
// physical address, and page sizes such as 4K or N/A.
func onlyColumns(text []byte) bool {
	if len(text) > 0 && class[text[0]]&isSpace == 0 {
		return false
	}
	for i := spaceEnd(text, 0); i < len(text); i = spaceEnd(text, i) {
		end := tokenEnd(text, i)
		if class[text[i]]&isHex == 0 && !bytes.Equal(text[i:end], notAvailable) {
			return false
		}
		i = end
	}
	return true
}

// hexStart returns where the hexadecimal digits at the end of text start.
func hexStart(text []byte) int {
	i := len(text)
	for i > 0 && class[text[i-1]]&isHex != 0 {
		i--
	}
	return i
}

// withoutOffset cuts "+0x1f" or "+1f" off a symbol.
func withoutOffset(symbol []byte) []byte {
	i := hexStart(symbol)
	switch {
	case i == len(symbol):
		return symbol
	case bytes.HasSuffix(symbol[:i], offset):
		return symbol[:i-len(offset)]
	case i > 0 && symbol[i-1] == '+':
		return symbol[:i-1]
	default:
		return symbol
	}
}
