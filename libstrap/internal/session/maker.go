// Makes the packets of the backlog, in workers and in threads that help.

package session

import (
	"bytes"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/libstrap/strap/libstrap/internal/codec"
	"github.com/libstrap/strap/libstrap/internal/crc32c"
	"github.com/libstrap/strap/libstrap/internal/team"
)

// maker makes the packets of the backlog, in workers and in threads that help.
type maker struct {
	opts     *Options
	jobs     *backlog
	sink     *sink
	order    *order
	life     *lifecycle
	counters *counters
	spares   spares
	workers  sync.WaitGroup
}

// start starts a worker for each of the encoders.
func (m *maker) start(all []*encoders) {
	m.workers.Add(len(all))
	for _, e := range all {
		go m.work(e)
	}
}

// stop lets the workers end when the backlog is empty, and waits for that.
func (m *maker) stop() {
	m.jobs.Close()
	m.workers.Wait()
}

// work makes packets until the backlog is closed.
func (m *maker) work(e *encoders) {
	defer m.workers.Done()
	runtime.LockOSThread() // and never unlock: the thread ends with its priority
	lowerPriority()
	for {
		it, ok := m.jobs.Pop()
		if !ok {
			return
		}
		for it != nil {
			it = m.make(it, e)
			m.order.Wake()
		}
	}
}

// makeWaiting has a team make as many packets as wait now. Packets that come meanwhile wait on.
func (m *maker) makeWaiting(by team.Team) {
	var left atomic.Int64
	left.Store(int64(m.jobs.Packets()))
	by.Run(m.opts.Workers, func() {
		_ = m.life.Guard(func() error { // a panic is the session's failure
			return m.spares.use(m.opts, func(e *encoders) error {
				m.help(&left, e)
				return nil
			})
		})
	})
}

// help makes packets in one thread of a team. The threads share left, the number of packets still
// to make. help appends the packets to the stream as far as that does not wait for the disk.
func (m *maker) help(left *atomic.Int64, e *encoders) {
	stuck := false
	for left.Add(-1) >= 0 {
		it, ok := m.jobs.TryPop()
		if !ok {
			break
		}
		for it != nil {
			it = m.make(it, e)
			stuck = m.sink.tryAppend()
		}
	}
	if stuck {
		m.order.Signal() // not Wake: a call may wait for the last entry of the order
	}
}

// make makes a packet, and the packets with the same elements that wait close behind it. next is a
// packet that repeated took out of the backlog although its elements differ: the caller makes it
// next. nil: there is none.
func (m *maker) make(it *entry, e *encoders) (next *entry) {
	var again []*entry
	it.erase()
	if it.err == nil && !m.life.halted() {
		it.err = m.life.Guard(func() error {
			again, next = m.repeated(it)
			if it.kind == codec.None {
				return it.surround(&codec.Sum{})
			}
			return m.encode(it, e)
		})
	}
	n, staged := 1, it.staged()
	for _, other := range again {
		other.erase()
		if other.err = it.err; it.err == nil {
			other.repeat(it)
			if it.kind == codec.Archive {
				m.counters.addArchiveLoss(other, e.archive.Loss())
			}
		}
		n, staged = n+1, staged+other.staged()
	}
	// From here on they are the sink's.
	it.made.Store(true)
	for _, other := range again {
		other.made.Store(true)
	}
	m.jobs.Done(n, staged)
	return next
}

// repeated takes the packets out of the backlog that hold the same elements. Modules return tensors
// of their children; dropout in evaluation mode is one. repeated takes none without a codec and
// with LZ4 at level 0, because there comparing costs as much as encoding. next is as in make.
func (m *maker) repeated(it *entry) (again []*entry, next *entry) {
	if m.opts.Codec == codec.None || m.opts.Codec == codec.LZ4 && m.opts.Level == 0 {
		return nil, nil
	}
	for {
		other := m.jobs.PopAlike(it)
		if other == nil {
			return again, nil
		}
		if !bytes.Equal(other.elements(), it.elements()) {
			return again, other
		}
		again = append(again, other)
		m.counters.repeated.Add(1)
	}
}

// encode turns the elements in the packet's memory into the packet.
func (m *maker) encode(it *entry, e *encoders) error {
	n, err := e.encodeInPlace(it)
	if err != nil {
		return err
	}
	if it.kind == codec.Archive {
		m.counters.addArchiveLoss(it, e.archive.Loss())
	}
	if m.opts.findsRaw {
		it.layer.tried(n >= it.source)
	}
	it.row.CRC = crc32c.Checksum(it.finish(n))
	return nil
}
