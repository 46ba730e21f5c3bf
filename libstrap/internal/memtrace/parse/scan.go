// Finds blanks, tokens and numbers in the bytes of a line.

package parse

import (
	"math"
	"strings"
	"unicode/utf8"
)

// This file has the classes of bytes, and the functions that read the numbers of all formats. A
// function that finds no number returns the position that it was given, and false.

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

// spaceEnd returns where the blanks from i on end.
func spaceEnd(b []byte, i int) int {
	for i < len(b) && class[b[i]]&isSpace != 0 {
		i++
	}
	return i
}

// tokenEnd returns where the bytes from i on that are not blanks end.
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

// maxDigits is the largest number of decimal digits that always fits an int64.
const maxDigits = 18

// decimal reads 1 to 18 decimal digits.
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

// hexadecimal reads hexadecimal digits of either case. The value has to fit 64 bits.
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

// seconds reads seconds with a decimal fraction, and returns ns. It cuts off the digits behind the
// ninth.
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

// validUTF8 replaces each run of bytes that are not valid UTF-8 by U+FFFD.
func validUTF8(s string) string {
	if utf8.ValidString(s) {
		return s
	}
	return strings.ToValidUTF8(s, "\uFFFD")
}
