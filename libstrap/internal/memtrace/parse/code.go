package parse

import "bytes"

// code is the place in the program that made an access, and what perf prints
// between the address and it.
type code struct {
	numbers     int    // columns of numbers before the symbol
	first, last []byte // of them
	symbol      []byte
	dso         []byte
	onlyNumbers bool // there is nothing else
	numberFirst bool // a number comes before the first symbol, and behind that its dso
}

var (
	inlined      = []byte("inlined")
	offset       = []byte("+0x")
	notAvailable = []byte("N/A")
)

// codeOf reads what stands behind an address (and a data source):
//
//	[weight ...] [ip] sym[+0xoff] (dso) [phys_addr ...]   today's perf
//	sym[+0xoff] (dso) ip sym[+0xoff] (dso)                perf over page faults
//	sym[+off] [dso]                                       as documented
//
// Of two symbols, the address's and the instruction's, the latter counts. The
// parentheses around the dso are perf's and left out. Where no symbol stands
// behind the last number, the ip, that is the symbol.
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

// behindAddress leaves out the symbol and dso of the address, if they are there:
// an ip stands behind them.
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

// symbolEnd is where a symbol ends that has no parentheses behind it: at its
// offset (symbols of C++ have blanks) or at the first blank.
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

// skipNumbers counts the columns of numbers that text begins with, and gives what
// stands behind them.
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

// columnWidth is that of perf's columns of numbers, which are aligned right.
const columnWidth = 16

// number finds the end of the token at start if it is a number: hexadecimal
// digits that begin with a decimal one or fill the column that begins at left.
// (A symbol may be "add".) Otherwise -1.
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

// dsoOf finds the parentheses around the dso: the last ones, where a blank or
// nothing stands before them and only numbers behind. -1 if there are none.
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

// onlyColumns tells whether there is nothing but what perf prints behind the dso:
// a physical address, and page sizes such as 4K or N/A.
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

// hexStart is where the hexadecimal digits at the end of text start.
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
