// Allocates many arrays that are freed together.

package analyse

import "unsafe"

// pool allocates many arrays that are freed together. It gets memory in pieces. The pieces grow until
// they fill huge pages. With small pages a stage would spend more time in page faults of new memory
// than in its work.
type pool[T byte | uint32 | uint64] struct {
	pieces [][]T
	next   int // the first unused piece
	rest   []T // the free rest of the piece in use
}

// Sizes of a pool's pieces, in bytes.
const (
	leastPiece = 64 << 10
	mostPiece  = hugePage
)

// take returns n elements. Their values are arbitrary.
func (p *pool[T]) take(n int) []T {
	for len(p.rest) < n {
		if p.next == len(p.pieces) {
			var one T
			size := min(leastPiece<<min(p.next, 32), mostPiece)
			p.pieces = append(p.pieces, zeros[T](max(n, size/int(unsafe.Sizeof(one)))))
		}
		p.rest = p.pieces[p.next]
		p.next++
	}
	v := p.rest[:n:n]
	p.rest = p.rest[n:]
	return v
}

// reset frees all arrays; take reuses their memory.
func (p *pool[T]) reset() { p.next, p.rest = 0, nil }
