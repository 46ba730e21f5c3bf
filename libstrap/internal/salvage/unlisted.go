// Finds intact packets that no index lists.

package salvage

import (
	"bufio"
	"errors"
	"io"
	"unicode"
	"unicode/utf8"

	"github.com/libstrap/strap/libstrap/internal/codec"
	"github.com/libstrap/strap/libstrap/internal/scan"
	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// Bytes that no index lists are a packet
//
//   - if they follow another packet or begin the stream, unless their frame does not decode, or no packet
//     follows them and a packet begins inside;
//   - if they are behind a damaged range, and a frame begins in them, or more packets follow than would
//     by chance.
//
// Raw bytes cannot be checked: behind an intact header, damaged raw bytes are kept. Where the index has a
// packet, there is this packet or none.
//
// Candidates can overlap, and each may claim all bytes behind it. So the bytes that are read and decoded for
// candidates that are no packets are counted. If they are more than the allowance, the search behind damage
// ends, and a packet that follows another packet is kept without a look at the packets behind it.

const (
	// chain is how many packets with a name must follow each other to be accepted as packets. By
	// chance so many never do.
	chain = 3
	// links is the most packets without a name in between.
	links = 16
	// maxSeen is the most pairs of name and length that are remembered.
	maxSeen = 1 << 16
	// decodedPerRead is how many decoded bytes cost as much as reading one byte.
	decodedPerRead = 64
)

// seeker looks for packets that are not listed.
type seeker struct {
	*salvage
	expected map[int64]int // missing listed packets, by the offset where they should be
	seen     map[shape]bool
	found    []found
	damaged  []Packet // packets with a known name whose payload does not decode
	window   byteWindow
	patience int64   // bytes that may still be processed in vain
	last     verdict // on the frame that was decoded last
	bytes    *bufio.Reader
}

// verdict is the result of decoding a packet's frame.
type verdict struct {
	at, end int64  // of the packet
	why     string // why the frame does not decode; "" if it does, or this build cannot tell
	cost    int64  // bytes that it took from the patience
}

// shape has the properties that packets of one layer share from step to step.
type shape struct {
	name   string
	length uint32
}

// withUnlisted adds the packets that no index lists to the listed packets.
func (s *salvage) withUnlisted(all []found) ([]found, error) {
	k := seeker{
		salvage: s, expected: s.expected(), seen: map[shape]bool{}, patience: s.allowance,
		window: byteWindow{s: s},
	}
	for i := range s.rows {
		r := &s.rows[i]
		w := s.idx.Row(r.row)
		k.remember(w.Name(), r.length-int64(wire.HeaderSize+len(w.Name())))
	}
	if err := s.stretches(all, func(from, to, _, _ int64) error { return k.seek(from, to) }); err != nil {
		return nil, err
	}
	s.report.Lost = append(s.report.Lost, k.damaged...)
	return merge(all, k.found), nil
}

func (k *seeker) remember(name string, payload int64) {
	if len(k.seen) < maxSeen && payload >= 0 && payload <= wire.MaxPayload {
		k.seen[shape{name, uint32(payload)}] = true
	}
}

// seek finds the packets of a range. A packet should be at its beginning.
func (k *seeker) seek(from, to int64) error {
	k.window.to = to
	k.ahead += to - from
	for at := from; at < to; {
		end, err := k.walk(at, to)
		if err != nil || end >= to {
			return err
		}
		if at, err = k.resume(end+1, to, to); err != nil {
			return err
		}
	}
	return nil
}

// walk goes from packet to packet, and returns the first offset without a packet.
func (k *seeker) walk(at, to int64) (end int64, err error) {
	for at < to {
		if err := k.tick(0); err != nil {
			return 0, err
		}
		p, err := k.packet(at, to)
		if errors.Is(err, status.Corrupt) {
			return at, nil
		} else if err != nil {
			return 0, err
		}
		next := int64(0)
		if i, listed := k.expected[at]; listed {
			next, err = k.past(p, i)
		} else if kind := codec.Detect(p.Head()); kind == codec.None {
			next, err = k.take(p, chain-1, to)
		} else {
			next, err = k.framed(p, kind, to)
		}
		if err != nil {
			return 0, err
		}
		if next == at {
			return at, nil
		}
		at = next
	}
	return at, nil
}

// packet returns the packet that a header claims, or Corrupt if it cannot be one.
func (k *seeker) packet(at, to int64) (scan.Packet, error) {
	return scan.ReadAt(k.salvage, at, to)
}

func (k *seeker) keep(p scan.Packet) int64 {
	k.found = append(k.found, found{at: p.Offset, end: p.End(), k: unlistedPacket, payload: p.PayloadOffset, name: p.Name})
	k.remember(p.Name, int64(p.PayloadLen))
	return p.End()
}

// past skips a listed packet whose payload is damaged. It does not skip it if the header is damaged too,
// because then its length is not certain.
func (k *seeker) past(p scan.Packet, i int) (next int64, err error) {
	r := &k.rows[i]
	w := k.idx.Row(r.row)
	if p.Name == w.Name() && p.End()-p.Offset == r.length {
		return p.End(), nil
	}
	return p.Offset, nil
}

// take keeps a packet, or returns the offset of another packet that begins inside it: then the packet has
// lost bytes, or its length is wrong. Raw bytes need more packets behind them as proof.
func (k *seeker) take(p scan.Packet, names int, to int64) (next int64, err error) {
	if k.patience < 0 {
		return k.keep(p), nil
	}
	follows, err := k.credible(p.End(), to, names)
	if err != nil || follows || p.End() == to {
		return k.keep(p), err
	}
	inside, err := k.resume(p.Offset+1, p.End(), to)
	if err != nil || inside < p.End() {
		return inside, err
	}
	return k.keep(p), nil
}

// framed keeps a packet whose frame decodes. It skips a packet whose frame does not decode if another packet
// follows, because then its header is right.
func (k *seeker) framed(p scan.Packet, kind codec.Kind, to int64) (next int64, err error) {
	v, err := k.decodes(p, kind)
	if err != nil {
		return 0, err
	}
	if v.why == "" {
		next, err = k.take(p, 1, to)
	} else {
		next, err = k.stepOver(p, v.why, to)
	}
	if next == p.End() { // the work was not in vain
		k.patience += v.cost
	}
	return next, err
}

func (k *seeker) stepOver(p scan.Packet, why string, to int64) (next int64, err error) {
	follows, err := k.credible(p.End(), to, 1)
	if err != nil || !follows && p.End() < to {
		return p.Offset, err
	}
	k.damaged = append(k.damaged, Packet{
		Name: p.Name, Range: Range{Offset: p.Offset, Length: p.End() - p.Offset}, Reason: why,
	})
	return p.End(), nil
}

// decodes returns whether the payload of a packet decodes. It subtracts the cost from the patience.
func (k *seeker) decodes(p scan.Packet, kind codec.Kind) (verdict, error) {
	if k.last.at == p.Offset && k.last.end == p.End() {
		return k.last, nil
	}
	before := k.read
	src := &payloadReader{s: k.salvage, at: p.PayloadOffset, end: p.End()}
	if k.bytes == nil {
		k.bytes = bufio.NewReaderSize(nil, 16<<10)
	}
	k.bytes.Reset(src)
	n, err := codec.Count(kind, k.bytes, int64(p.PayloadLen))
	if src.err != nil {
		return verdict{}, src.err
	}
	k.last = verdict{at: p.Offset, end: p.End(), cost: k.read - before}
	if kind != codec.None {
		k.last.cost += n / decodedPerRead
	}
	if err != nil && !errors.Is(err, status.Unsupported) {
		k.last.why = err.Error()
	}
	k.patience -= k.last.cost
	return k.last, nil
}

// payloadReader reads a payload, and keeps an error of the file or of Progress, because a codec may hide it.
type payloadReader struct {
	s       *salvage
	at, end int64
	err     error
}

func (r *payloadReader) Read(b []byte) (int, error) {
	if r.err != nil {
		return 0, r.err
	}
	if r.at == r.end {
		return 0, io.EOF
	}
	n := int(min(int64(len(b)), r.end-r.at))
	if _, r.err = r.s.ReadAt(b[:n], r.at); r.err == nil {
		r.err = r.s.tick(int64(n))
	}
	r.at += int64(n)
	return n, r.err
}

// resume returns the first offset in [from, until) from which packets follow each other. It returns until if
// there is none, or the patience is used up. No missing listed packet is at such an offset.
func (k *seeker) resume(from, until, to int64) (int64, error) {
	for at := from; at < until && to-at > wire.HeaderSize && k.patience >= 0; at++ {
		b, err := k.window.from(at)
		if err != nil {
			return 0, err
		}
		n, d := wire.Header(b)
		if at+wire.HeaderSize+int64(n)+int64(d) > to || !beginsPlain(b[wire.HeaderSize:], n) {
			continue
		}
		if n == 0 && len(b) >= wire.HeaderSize+magicSize && codec.Detect(b[wire.HeaderSize:]) == codec.None && !k.seen[shape{"", d}] {
			continue
		}
		if _, listed := k.expected[at]; listed {
			continue
		}
		ok, err := k.credible(at, to, chain)
		if err == nil && ok {
			ok, err = k.isWhole(at, to)
		}
		if err != nil {
			return 0, err
		}
		if ok {
			return at, nil
		}
	}
	return until, nil
}

// isWhole reports whether the payload of the packet at an offset decodes. Inside a packet's header there can
// seem to be the header of another packet, in front of the same frame.
func (k *seeker) isWhole(at, to int64) (bool, error) {
	p, err := k.packet(at, to)
	if err != nil {
		return false, err
	}
	v, err := k.decodes(p, codec.Detect(p.Head()))
	return err == nil && v.why == "", err
}

// credible reports whether `names` packets with names follow each other at an offset, or reach the
// end of the range. The beginning of a frame is proof enough, and so is a name with a length that
// it had before. If the packets are not credible, the bytes read for them count against the
// patience.
func (k *seeker) credible(at, to int64, names int) (ok bool, err error) {
	before := k.read
	defer func() {
		if !ok {
			k.patience -= k.read - before
		}
	}()
	named := false
	for range links {
		if at == to {
			return named, nil
		}
		p, err := k.packet(at, to)
		switch {
		case errors.Is(err, status.Corrupt):
			return false, nil
		case err != nil:
			return false, err
		case !isPlain(p.Name):
			return false, nil
		}
		if codec.Detect(p.Head()) != codec.None || len(p.Name) >= 2 && k.seen[shape{p.Name, p.PayloadLen}] {
			return true, nil
		}
		if p.Name != "" {
			named = true
			if names--; names == 0 {
				return true, nil
			}
		}
		at = p.End()
	}
	return false, nil
}

// beginsPlain reports whether a name of n bytes can be plain, from its first bytes in b. This saves a read for
// almost each header that is there by chance.
func beginsPlain(b []byte, n int) bool {
	const enough = 32
	b = b[:min(len(b), n, enough)]
	for len(b) > 0 {
		r, size := utf8.DecodeRune(b)
		if r == utf8.RuneError && size == 1 {
			return !utf8.FullRune(b) // b ends within a character
		}
		if !printable(r) {
			return false
		}
		b = b[size:]
	}
	return true
}

// isPlain reports whether a name is text like the names of modules.
func isPlain(name string) bool {
	if !utf8.ValidString(name) {
		return false
	}
	for _, r := range name {
		if !printable(r) {
			return false
		}
	}
	return true
}

func printable(r rune) bool { return r >= utf8.RuneSelf || unicode.IsPrint(r) }
