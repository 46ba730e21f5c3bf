package parse

import (
	"math"
	"strings"
	"unicode/utf8"
)

// The bytes of a line are looked at one by one: these are the classes and the
// numbers that the formats share. A function that finds nothing leaves i alone
// and says false.

const (
	isSpace = 1 << iota
	isDigit
	isHex
)

var (
	class    [256]uint8
	hexValue [256]uint8
)

func init() {
	for _, c := range " \t\r\v\f" {
		class[c] = isSpace
	}
	for c := '0'; c <= '9'; c++ {
		class[c], hexValue[c] = isDigit|isHex, uint8(c-'0')
	}
	for c := 'a'; c <= 'f'; c++ {
		class[c], hexValue[c] = isHex, uint8(c-'a'+10)
		class[c-'a'+'A'], hexValue[c-'a'+'A'] = isHex, uint8(c-'a'+10)
	}
}

// spaceEnd is where the blanks from i on end, tokenEnd where the other bytes do.
func spaceEnd(b []byte, i int) int {
	for i < len(b) && class[b[i]]&isSpace != 0 {
		i++
	}
	return i
}

func tokenEnd(b []byte, i int) int {
	for i < len(b) && class[b[i]]&isSpace == 0 {
		i++
	}
	return i
}

func trimEnd(b []byte) []byte {
	for len(b) > 0 && class[b[len(b)-1]]&isSpace != 0 {
		b = b[:len(b)-1]
	}
	return b
}

func blank(b []byte) bool { return spaceEnd(b, 0) == len(b) }

// maxDigits fit an int64, whatever they are.
const maxDigits = 18

// decimal reads 1 to 18 digits.
func decimal(b []byte, i int) (v int64, end int, ok bool) {
	start := i
	for i < len(b) && class[b[i]]&isDigit != 0 {
		v = v*10 + int64(b[i]-'0')
		i++
	}
	if i == start || i-start > maxDigits {
		return 0, start, false
	}
	return v, i, true
}

// hexadecimal reads digits of either case that fit 64 bits.
func hexadecimal(b []byte, i int) (v uint64, end int, ok bool) {
	start := i
	for i < len(b) && class[b[i]]&isHex != 0 {
		if v>>60 != 0 {
			return 0, start, false
		}
		v = v<<4 | uint64(hexValue[b[i]])
		i++
	}
	return v, i, i > start
}

// seconds reads a decimal fraction of seconds as ns; digits behind the ninth are
// cut off.
func seconds(b []byte, i int) (ns int64, end int, ok bool) {
	whole, j, ok := decimal(b, i)
	if !ok || j >= len(b) || b[j] != '.' {
		return 0, i, false
	}
	j++
	first := j
	var fraction int64
	unit := int64(1e9)
	for j < len(b) && class[b[j]]&isDigit != 0 {
		if unit > 1 {
			unit /= 10
			fraction += int64(b[j]-'0') * unit
		}
		j++
	}
	if j == first || whole > (math.MaxInt64-fraction)/1e9 {
		return 0, i, false
	}
	return whole*1e9 + fraction, j, true
}

// validUTF8 has U+FFFD in place of bytes that are none.
func validUTF8(s string) string {
	if utf8.ValidString(s) {
		return s
	}
	return strings.ToValidUTF8(s, "\uFFFD")
}
