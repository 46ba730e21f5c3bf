// Writes zstd frames without match finding.

package codec

import (
	"encoding/binary"
	"io"
)

// zstd frames without match finding, RFC 8878. A block is raw, one repeated byte (RLE), or
// Huffman-coded literals without sequences, whichever is the smallest.
//
//	magic u32 | descriptor | window 0..1 | content size 1..8 | { size and type u24 | block } ...
//
// No block refers to another one. So a block is written as soon as it was read.
const (
	literalsBlock  = 128 << 10 // Block_Maximum_Size, 3.1.1.2.4, if the window is not smaller
	literalsSingle = 1 << 10   // shorter content has one Huffman stream, longer content four

	// Block_Type, 3.1.1.2.2.
	blockRaw        = 0
	blockRLE        = 1
	blockCompressed = 2

	literalsCompressed = 2 // Literals_Block_Type, 3.1.1.3.1.1
)

// literalsEncoder writes one frame after another.
type literalsEncoder struct {
	cut  cutter
	huff huffman
	w    io.Writer
	head [zstdHeaderMax]byte
}

func newLiteralsEncoder() *literalsEncoder {
	e := &literalsEncoder{huff: newHuffman()}
	e.cut.put = e.put
	return e
}

// begin writes the header of a frame of size > 0 bytes.
func (e *literalsEncoder) begin(w io.Writer, size int64) error {
	e.w = w
	e.cut.begin(literalsBlock, size)
	_, err := w.Write(appendZstdHeader(e.head[:0], size))
	return err
}

func (e *literalsEncoder) Write(b []byte) (int, error) { return e.cut.Write(b) }

func (e *literalsEncoder) Close() error { return e.cut.Close() }

// put encodes src as a block and writes it.
func (e *literalsEncoder) put(src []byte, last bool) error {
	head, data := e.encode(src, last)
	if _, err := e.w.Write(head); err != nil {
		return err
	}
	_, err := e.w.Write(data)
	return err
}

// encode returns a block's headers, and the data after them.
func (e *literalsEncoder) encode(src []byte, last bool) (head, data []byte) {
	single := len(src) < literalsSingle
	out, distinct := e.huff.compress(src, single)
	size := literalsHeaderSize(len(src)) + len(out) + 1
	switch {
	case distinct == 1:
		return appendBlockHeader(e.head[:0], blockRLE, len(src), last), src[:1]
	case out == nil || size >= len(src):
		return appendBlockHeader(e.head[:0], blockRaw, len(src), last), src
	}
	head = appendBlockHeader(e.head[:0], blockCompressed, size, last)
	head = appendLiteralsHeader(head, len(src), len(out), single)
	return head, append(out, 0) // Number_of_Sequences, 3.1.1.3.2.1
}

// appendZstdHeader appends a frame's header, 3.1.1.1. Content of at most zstdWindow bytes is a single
// segment.
func appendZstdHeader(b []byte, size int64) []byte {
	b = binary.LittleEndian.AppendUint32(b, zstdMagic)
	single := byte(0)
	if size <= zstdWindow {
		single = 1 << 5
	}
	flag := byte(3) // Frame_Content_Size_Flag
	switch {
	case size < 1<<8 && single != 0:
		flag = 0
	case size < 1<<16+256:
		flag = 1
	case size < 1<<32:
		flag = 2
	}
	b = append(b, flag<<6|single)
	if single == 0 {
		const exponent = 18 - 10 // of zstdWindow, 3.1.1.1.2
		b = append(b, exponent<<3)
	}
	switch flag {
	case 0:
		return append(b, byte(size))
	case 1:
		return binary.LittleEndian.AppendUint16(b, uint16(size-256))
	case 2:
		return binary.LittleEndian.AppendUint32(b, uint32(size))
	default:
		return binary.LittleEndian.AppendUint64(b, uint64(size))
	}
}

// appendBlockHeader appends a Block_Header, 3.1.1.2.
func appendBlockHeader(b []byte, kind, size int, last bool) []byte {
	h := size<<3 | kind<<1
	if last {
		h |= 1
	}
	return append(b, byte(h), byte(h>>8), byte(h>>16))
}

// literalsHeaderSize returns the length of the Literals_Section_Header, 3.1.1.3.1.1, of n literals that
// are compressed.
func literalsHeaderSize(n int) int {
	switch {
	case n < 1<<10:
		return 3
	case n < 1<<14:
		return 4
	default:
		return 5
	}
}

// appendLiteralsHeader appends the Literals_Section_Header of n literals. size < n is the length of
// their tree and streams.
func appendLiteralsHeader(b []byte, n, size int, single bool) []byte {
	length := literalsHeaderSize(n)
	format, width := length-2, 4*length-2 // 1, 2, 3 and 10, 14, 18 bits for each length
	if single {
		format = 0
	}
	h := uint64(literalsCompressed | format<<2 | n<<4 | size<<(4+width))
	for range length {
		b = append(b, byte(h))
		h >>= 8
	}
	return b
}
