package analyse

import "unsafe"

// pool is memory for many arrays that are given up together. It comes in pieces that
// grow until they get huge pages: where memory is new a stage would else spend more
// time in page faults than in its work.
type pool[T byte | uint32 | uint64] struct {
	pieces [][]T
	next   int // of the pieces, the first that is unused
	rest   []T // of the piece in use
}

// Bytes of a pool's pieces.
const (
	leastPiece = 64 << 10
	mostPiece  = hugePage
)

// take gives n elements of any values.
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

// reset takes all that was given back.
func (p *pool[T]) reset() { p.next, p.rest = 0, nil }
