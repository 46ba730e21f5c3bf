// Package intake lets small tensors wait before they become packets.
//
// Between two operators of a model, all that makes a packet has left the processor's caches. So
// the host's call only copies a small tensor into a Room, which costs little. The next other call
// of the capture drains the room: it enqueues the tensors that wait there, oldest first, and then
// goes on with its own work. Only the first of them finds the caches cold. Where no such call
// comes, the session's tick drains the room.
//
// All tensors and notes keep the order of the calls: a call that captures drains the room first,
// and a note waits behind the tensors in it.
package intake

import (
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/libstrap/strap/libstrap/internal/session"
	"github.com/libstrap/strap/libstrap/internal/status"
)

// Room is the memory that tensors wait in. The host puts them there without this package: they are
// contiguous, not converted, have elements, of at most 16 KiB, and a registered layer and request.
//
// Only the call that drains the room uses First and Pop.
type Room interface {
	// Layers registers the layers with the ids 0 to n-1.
	Layers(n int)
	// Requests registers the requests with the ids 1 to n.
	Requests(n int)
	// Waiting returns the number of tensors that were taken and not popped.
	Waiting() int
	// Taken returns how many tensors were taken, and the bytes of their elements.
	Taken() (tensors, bytes uint64)
	// First describes the oldest tensor in t and returns true. Shape and elements stay where they
	// are until the room is empty, and it takes no tensor until then. If no tensor waits, First
	// returns false, and the room takes tensors again.
	First(t *session.Tensor) bool
	// Pop removes the tensor that First described.
	Pop()
	// Hold makes the room take no tensor until First returns false.
	Hold()
	// Shut makes the room take no more tensors.
	Shut()
	// Close frees the room for another capture. Taken still works.
	Close()
}

// Capture is a session and its room. Its methods hide those of the session that have to drain the
// room first. All are safe for concurrent use.
type Capture struct {
	*session.Session
	path string
	room Room

	draining chan struct{}  // holds a value while a call drains the room; guards tensor and begun
	tensor   session.Tensor // the oldest one, with the cursor of its Enqueue
	begun    bool           // tensor is set

	drains   atomic.Uint64 // how often the room was emptied
	lastTick uint64        // drains at the last Tick, which alone uses it
	shut     atomic.Bool

	mu               sync.Mutex // guards what follows. Locks of the session are taken under it
	notes            []note     // behind all tensors that wait
	onlyCounted      uint64     // notes beyond session.MaxNotes of these
	layers, requests uint32     // the most that the room knows
}

// note is a note that waits for tensors.
type note struct {
	about   session.Tensor
	message string
}

// Open starts a capture as session.Open does, with small tensors in a room. Room nil: none wait,
// as it must be with o.DropOnFull. Open closes the room if it fails.
func Open(path string, o session.Options, room Room) (*Capture, error) {
	c := &Capture{path: path, room: room, draining: make(chan struct{}, 1)}
	if room == nil {
		c.room = noRoom{}
	} else {
		o.Intake = (*held)(c)
	}
	// The session may tick before its assignment here. The room is empty until then, and a Tick of
	// an empty room does not use the session.
	var err error
	if c.Session, err = session.Open(path, o); err != nil {
		c.room.Close()
		return nil, err
	}
	return c, nil
}

// noRoom is the room of a capture without one.
type noRoom struct{}

func (noRoom) Layers(int)                 {}
func (noRoom) Requests(int)               {}
func (noRoom) Waiting() int               { return 0 }
func (noRoom) Taken() (uint64, uint64)    { return 0, 0 }
func (noRoom) First(*session.Tensor) bool { return false }
func (noRoom) Pop()                       {}
func (noRoom) Hold()                      {}
func (noRoom) Shut()                      {}
func (noRoom) Close()                     {}

