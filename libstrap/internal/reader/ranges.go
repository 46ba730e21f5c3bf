// Decodes ranges of packets.

package reader

import (
	"cmp"
	"errors"
	"io"
	"slices"

	"github.com/libstrap/strap/libstrap/internal/codec"
	"github.com/libstrap/strap/libstrap/internal/status"
)

// batchRanges is how many ranges are grouped by their packets before they are decoded.
const batchRanges = 1 << 16

// Range is a range of the decoded bytes of a packet, and where they go. It has the layout of strap_range.
type Range struct {
	Row   uint64
	First uint64 // of the packet's decoded bytes
	Bytes uint64
	To    uint64 // place of the first byte in dst
}

// ReadRanges decodes ranges of packets into dst. done is how many ranges it decoded. It decodes each packet
// once for all its ranges among 65,536 ranges, and no more of it than DecodeParts of package codec needs. It
// uses as many goroutines as there are processors. Ranges that overlap in dst get the bytes of either one.
//
// The checksum of a packet is compared if all of its payload is read. This is so if its ranges together are
// the whole packet, or half of a raw one, or if it decodes to at most 64 KiB.
//
// The error is that of ranges[0]: InvalidArgument if the range reaches outside its packet or dst, and the
// errors of ReadInto. If a packet cannot be decoded, all its ranges among the 65,536 have its error. If a later range
// has an error, ReadRanges stops before that range.
func (r *Reader) ReadRanges(ranges []Range, dst []byte) (done int, err error) {
	for done < len(ranges) {
		some := ranges[done:min(len(ranges), done+batchRanges)]
		pieces, laid, failed := r.layRanges(some, dst)
		decoded, err := r.decodeAll(pieces)
		if err != nil {
			laid, failed = pieces[decoded].number, err
		}
		done += laid
		switch {
		case laid == len(some):
			continue
		case done > 0:
			failed = nil
		}
		return done, failed
	}
	return done, nil
}

// layRanges groups ranges by their packets. It returns a piece for each packet, in the order of their first
// ranges. laid is how many ranges are in pieces. The error is of the range after them.
func (r *Reader) layRanges(ranges []Range, dst []byte) (pieces []piece, laid int, err error) {
	of := map[uint64]int{} // the piece of each row
	k := 0
	for laid < len(ranges) {
		one := ranges[laid]
		if len(pieces) == 0 || uint64(pieces[k].row) != one.Row {
			var known bool
			if k, known = of[one.Row]; !known {
				var p piece
				if p, err = r.piece(one.Row); err != nil {
					break
				}
				p.number, k = laid, len(pieces)
				of[one.Row], pieces = k, append(pieces, p)
			}
		}
		p := &pieces[k]
		size := uint64(p.decoded)
		if one.First > size || one.Bytes > size-one.First {
			err = status.New(status.InvalidArgument, "row = %d, first = %d, bytes = %d: the packet has %d bytes",
				one.Row, one.First, one.Bytes, size)
			break
		}
		if one.To > uint64(len(dst)) || one.Bytes > uint64(len(dst))-one.To {
			err = status.New(status.InvalidArgument, "to = %d, bytes = %d: there is room for %d bytes",
				one.To, one.Bytes, len(dst))
			break
		}
		laid++
		// Ranges that continue this one join it.
		n, most := one.Bytes, min(size-one.First, uint64(len(dst))-one.To)
		for ; laid < len(ranges); laid++ {
			next := &ranges[laid]
			if next.Row != one.Row || next.First != one.First+n || next.To != one.To+n || next.Bytes > most-n {
				break
			}
			n += next.Bytes
		}
		if n > 0 {
			p.parts = append(p.parts, codec.Part{First: int64(one.First), To: dst[one.To:][:n]})
		}
	}
	pieces = slices.DeleteFunc(pieces, func(p piece) bool { return len(p.parts) == 0 })
	for k := range pieces {
		pieces[k].arrange()
	}
	return pieces, laid, err
}

// arrange sorts the parts. A part that is the whole packet becomes p.to. Parts of a packet that decodes to
// more than spanBytes are left to readParts.
func (p *piece) arrange() {
	slices.SortFunc(p.parts, func(a, b codec.Part) int { return cmp.Compare(a.First, b.First) })
	if one := p.parts[0]; len(p.parts) == 1 && int64(len(one.To)) == p.decoded {
		p.to, p.parts = one.To, nil
	} else if p.decoded > spanBytes {
		p.at = -1
	}
}

// readParts decodes parts of the packet of row i. size is the packet's decoded length.
func (r *Reader) readParts(i int, size int64, parts []codec.Part) error {
	p, err := r.packet(i)
	if err != nil {
		return err
	}
	src := &section{SectionReader: *io.NewSectionReader(r.f, p.PayloadOffset, int64(p.PayloadLen))}
	sum, whole, err := codec.DecodeParts(parts, p.kind, src, int64(p.PayloadLen), size)
	return r.verdict(&p, src.err, whole, sum, err)
}

// section is a payload. It keeps the file's error, because a codec may hide it.
type section struct {
	io.SectionReader
	err error
}

func (s *section) ReadAt(b []byte, at int64) (int, error) {
	n, err := s.SectionReader.ReadAt(b, at)
	if err != nil && !errors.Is(err, io.EOF) {
		s.err = err
	}
	return n, err
}
