// The rows without packets, which say what could not be captured.

package session

import (
	"errors"
	"strings"
)

const (
	// maxNotes bounds the notes that wait for the writer, which no region bounds. Further notes are
	// only counted.
	maxNotes = 4096
	// maxMessage bounds the bytes of a note's message.
	maxMessage = 4 << 10

	abandonedMessage = "abandoned before all of it was captured"
)

// notes puts rows without packets into the order.
type notes struct {
	entries  *entries
	order    *order
	ring     *ring // nil: notes go to the order at once
	counters *counters
}

// add adds a note about a tensor that could not be captured, and counts the tensor as failed.
func (n *notes) add(from *origin, t *Tensor, message string) error {
	if err := n.push(n.entry(from, t, message)); err != nil {
		return err
	}
	n.counters.noted.Add(1)
	return nil
}

// entry returns a note for push. It returns nil if maxNotes notes wait already.
func (n *notes) entry(from *origin, t *Tensor, message string) *entry {
	if n.counters.queuedNotes.Load() >= maxNotes {
		return nil
	}
	it := n.entries.get(noteEntry, from, t)
	it.row.Source, it.row.Error = t.source(), shortened(message)
	n.counters.queuedNotes.Add(1)
	return it
}

// push adds a note that the caller counts; nil: it does nothing.
func (n *notes) push(it *entry) error {
	if it == nil {
		return nil
	}
	push := n.order.Push
	if n.ring != nil {
		push = n.ring.push
	}
	err := push(it)
	if err != nil {
		n.counters.queuedNotes.Add(-1)
	}
	if errors.Is(err, errGaveWay) { // with its step
		return nil
	}
	return err
}

// shortened cuts a note's message to the 4 KiB that the index keeps of it.
func shortened(message string) string {
	if len(message) <= maxMessage {
		return message
	}
	const mark = "..."
	return strings.ToValidUTF8(message[:maxMessage-len(mark)], "") + mark
}
