// Finds the intact packets that the index lists, also where they have moved.

package salvage

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"sort"

	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// listed is a packet that the index lists.
type listed struct {
	row    int
	offset int64 // offset in the index
	length int64
	at     int64 // offset where it was found, or missing
	reason string
}

const missing = -1

// found is an intact packet of the source.
type found struct {
	at, end  int64
	k        int // number among the listed packets, or unlistedPacket
	repaired bool
	payload  int64 // offset of the payload
	name     string
}

const (
	unlistedPacket = -1
	magicSize      = 4
)

// locate finds the intact packets, in the order of the file.
func (s *salvage) locate() ([]found, error) {
	if s.idx != nil {
		all, err := s.listed()
		if err != nil {
			return nil, err
		}
		if all != nil {
			return s.withUnlisted(all)
		}
	}
	s.idx, s.rows = nil, nil
	return s.withUnlisted(nil)
}

// listed finds the packets of the index: at their offsets, then wherever they have moved to, then
// the packets that have only a damaged header. It returns nil if the index does not belong to this
// stream.
func (s *salvage) listed() ([]found, error) {
	s.idx.Extents(func(row int, offset, end int64) bool {
		s.rows = append(s.rows, listed{row: row, offset: offset, length: end - offset, at: missing})
		return true
	})
	all, contradicted, err := s.inPlace()
	if err != nil {
		return nil, err
	}
	if len(all) < len(s.rows) {
		moved, err := s.moved(all)
		if err != nil {
			return nil, err
		}
		all = merge(all, moved)
	}
	switch {
	case len(s.rows) == 0:
		return []found{}, nil
	case len(all) == 0:
		s.problem("the index is ignored: no packet of the stream agrees with it")
		return nil, nil
	case contradicted > 8*len(all):
		s.problem("the index is ignored: %d packets of the stream agree with it, %d have the same names and lengths and other values",
			len(all), contradicted)
		return nil, nil
	}
	repaired, err := s.repairable(all)
	if err != nil {
		return nil, err
	}
	return merge(all, repaired), nil
}

func merge(a, b []found) []found {
	all := append(a, b...)
	slices.SortFunc(all, func(a, b found) int { return cmp.Compare(a.at, b.at) })
	return all
}

// inPlace finds the packets that are at their offsets. contradicted is how many packets have their header
// there, but another payload.
func (s *salvage) inPlace() (all []found, contradicted int, err error) {
	end := int64(0)
	for k := range s.rows {
		r := &s.rows[k]
		if r.offset < end {
			r.reason = "the index has another packet there"
			continue
		}
		if r.length > math.MaxInt64-r.offset {
			r.reason = fmt.Sprintf("the index claims a packet of %d bytes", r.length)
			continue
		}
		end = r.offset + r.length
		w := s.idx.Row(r.row)
		name := w.Name()
		payload := r.offset + wire.HeaderSize + int64(len(name))
		switch {
		case payload > end || len(name) > wire.MaxName || end-payload > wire.MaxPayload:
			r.reason = fmt.Sprintf("the index claims a packet of %d bytes", r.length)
			continue
		case end > s.size:
			r.reason = fmt.Sprintf("the stream has %d bytes", s.size)
			continue
		}
		same, err := s.hasHeader(r.offset, name, uint32(end-payload))
		if err != nil {
			return nil, 0, err
		}
		if !same {
			r.reason = "another header stands there"
			continue
		}
		if want, known := s.idx.CRC(r.row); known {
			got, err := s.sum(payload, end-payload, nil)
			if err != nil {
				return nil, 0, err
			}
			if got != want {
				contradicted++
				r.reason = wrongSum(got, want)
				continue
			}
		}
		r.at = r.offset
		all = append(all, found{at: r.offset, end: end, k: k, payload: payload})
	}
	return all, contradicted, nil
}

func wrongSum(got, want uint32) string {
	return fmt.Sprintf("its payload has checksum %08x, the index says %08x", got, want)
}

// hasHeader reports whether this header and name are at an offset.
func (s *salvage) hasHeader(at int64, name string, payloadLen uint32) (bool, error) {
	b := make([]byte, wire.HeaderSize+len(name))
	if _, err := s.ReadAt(b, at); err != nil {
		return false, err
	}
	n, d := wire.Header(b)
	return n == len(name) && d == payloadLen && string(b[wire.HeaderSize:]) == name, nil
}

