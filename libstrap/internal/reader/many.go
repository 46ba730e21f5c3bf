// Decodes many packets in one call.

package reader

import (
	"io"
	"runtime/debug"
	"sync"
	"sync/atomic"

	"github.com/libstrap/strap/libstrap/internal/codec"
	"github.com/libstrap/strap/libstrap/internal/crc32c"
	"github.com/libstrap/strap/libstrap/internal/procs"
	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

const (
	// batchRows is how many rows get their places in dst before they are decoded.
	batchRows = 1 << 12
	// spanBytes is the most bytes of the file that are read at once for several packets.
	spanBytes = 64 << 10
	// spanGap is the most bytes of other packets between two packets that are read at once.
	spanGap = 4 << 10
	// aloneBytes is the least number of bytes for which a second goroutine is started.
	aloneBytes = 64 << 10
	// shareBytes is the least number of decoded bytes of a share of a packet.
	shareBytes = 1 << 20
	// blockBytes is about what a codec's block decodes to. A range may need two blocks.
	blockBytes = 128 << 10
)

// ReadMany decodes the packets of rows into dst, in this order. The bytes of each packet begin at the next
// multiple of align, a power of two, behind the bytes of the packet before. ends[k] is the end of the bytes
// of rows[k] in dst. ReadMany stops before the first packet that has no room in dst. done is how many
// packets it decoded. It uses as many goroutines as there are processors.
//
// The error is the error of ReadInto or DecodedLen for rows[0]. If a later row has an error, ReadMany stops
// before that row.
func (r *Reader) ReadMany(rows []uint64, align int, dst []byte, ends []uint64) (done int, err error) {
	if align < 1 || align&(align-1) != 0 {
		return 0, status.New(status.InvalidArgument, "alignment = %d: give a power of two", align)
	}
	pieces := layouts.Get().(*[]piece)
	defer layouts.Put(pieces)
	used := 0
	for done < len(rows) {
		some := rows[done:min(len(rows), done+batchRows)]
		var full bool
		*pieces, full, err = r.lay((*pieces)[:0], some, align, dst, &used)
		decoded, failed := r.decodeAll(*pieces)
		for k, p := range (*pieces)[:decoded] {
			ends[done+k] = p.end
		}
		clear(*pieces) // they refer to dst
		done += decoded
		switch {
		case failed != nil:
			err = failed
		case err == nil && !full:
			continue
		}
		break
	}
	if done > 0 {
		err = nil
	}
	return done, err
}

var layouts = sync.Pool{New: func() any {
	pieces := make([]piece, 0, batchRows)
	return &pieces
}}

// stretches has buffers: spanBytes for a stretch of the file, spanBytes for a decoded packet.
var stretches = sync.Pool{New: func() any {
	b := make([]byte, 2*spanBytes)
	return &b
}}

// piece is a packet to decode, and where its bytes go.
type piece struct {
	row     int
	at      int64 // of the packet in the file; -1: ReadInto or readParts reads it
	size    int   // of the whole packet in the file
	decoded int64 // bytes that the packet decodes to
	to      []byte
	end     uint64       // of to in dst, for ReadMany
	parts   []codec.Part // in place of to: some of the bytes
	number  int          // of the first range, for ReadRanges
}

// lay gives rows their places in dst, behind used. full reports whether dst has no room for the next row.
// The error is of the row after the last piece.
func (r *Reader) lay(pieces []piece, rows []uint64, align int, dst []byte, used *int) (_ []piece, full bool, err error) {
	for _, row := range rows {
		p, err := r.piece(row)
		if err != nil {
			return pieces, false, err
		}
		from := (*used + align - 1) &^ (align - 1)
		if from > len(dst) || p.decoded > int64(len(dst)-from) {
			return pieces, true, nil
		}
		*used = from + int(p.decoded)
		p.end, p.to = uint64(*used), dst[from:*used:*used]
		pieces = append(pieces, p)
	}
	return pieces, false, nil
}

// piece finds the packet of a row and the length of its decoded bytes.
func (r *Reader) piece(row uint64) (piece, error) {
	if row >= uint64(r.NumRows()) {
		return piece{}, status.New(status.NotFound, "row %d of %q, which has %d", row, r.path, r.NumRows())
	}
	p := piece{row: int(row), at: -1}
	at, scanned, err := r.find(p.row)
	if err != nil {
		return p, err
	}
	if !scanned {
		offset, length, size, known := r.idx.Plain(at)
		if known {
			if p.decoded = size; length <= spanBytes {
				p.at, p.size = offset, int(length)
			}
			return p, nil
		}
	}
	p.decoded, err = r.DecodedLen(p.row)
	return p, err
}

// decodeAll decodes pieces. It returns how many pieces before the first error it decoded, and this error.
func (r *Reader) decodeAll(pieces []piece) (decoded int, err error) {
	spans, work := spansOf(pieces)
	tasks := r.tasksOf(pieces, spans)
	var next, least atomic.Int64
	least.Store(int64(len(pieces)))
	var mu sync.Mutex
	fail := func(k int, e error) {
		mu.Lock()
		defer mu.Unlock()
		if int64(k) < least.Load() {
			least.Store(int64(k))
			err = e
		}
	}
	worker := func() {
		at := -1
		defer func() {
			if p := recover(); p != nil {
				fail(max(at, 0), status.New(status.Internal, "panic: %v\n%s", p, debug.Stack()))
			}
		}()
		buf := stretches.Get().(*[]byte)
		defer stretches.Put(buf)
		for {
			n := int(next.Add(1)) - 1
			if n >= len(tasks) || int64(tasks[n].first) > least.Load() {
				return
			}
			t := tasks[n]
			at = t.first
			if k, e := r.do(t, pieces, *buf); e != nil {
				fail(k, e)
			}
		}
	}
	var others sync.WaitGroup
	for range min(procs.Count, len(tasks), 1+work/aloneBytes) - 1 {
		others.Go(worker)
	}
	worker()
	others.Wait()
	r.f.Used()
	return int(least.Load()), err
}

// task is a span, or one share of the packet of pieces[first].
type task struct {
	span
	*divided
	share int
}

// divided is a packet that is decoded in shares.
type divided struct {
	packet packet
	shares *codec.Shares
	left   atomic.Int32 // shares that are not yet decoded
	failed atomic.Bool
}

// tasksOf returns the tasks that decode spans. The packets at the end, one for each processor, are divided
// if they are large, so that all processors have work until the end.
func (r *Reader) tasksOf(pieces []piece, spans []span) []task {
	tasks := make([]task, 0, len(spans))
	for n, s := range spans {
		if procs.Count > 1 && n >= len(spans)-procs.Count {
			if d := r.divide(&pieces[s.first]); d != nil {
				for share := range d.shares.Len() {
					tasks = append(tasks, task{s, d, share})
				}
				continue
			}
		}
		tasks = append(tasks, task{span: s})
	}
	return tasks
}

// divide divides the packet of a piece. It returns nil if little of it is needed, or if it cannot be divided.
func (r *Reader) divide(p *piece) *divided {
	if p.needed() < 2*shareBytes {
		return nil
	}
	d := &divided{}
	var err error
	if d.packet, err = r.packet(p.row); err != nil {
		return nil
	}
	parts := p.parts
	if parts == nil {
		parts = []codec.Part{{To: p.to}}
	}
	payload := io.NewSectionReader(r.f, d.packet.PayloadOffset, int64(d.packet.PayloadLen))
	var ok bool
	if d.shares, ok = codec.Divide(parts, d.packet.kind, payload, payload.Size(), p.decoded, shareBytes); !ok {
		return nil
	}
	d.left.Store(int32(d.shares.Len()))
	return d
}

// needed returns about how many bytes must be decoded for a piece.
func (p *piece) needed() int64 {
	if p.parts == nil {
		return p.decoded
	}
	bytes := 2 * blockBytes * int64(len(p.parts))
	for _, part := range p.parts {
		bytes += int64(len(part.To))
	}
	return min(bytes, p.decoded)
}

// do does a task. If it fails, failed is the piece. A packet of which a share fails, or whose checksum is
// wrong, is decoded again as a whole, which gives the error.
func (r *Reader) do(t task, pieces []piece, buf []byte) (failed int, err error) {
	if t.divided == nil {
		return r.decodeSpan(pieces[t.first:t.last], t.first, buf)
	}
	if t.shares.Decode(t.share) != nil {
		t.failed.Store(true)
	}
	if t.left.Add(-1) > 0 {
		return 0, nil
	}
	sum, whole := t.shares.Sum()
	if t.failed.Load() || whole && t.packet.hasCRC && sum != t.packet.crc {
		return r.decodeSpan(pieces[t.first:t.last], t.first, buf)
	}
	return 0, nil
}

// span is pieces[first:last], which are read at once.
type span struct{ first, last int }

// spansOf groups pieces that follow each other closely in the file. work is the number of decoded bytes.
func spansOf(pieces []piece) (spans []span, work int) {
	spans = make([]span, 0, 16)
	for k, p := range pieces {
		work += int(p.decoded)
		if k > 0 && p.at >= 0 {
			s := &spans[len(spans)-1]
			first, before := pieces[s.first], pieces[k-1]
			end := before.at + int64(before.size)
			if before.at >= 0 && p.at >= end && p.at-end <= spanGap && p.at+int64(p.size)-first.at <= spanBytes {
				s.last = k + 1
				continue
			}
		}
		spans = append(spans, span{k, k + 1})
	}
	return spans, work
}

// decodeSpan decodes the pieces of one span. first is the number of the first piece. If decodeQuick cannot
// decode a piece, ReadInto decodes it or returns the error. A short packet of which only parts are needed is
// decoded to the second half of buf.
func (r *Reader) decodeSpan(pieces []piece, first int, buf []byte) (failed int, err error) {
	read := false
	from := pieces[0].at
	if from >= 0 {
		last := pieces[len(pieces)-1]
		length := int(last.at - from + int64(last.size))
		_, err := r.f.ReadAt(buf[:length], from)
		read = err == nil
	}
	for k, p := range pieces {
		if p.parts != nil {
			if p.decoded > spanBytes {
				if err := r.readParts(p.row, p.decoded, p.parts); err != nil {
					return first + k, err
				}
				continue
			}
			p.to = buf[spanBytes:][:p.decoded]
		}
		if !read || !r.decodeQuick(&p, buf[p.at-from:][:p.size]) {
			if err := r.ReadInto(p.row, p.to); err != nil {
				return first + k, err
			}
		}
		for _, part := range p.parts {
			copy(part.To, p.to[part.First:])
		}
	}
	return 0, nil
}

// decodeQuick decodes a packet of the index that is in memory. If it returns false, the packet can still be
// valid.
func (r *Reader) decodeQuick(p *piece, b []byte) bool {
	at, _, err := r.find(p.row)
	if err != nil || len(b) < wire.HeaderSize {
		return false
	}
	n, d := wire.Header(b)
	if int64(len(b)) != wire.HeaderSize+int64(n)+int64(d) || !r.idx.HasName(at, b[wire.HeaderSize:][:n]) {
		return false
	}
	payload := b[wire.HeaderSize+n:]
	if crc, known := r.idx.CRC(at); known && crc != crc32c.Checksum(payload) {
		return false
	}
	kind, err := codec.ParseKind(r.idx.Codec(at))
	return err == nil && codec.DecodeSmall(p.to, kind, payload)
}
