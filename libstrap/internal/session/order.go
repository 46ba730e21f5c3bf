// The packets and notes that wait for the writer, in the order of the file.

package session

// order holds the packets and notes of a capture that wait for the writer, in the order of the
// file. It gives each two numbers: the sequence of its row in the index, and its position in
// this session. A roll restarts the sequence, for the index of the next stream. Position 1 stands for
// the opening of the files, so the first entry has position 2.
// Only the holder of sink.mu removes entries.
type order struct {
	life     *lifecycle
	mu       mutex[leafRank]
	list     []*entry
	id       string // of the stream that the next entry goes to
	sequence uint64 // of the next row
	added    uint64 // the position of the newest entry
	taken    uint64 // the position of the last entry that left the list
	ended    bool   // Push and Claim accept no more entries

	// Ready signals that the writer has something to do. A packet is pushed before it is
	// complete; the worker that completes it signals.
	Ready chan struct{}
}

// newOrder returns an order whose first row, of the stream id, has this sequence.
func newOrder(life *lifecycle, id string, sequence uint64) *order {
	return &order{life: life, id: id, sequence: sequence, added: 1, taken: 1, Ready: make(chan struct{}, 1)}
}

// Push numbers an entry and adds it at the end. After End it returns why the session takes none.
func (o *order) Push(it *entry) error {
	o.mu.Lock()
	if o.ended {
		o.mu.Unlock()
		return o.life.refused()
	}
	o.number(it)
	o.list = append(o.list, it)
	o.mu.Unlock()
	if it.ready() {
		o.Wake()
	}
	return nil
}

// Claim numbers an entry that the caller appends to the stream at once. The caller holds
// sink.mu. It reports false, and does nothing, if other entries wait or after End.
func (o *order) Claim(it *entry) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.ended || len(o.list) > 0 {
		return false
	}
	o.number(it)
	o.taken = o.added
	return true
}

func (o *order) number(it *entry) {
	o.added++
	if it.is == rollEntry {
		if o.id, o.sequence = "", 0; it.next != nil {
			o.id = it.next.index.CaptureID()
		}
		return
	}
	it.row.Sequence = o.sequence
	o.sequence++
}

// CaptureID returns the id of the stream that the next entry goes to.
func (o *order) CaptureID() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.id
}

// End closes the order to further entries if it is empty, and reports whether it was.
func (o *order) End() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.ended = len(o.list) == 0
	return o.ended
}

// Wake signals Ready if the first entry is complete. Call it after completing a packet.
func (o *order) Wake() {
	if o.First() != nil {
		o.Signal()
	}
}

// Signal signals Ready.
func (o *order) Signal() {
	select {
	case o.Ready <- struct{}{}:
	default:
	}
}

// ready reports whether the writer can take the entry: a packet once it is made, other entries at once.
func (it *entry) ready() bool { return it.is != packetEntry || it.made.Load() }

// First returns the first entry. It returns nil if there is none, or it is not complete yet.
func (o *order) First() *entry {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.list) > 0 && o.list[0].ready() {
		return o.list[0]
	}
	return nil
}

// Pop takes the entry that First returned.
func (o *order) Pop() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.list[0] = nil // the rest of the list keeps its memory
	o.list = o.list[1:]
	o.taken++
}

// Empty reports whether no entry waits, complete or not.
func (o *order) Empty() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.list) == 0
}

// Added returns the position of the newest entry.
func (o *order) Added() uint64 {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.added
}

// Taken returns the position of the last entry that left the list.
func (o *order) Taken() uint64 {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.taken
}

// PushPacket adds a packet as Push does, and counts it as queued.
func (o *order) PushPacket(it *entry, c *counters) error {
	c.queuedPackets.Add(1)
	err := o.Push(it)
	if err != nil {
		c.queuedPackets.Add(^uint64(0))
	}
	return err
}