// Layer is session.Session.Layer. The room takes tensors of the layer from then on.
func (c *Capture) Layer(model, name, path string) (uint32, error) {
	id, err := c.Session.Layer(model, name, path)
	if err != nil {
		return 0, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.layers <= id {
		c.layers = id + 1
		c.room.Layers(int(c.layers))
	}
	return id, nil
}

// Request is session.Session.Request. The room takes tensors of the request from then on.
func (c *Capture) Request(name string) (uint32, error) {
	id, err := c.Session.Request(name)
	if err != nil {
		return 0, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.requests < id {
		c.requests = id
		c.room.Requests(int(id))
	}
	return id, nil
}

// Enqueue is session.Session.Enqueue, behind the tensors in the room. A Timeout while these wait
// for memory leaves t.Cursor 0.
func (c *Capture) Enqueue(t *session.Tensor, timeout time.Duration) error {
	if t.Cursor != 0 {
		return c.Session.Enqueue(t, timeout)
	}
	left, err := c.drain(timeout)
	if err != nil {
		return err
	}
	return c.Session.Enqueue(t, left)
}

// Flush is session.Session.Flush, of the tensors in the room too. A Timeout while these wait for
// memory leaves *cursor 0.
func (c *Capture) Flush(cursor *uint64, timeout time.Duration) error {
	if *cursor == 0 {
		var err error
		if timeout, err = c.drain(timeout); err != nil {
			return err
		}
	}
	return c.Session.Flush(cursor, timeout)
}

// Checkpoint is session.Session.Checkpoint, of the tensors in the room too. For cursor see Flush.
func (c *Capture) Checkpoint(cursor *uint64, timeout time.Duration) (offset int64, err error) {
	if *cursor == 0 {
		if timeout, err = c.drain(timeout); err != nil {
			return 0, err
		}
	}
	return c.Session.Checkpoint(cursor, timeout)
}

// Roll is session.Session.Roll, behind the tensors in the room. It waits for memory for these. A
// Timeout while they wait begins nothing.
func (c *Capture) Roll(path string, overwrite bool, timeout time.Duration) (captureID string, err error) {
	if _, err := c.drain(timeout); err != nil {
		return "", err
	}
	return c.Session.Roll(path, overwrite)
}

// Note is session.Session.Note. It does not wait: if tensors wait, the note is kept until they are
// enqueued.
func (c *Capture) Note(t *session.Tensor, message string) error {
	if err := c.CheckNote(t); err != nil {
		return err
	}
	if !c.keep(t, message) {
		return c.Session.Note(t, message)
	}
	_ = (*held)(c).drainNow() // the note is kept, and the next call meets the error too
	return nil
}

// keep keeps a note behind the tensors in the room. It returns false if there are none. If
// session.MaxNotes notes are kept already, it only counts the note.
func (c *Capture) keep(t *session.Tensor, message string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.empty() {
		return false
	}
	if len(c.notes) >= session.MaxNotes {
		c.onlyCounted++
		return true
	}
	c.room.Hold() // tensors to come belong behind the note
	about := *t
	about.FromIntake = true
	c.notes = append(c.notes, note{about, session.ShortenMessage(message)})
	return true
}

// empty reports whether neither a tensor nor a note waits. The caller holds c.mu.
func (c *Capture) empty() bool { return c.room.Waiting() == 0 && len(c.notes) == 0 }

// Stats is session.Session.Stats, with the tensors and notes that waited or wait here.
func (c *Capture) Stats() session.Stats {
	c.mu.Lock()
	defer c.mu.Unlock()
	st := c.Session.Stats()
	tensors, bytes := c.room.Taken()
	st.Tensors += tensors
	st.RawBytes += bytes
	st.Failed += uint64(len(c.notes)) + c.onlyCounted
	return st
}

// drain enqueues the tensors in the room, oldest first, and the notes behind them. It waits for
// memory at most as long as limit says, or until the capture is closing, and returns what is left of
// limit. After a Timeout the next call goes on where this one stopped.
func (c *Capture) drain(limit time.Duration) (left time.Duration, err error) {
	if (*held)(c).Empty() {
		return limit, nil
	}
	remaining := func() time.Duration { return limit }
	if limit > 0 {
		until := time.Now().Add(limit)
		remaining = func() time.Duration { return max(time.Until(until), 0) }
	}
	if !c.acquire(limit) {
		if err := c.Refused(); err != nil {
			return 0, err
		}
		return 0, status.New(status.Timeout, "%q: %d small tensors wait for staging memory, and another call "+
			"that brings them there found none in time", c.path, c.room.Waiting())
	}
	defer c.release()
	err = c.enqueueAll(remaining)
	if refused := c.Refused(); refused != nil && errors.Is(err, status.Timeout) {
		err = refused // the end of the session cut the wait short
	}
	return remaining(), err
}

// briefly is how long also a call with the limit 0 waits for its turn to drain. A call that
// drains and need not wait for memory is through within that time.
const briefly = time.Millisecond

// tryAcquire gets the turn to drain the room, if no call has it.
func (c *Capture) tryAcquire() bool {
	select {
	case c.draining <- struct{}{}:
		return true
	default:
		return false
	}
}

// acquire gets the turn to drain the room. It waits at most as long as limit says, or until the
// capture is closing.
func (c *Capture) acquire(limit time.Duration) bool {
	if c.tryAcquire() {
		return true
	}
	var over <-chan time.Time
	if limit >= 0 {
		timer := time.NewTimer(max(limit, briefly))
		defer timer.Stop()
		over = timer.C
	}
	select {
	case c.draining <- struct{}{}:
		return true
	case <-over:
		return false
	case <-c.Closing():
		return false
	}
}

func (c *Capture) release() { <-c.draining }

// enqueueAll empties the room. The caller has acquired the turn.
func (c *Capture) enqueueAll(remaining func() time.Duration) error {
	for {
		more, err := c.next()
		if !more {
			return err
		}
		err = c.Session.Enqueue(&c.tensor, remaining())
		if errors.Is(err, status.InvalidArgument) {
			err = status.Wrap(status.Internal, err, "the intake took a tensor that is none")
			c.Fail(err)
		}
		if err != nil {
			return err
		}
		c.begun = false
		c.room.Pop()
	}
}

// next fetches the oldest tensor of the room into c.tensor. If none waits, it passes on the notes
// and returns false. The caller has acquired the turn.
func (c *Capture) next() (more bool, err error) {
	if c.begun {
		return true, nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.room.First(&c.tensor) {
		c.tensor.FromIntake, c.begun = true, true
		return true, nil
	}
	for len(c.notes) > 0 {
		if err := c.Session.Note(&c.notes[0].about, c.notes[0].message); err != nil {
			return false, err
		}
		c.notes = c.notes[1:]
	}
	c.notes = nil
	c.drains.Add(1)
	return false, nil
}

// held is a Capture as the session sees it: session.Intake.
type held Capture

func (h *held) Waiting() int { return h.room.Waiting() }

func (h *held) Empty() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return (*Capture)(h).empty()
}

// Tick drains the room if no call has since the last Tick, or the capture is closing.
func (h *held) Tick() error {
	before := h.lastTick
	h.lastTick = h.drains.Load()
	if h.lastTick != before && !h.shut.Load() {
		return nil
	}
	return h.drainNow()
}

// drainNow drains the room as far as that needs no wait. It returns nil if tensors are left because
// memory is missing or another call drains.
func (h *held) drainNow() error {
	c := (*Capture)(h)
	if h.Empty() || !c.tryAcquire() {
		return nil
	}
	defer c.release()
	err := c.enqueueAll(func() time.Duration { return 0 })
	if errors.Is(err, status.Timeout) {
		return nil
	}
	return err
}

func (h *held) Shut() {
	h.shut.Store(true)
	h.room.Shut()
}

// Close gives up the tensors and notes that wait, and returns the number of tensors; lost counts no
// notes. It may wait for a call that drains the room: that call ends, because the session has
// ended.
func (h *held) Close() (lost int) {
	c := (*Capture)(h)
	c.draining <- struct{}{}
	defer c.release()
	c.mu.Lock()
	defer c.mu.Unlock()
	for ; c.room.First(&c.tensor); c.room.Pop() {
		lost++
	}
	c.room.Close()
	return lost
}
