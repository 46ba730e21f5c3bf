package session

import (
	"bytes"
	"runtime"
	"sync/atomic"

	"github.com/libstrap/strap/libstrap/internal/codec"
	"github.com/libstrap/strap/libstrap/internal/crc32c"
	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/team"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// work compresses packets until the queue is closed.
func (s *Session) work(e *encoders) {
	defer s.workers.Done()
	runtime.LockOSThread() // and never unlock: the thread ends with its priority
	lowerPriority()
	for {
		it, ok := s.jobs.Pop()
		if !ok {
			return
		}
		for it != nil {
			it = s.workOn(it, e)
			s.order.Wake()
		}
	}
}

// makeWaiting has a team make as many packets as wait now: others may go on adding.
func (s *Session) makeWaiting(by team.Team) {
	var left atomic.Int64
	left.Store(int64(s.jobs.Packets()))
	by.Run(s.opts.Workers, func() {
		_ = s.Guard(func() error { return s.help(&left) }) // a panic is the session's failure
	})
}

// help makes packets in one of several threads that do, and brings them to the stream as
// far as that does not wait for the disk.
func (s *Session) help(left *atomic.Int64) error {
	e, err := s.lend()
	if err != nil {
		return err
	}
	defer s.giveBack(e)
	stuck := false
	for left.Add(-1) >= 0 {
		it, ok := s.jobs.TryPop()
		if !ok {
			break
		}
		for it != nil {
			it = s.workOn(it, e)
			stuck = s.writer.tryAppend()
		}
	}
	if stuck {
		s.order.Signal() // not Wake: a caller may wait for what was the last item
	}
	return nil
}

// lend gives encoders for a helper.
func (s *Session) lend() (*encoders, error) {
	s.sparesMu.Lock()
	defer s.sparesMu.Unlock()
	if n := len(s.spares); n > 0 {
		e := s.spares[n-1]
		s.spares = s.spares[:n-1]
		return e, nil
	}
	return newEncoders(&s.opts)
}

func (s *Session) giveBack(e *encoders) {
	s.sparesMu.Lock()
	defer s.sparesMu.Unlock()
	s.spares = append(s.spares, e)
}

// workOn makes a packet, and those of the same elements that wait close behind it.
// What looked like those and was not is next.
func (s *Session) workOn(it *item, e *encoders) (next *item) {
	var again []*item
	if it.err == nil && !s.writer.halted() {
		it.err = s.Guard(func() error {
			again, next = s.repeated(it)
			if it.kind == codec.None {
				return it.surround(&codec.Sum{})
			}
			return s.encode(it, e)
		})
	}
	n, bytes := 1, it.staged()
	for _, other := range again {
		if other.err = it.err; it.err == nil {
			other.repeat(it)
			if it.kind == codec.Archive {
				s.addLoss(other, e.archive.Loss())
			}
		}
		n, bytes = n+1, bytes+other.staged()
	}
	// From here on they are the writer's.
	it.made.Store(true)
	for _, other := range again {
		other.made.Store(true)
	}
	s.jobs.Done(n, bytes)
	return next
}

// repeated takes the packets out of the backlog that hold what it does: modules
// return tensors of their children, in evaluation dropout among them. Comparing costs as
// much as codecs that find nothing to do.
func (s *Session) repeated(it *item) (again []*item, next *item) {
	if s.opts.Codec == codec.None || s.opts.Codec == codec.LZ4 && s.opts.Level == 0 {
		return nil, nil
	}
	for {
		other := s.jobs.PopAlike(it)
		if other == nil {
			return again, nil
		}
		if !bytes.Equal(other.elements(), it.elements()) {
			return again, other
		}
		again = append(again, other)
		s.counters.repeated.Add(1)
	}
}

// elements are the source bytes, until they are encoded.
func (it *item) elements() []byte {
	return it.payload()[it.front:][:it.source]
}

// alike reports whether two packets seem to hold the same.
func (it *item) alike(other *item) bool {
	if it.source != other.source || it.row.Stored != other.row.Stored || it.kind != other.kind || other.err != nil {
		return false
	}
	a, b := it.elements(), other.elements()
	n := min(len(a), 64)
	return n > 0 && bytes.Equal(a[:n], b[:n]) && bytes.Equal(a[len(a)-n:], b[len(b)-n:])
}

// repeat makes the packet from another one of the same elements.
func (it *item) repeat(of *item) {
	it.finish(copy(it.payload(), of.out[wire.HeaderSize+len(of.name):]))
	it.row.CRC = of.row.CRC
}

// encode turns the source bytes in the region into the packet at its beginning.
func (s *Session) encode(it *item, e *encoders) error {
	n, err := e.encodeInPlace(it, it.payload())
	if err != nil {
		return err
	}
	if it.kind == codec.Archive {
		s.addLoss(it, e.archive.Loss())
	}
	if s.opts.foundRaw(it.kind) {
		it.layer.tried(n >= it.source)
	}
	it.row.CRC = crc32c.Checksum(it.finish(n))
	return nil
}

// surround makes the packet with its elements raw and where they are; codec.Surrounds has said
// that this can be. sum is their checksum, if it is known.
func (it *item) surround(sum *codec.Sum) error {
	n, ok := codec.Surround(it.kind, it.payload(), it.source)
	if !ok {
		return status.New(status.Internal, "%d bytes cannot stay in place as %v", it.source, it.kind)
	}
	payload := it.finish(n)
	if !sum.Known {
		it.row.CRC = crc32c.Checksum(payload)
		return nil
	}
	crc := crc32c.After(it.source).Combine(crc32c.Checksum(payload[:it.front]), sum.CRC)
	it.row.CRC = crc32c.Update(crc, payload[it.front+it.source:])
	return nil
}

// payload is where it stands or will stand, with the room that is left behind it.
func (it *item) payload() []byte { return it.region.Buf[wire.HeaderSize+len(it.name):] }

// finish makes a packet of the payload's n bytes, which it returns.
func (it *item) finish(n int) (payload []byte) {
	head := wire.HeaderSize + len(it.name)
	it.out = it.region.Buf[:head+n]
	wire.PutHeader(it.out, len(it.name), uint32(n))
	copy(it.out[wire.HeaderSize:], it.name)
	it.row.Length = uint64(len(it.out))
	return it.out[head:]
}
