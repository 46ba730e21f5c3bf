// Keeps values that are used again, one for each processor.

package codec

import "github.com/libstrap/strap/libstrap/internal/procs"

// spares keeps values that are used again: one for each processor. A sync.Pool would keep some for each
// thread that may run Go code, of which a session and a reader make more.
type spares[T any] struct {
	kept   chan T
	create func() T
}

func newSpares[T any](create func() T) spares[T] {
	return spares[T]{make(chan T, procs.Count), create}
}

// Get returns a kept value, or a new one.
func (s *spares[T]) Get() T {
	select {
	case v := <-s.kept:
		return v
	default:
		return s.create()
	}
}

// Put keeps a value, if there is room.
func (s *spares[T]) Put(v T) {
	select {
	case s.kept <- v:
	default:
	}
}
