// Cuts a text into blocks of whole lines, and parses the lines of a block.

package parse

import (
	"bytes"
	"io"
	"unicode/utf8"

	"github.com/libstrap/strap/libstrap/internal/status"
)

const (
	// maxLine is the longest line, in bytes, that can be a sample.
	maxLine = 1 << 20
	// blockSize is the size of a block. It exceeds maxLine, so that each line that can be a
	// sample fits a block.
	blockSize = 2 << 20
)

// block holds a run of whole lines, and the result of parsing them.
type block struct {
	buffer []byte // text is its beginning
	text   []byte // the last line may lack its line end
	bytes  int64  // bytes of the input that the block covers

	parsed  chan struct{} // closed once the fields below are set
	err     error
	rows    *rows
	lines   int64
	skipped int64

	unaddressed int64

	malformed int64
	samples   []Sample // their line numbers start at 1 in each block
}

// parse parses the lines of the block. expected is an estimate of the number of rows.
func (b *block) parse(p parser, expected int) {
	b.rows = newRows(expected)
	p.begin()
	for text := b.text; len(text) > 0; {
		line := text
		if end := bytes.IndexByte(text, '\n'); end >= 0 {
			line, text = text[:end], text[end+1:]
		} else {
			text = nil
		}
		b.lines++
		what := malformed
		if len(line) <= maxLine {
			if n := len(line); n > 0 && line[n-1] == '\r' {
				line = line[:n-1]
			}
			what = p.line(line, b.rows)
		}
		switch what {
		case skipped:
			b.skipped++
		case unaddressed:
			b.unaddressed++
		case malformed:
			b.malformed++
			if len(b.samples) < maxSamples {
				b.samples = append(b.samples, Sample{Line: b.lines, Text: sampleText(line)})
			}
		}
	}
	b.rows.symbol.seal()
	b.rows.dso.seal()
}

// sampleText returns the beginning of a line as valid UTF-8, at most maxSampleText bytes.
func sampleText(line []byte) string {
	text := validUTF8(string(line[:min(len(line), maxSampleText)]))
	end := min(len(text), maxSampleText)
	for end < len(text) && !utf8.RuneStart(text[end]) {
		end--
	}
	return text[:end]
}

// blockReader cuts a stream into blocks.
type blockReader struct {
	in   io.Reader
	rest []byte // read, but left for the next block
	end  bool
}

// next returns the next block, or nil at the end. It reads into buffer if buffer is large enough.
// No other block may use buffer.
func (r *blockReader) next(buffer []byte) (*block, error) {
	if cap(buffer) < blockSize {
		buffer = make([]byte, blockSize)
	}
	buffer = buffer[:blockSize]
	n := copy(buffer, r.rest)
	r.rest = nil
	if !r.end {
		m, err := io.ReadFull(r.in, buffer[n:])
		n += m
		if err == io.EOF || err == io.ErrUnexpectedEOF {
			r.end = true
		} else if err != nil {
			return nil, status.FromOS(err, "cannot read on")
		}
	}
	if n == 0 {
		return nil, nil
	}
	text := buffer[:n]
	if !r.end {
		cut := lastStart(text)
		if cut == 0 {
			return r.overlong(buffer)
		}
		text, r.rest = text[:cut], append([]byte(nil), text[cut:]...)
	}
	return &block{buffer: buffer, text: text, bytes: int64(len(text)), parsed: make(chan struct{})}, nil
}

// lastStart returns where to cut text: at the start of the last line that does not begin with a
// tab. The lines of a call chain begin with a tab and stay with their sample. If only the first
// line begins without one, lastStart returns the end of the last whole line, or 0 if there is none.
func lastStart(text []byte) int {
	last := bytes.LastIndexByte(text, '\n') + 1
	for start := last; start > 0; start = bytes.LastIndexByte(text[:start-1], '\n') + 1 {
		if start < len(text) && text[start] != '\t' {
			return start
		}
	}
	return last
}

// overlong reads past a line that is longer than a block. The block that it returns keeps the
// first maxLine+1 bytes, so that parse finds the line too long.
func (r *blockReader) overlong(line []byte) (*block, error) {
	b := &block{buffer: line, text: line[:maxLine+1], bytes: int64(len(line)), parsed: make(chan struct{})}
	chunk := make([]byte, 64<<10)
	for {
		n, err := r.in.Read(chunk)
		if end := bytes.IndexByte(chunk[:n], '\n'); end >= 0 {
			b.bytes += int64(end) + 1
			r.rest = append([]byte(nil), chunk[end+1:n]...)
			n, end = 0, 0
			if err == nil {
				return b, nil
			}
		}
		b.bytes += int64(n)
		if err == io.EOF {
			r.end = true
			return b, nil
		}
		if err != nil {
			return nil, status.FromOS(err, "cannot read on")
		}
	}
}