// stretches calls fn with each range [from, to) in which no packet was found. before and behind are by how
// much the packets before and behind the range have moved.
func (s *salvage) stretches(all []found, fn func(from, to, before, behind int64) error) error {
	from, before := int64(0), int64(0)
	for _, f := range all {
		moved := before
		if f.k != unlistedPacket {
			moved = f.at - s.rows[f.k].offset
		}
		if f.at > from {
			if err := fn(from, f.at, before, moved); err != nil {
				return err
			}
		}
		from, before = max(from, f.end), moved
	}
	if from < s.size {
		return fn(from, s.size, before, before)
	}
	return nil
}

// mover looks for the packets that are not at their offsets: by their headers, at each byte of the other
// ranges.
type mover struct {
	*salvage
	wanted   map[uint64]map[identity][]int // missing packets, by the 48 bits of their headers
	filter   [1 << 10]uint64               // bit set of the headers' hashes
	patience int64                         // bytes of wrong candidates that may still be read
	all      []found
}

// identity distinguishes packets with the same header.
type identity struct {
	name string
	sum  uint32
}

// headerHash returns one of 65,536 values.
func headerHash(header uint64) uint64 { return header * 0x9E3779B97F4A7C15 >> 48 }

func (s *salvage) moved(all []found) ([]found, error) {
	m := mover{salvage: s, wanted: map[uint64]map[identity][]int{}, patience: s.allowance}
	for k := range s.rows {
		if s.rows[k].at == missing {
			m.want(k)
		}
	}
	if len(m.wanted) == 0 {
		return nil, nil
	}
	err := s.stretches(all, func(from, to, before, _ int64) error {
		s.ahead += to - from
		return m.search(from, to, before)
	})
	return m.all, err
}

func (m *mover) want(k int) {
	r := &m.rows[k]
	sum, known := m.idx.CRC(r.row)
	w := m.idx.Row(r.row)
	name := w.Name()
	d := r.length - int64(wire.HeaderSize+len(name))
	if !known || len(name) > wire.MaxName || d < 0 || d > wire.MaxPayload {
		return
	}
	h := uint64(len(name))<<32 | uint64(d)
	if m.wanted[h] == nil {
		m.wanted[h] = map[identity][]int{}
		m.filter[headerHash(h)/64] |= 1 << (headerHash(h) % 64)
	}
	id := identity{name, sum}
	m.wanted[h][id] = append(m.wanted[h][id], k)
	// A packet of this name is missing, so look at the payload.
	if id.sum = 0; m.wanted[h][id] == nil {
		m.wanted[h][id] = []int{}
	}
}

// search looks at each byte of a range. shift is by how much the packet before the range has moved.
func (m *mover) search(from, to, shift int64) error {
	w := byteWindow{s: m.salvage, to: to}
	for at := from; to-at >= wire.HeaderSize; at++ {
		b, err := w.from(at)
		if err != nil {
			return err
		}
		h := uint64(binary.BigEndian.Uint16(b))<<32 | uint64(binary.BigEndian.Uint32(b[2:]))
		if hash := headerHash(h); m.filter[hash/64]&(1<<(hash%64)) == 0 {
			continue
		}
		f, ok, err := m.try(at, to, h, shift)
		if err != nil {
			return err
		}
		if ok {
			m.all = append(m.all, f)
			at, shift = f.end-1, f.at-m.rows[f.k].offset
		}
	}
	return nil
}

// try looks for a missing packet at an offset.
func (m *mover) try(at, to int64, header uint64, shift int64) (f found, ok bool, err error) {
	wanted := m.wanted[header]
	n, d := int64(header>>32), int64(uint32(header))
	payload := at + wire.HeaderSize + n
	end := payload + d
	if len(wanted) == 0 || end > to || m.patience < 0 {
		return f, false, nil
	}
	name := make([]byte, n)
	if _, err := m.ReadAt(name, at+wire.HeaderSize); err != nil {
		return f, false, err
	}
	if _, some := wanted[identity{name: string(name)}]; !some {
		m.patience -= n + 1
		return f, false, nil
	}
	sum, err := m.sum(payload, d, nil)
	if err != nil {
		return f, false, err
	}
	id := identity{string(name), sum}
	same := wanted[id]
	if len(same) == 0 {
		m.patience -= d + 1
		return f, false, nil
	}
	// If several packets have this content, take the one that belongs here, or the first that is missing.
	i := sort.Search(len(same), func(i int) bool { return m.rows[same[i]].offset+shift >= at })
	if i == len(same) || m.rows[same[i]].offset+shift != at || m.rows[same[i]].at != missing {
		i = 0
	}
	k := same[i]
	m.rows[k].at = at
	for len(same) > 0 && m.rows[same[0]].at != missing {
		same = same[1:]
	}
	wanted[id] = same
	return found{at: at, end: end, k: k, payload: payload}, true, nil
}

