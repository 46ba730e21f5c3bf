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

// What no index lists is taken for a packet
//
//   - where it follows another one (or the stream begins), unless its frame does
//     not decode, or no packet follows it and one begins inside;
//   - behind a damaged stretch, if a frame begins in it, or if more packets follow
//     than chance would put there.
//
// Raw bytes say nothing about themselves: behind a header that is right, damaged
// ones are kept. Where the index says that a packet stands, there is either this
// one or none.
//
// Candidates can overlap, and each may claim all that follows. So what was read and decoded for
// those that turned out to be none is counted. Where it comes to more than the allowance, nothing is
// looked for behind damage any more, and what follows another packet is kept without a look behind it.

const (
	// chain is how many packets with a name follow each other by chance nowhere.
	chain = 3
	// links is how many without a name are gone over in between.
	links = 16
	// maxSeen bounds how many pairs of name and length are remembered.
	maxSeen = 1 << 16
	// Decoding so many bytes costs as much as reading one.
	decodedPerRead = 64
)

// seeker looks for packets that are not listed.
type seeker struct {
	*salvage
	expected map[int64]int // listed packets that are missing, by where they should stand
	seen     map[shape]bool
	found    []found
	damaged  []Packet // known by name, with a payload that does not decode
	window   byteWindow
	patience int64   // what may still be gone through in vain
	last     verdict // of the frame that was decoded last
	bytes    *bufio.Reader
}

// verdict is what decoding the frame of a packet has shown.
type verdict struct {
	at, end int64  // of the packet
	why     string // the frame does not decode; "" where it does, or this build cannot tell
	cost    int64  // what it took of the patience
}

// shape is what packets of one layer have in common from step to step.
type shape struct {
	name   string
	length uint32
}

// withUnlisted adds to the listed packets those that no index lists.
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

// seek finds the packets of a stretch, at whose beginning one should stand.
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

// walk goes from packet to packet, and returns where none stands.
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

// packet is the packet that a header claims; Corrupt where it cannot be one.
func (k *seeker) packet(at, to int64) (scan.Packet, error) {
	return scan.ReadAt(k.salvage, at, to)
}

func (k *seeker) keep(p scan.Packet) int64 {
	k.found = append(k.found, found{at: p.Offset, end: p.End(), k: unlistedPacket, payload: p.PayloadOffset, name: p.Name})
	k.remember(p.Name, int64(p.PayloadLen))
	return p.End()
}

// past steps over a listed packet whose payload is damaged; not where its header
// is damaged too, since nobody knows then whether it has its length.
func (k *seeker) past(p scan.Packet, i int) (next int64, err error) {
	r := &k.rows[i]
	w := k.idx.Row(r.row)
	if p.Name == w.Name() && p.End()-p.Offset == r.length {
		return p.End(), nil
	}
	return p.Offset, nil
}

// take keeps a packet, or returns where another begins inside it: then it has lost
// bytes, or its length is wrong. Raw bytes need more packets behind them for proof.
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

// framed keeps a packet whose frame decodes. One whose frame does not is stepped
// over where another packet follows: its header is right then.
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
	if next == p.End() { // it was no work in vain
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

// decodes tells whether the payload of a packet decodes. It takes the cost from the patience.
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

// payloadReader reads a payload, and remembers the error of the file or of
// Progress, which a codec may hide.
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

// resume finds the first place in [from, until) from which packets follow each
// other, until where there is none, or the patience is at its end. A listed packet
// that is missing does not stand there.
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

// isWhole reports whether the payload of a packet decodes. Inside the header of a
// packet the header of another may seem to stand, in front of the same frame.
func (k *seeker) isWhole(at, to int64) (bool, error) {
	p, err := k.packet(at, to)
	if err != nil {
		return false, err
	}
	v, err := k.decodes(p, codec.Detect(p.Head()))
	return err == nil && v.why == "", err
}

// credible reports whether so many packets follow each other at a place, up to
// the end of the stretch at most. The beginning of a frame is proof enough, or a
// name with a length that it has had before. Where they do not, the look at them was
// in vain.
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

// beginsPlain tells from the first bytes of a name of n bytes, as far as they are in b, whether it
// can be plain. It spares a read for almost every header that chance makes.
func beginsPlain(b []byte, n int) bool {
	const enough = 32
	b = b[:min(len(b), n, enough)]
	for len(b) > 0 {
		r, size := utf8.DecodeRune(b)
		if r == utf8.RuneError && size == 1 {
			return !utf8.FullRune(b) // cut off
		}
		if !printable(r) {
			return false
		}
		b = b[size:]
	}
	return true
}

// isPlain reports whether a name is text as names of modules are.
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