// repairable finds the missing packets that have only a damaged header. It looks where they would
// be if they had moved as far as the packets before or after them.
func (s *salvage) repairable(all []found) (repaired []found, err error) {
	const least = 4 // bytes of payload; with fewer bytes the checksum proves little
	last, shifts, patience := int64(0), s.shifts(), s.allowance
	for k := range s.rows {
		if patience < 0 {
			break
		}
		r := &s.rows[k]
		want, known := s.idx.CRC(r.row)
		w := s.idx.Row(r.row)
		n := int64(len(w.Name()))
		if r.at != missing || !known || n > wire.MaxName || r.length < wire.HeaderSize+n+least {
			continue
		}
		for i, shift := range shifts[k] {
			if i > 0 && shift == shifts[k][0] {
				break
			}
			at := r.offset + shift
			end := at + r.length
			if at < last || end > s.size || !isFree(all, at, end) {
				continue
			}
			payload := at + wire.HeaderSize + n
			got, err := s.sum(payload, end-payload, nil)
			if err != nil {
				return nil, err
			}
			if got == want {
				repaired = append(repaired, found{at: at, end: end, k: k, payload: payload, repaired: true})
				r.at, last = at, end
				break
			}
			patience -= r.length
		}
	}
	return repaired, nil
}

// shifts returns for each packet by how much the found packets before and behind it have moved.
func (s *salvage) shifts() [][2]int64 {
	all := make([][2]int64, len(s.rows))
	last := int64(0)
	for k := range s.rows {
		if r := &s.rows[k]; r.at != missing {
			last = r.at - r.offset
		}
		all[k][0] = last
	}
	for k := len(s.rows) - 1; k >= 0; k-- {
		if r := &s.rows[k]; r.at != missing {
			last = r.at - r.offset
		}
		all[k][1] = last
	}
	return all
}

// isFree reports whether no found packet has a byte of [from, to).
func isFree(all []found, from, to int64) bool {
	k := sort.Search(len(all), func(k int) bool { return all[k].end > from })
	return k == len(all) || all[k].at >= to
}

// expected returns the missing packets by the offset where they should be: moved as far as the found packet
// before them.
func (s *salvage) expected() map[int64]int {
	places, shift := map[int64]int{}, int64(0)
	for k := range s.rows {
		if r := &s.rows[k]; r.at != missing {
			shift = r.at - r.offset
		} else if at := r.offset + shift; at >= 0 && at < s.size {
			places[at] = k
		}
	}
	return places
}

// lost completes the report of a missing packet.
func (s *salvage) lost(r *listed) Packet {
	w := s.idx.Row(r.row)
	reason := r.reason
	if reason == "" {
		reason = "it is not there"
	}
	return Packet{Name: w.Name(), Range: Range{Offset: r.offset, Length: r.length}, Reason: reason}
}

// byteWindow is a range of the source in memory, which is searched byte by byte.
type byteWindow struct {
	s   *salvage
	to  int64 // end of the bytes that may be read
	at  int64
	buf []byte
}

// from returns the bytes in memory from an offset on. They have at least a header and the magic number behind
// a header without a name, if the range is long enough.
func (w *byteWindow) from(at int64) ([]byte, error) {
	if at >= w.at && min(at+wire.HeaderSize+magicSize, w.to) <= w.at+int64(len(w.buf)) {
		return w.buf[at-w.at:], nil
	}
	n := min(w.to-at, chunkSize)
	if n < wire.HeaderSize {
		return nil, status.New(status.Internal, "%d bytes are left of a stretch", n)
	}
	if int64(cap(w.buf)) < n {
		w.buf = make([]byte, n)
	}
	w.at, w.buf = at, w.buf[:n]
	if _, err := w.s.ReadAt(w.buf, at); err != nil {
		w.buf = w.buf[:0]
		return nil, err
	}
	return w.buf, w.s.tick(n)
}
