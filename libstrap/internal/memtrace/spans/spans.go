// Package spans maps ranges of pages to values. So a row of a trace takes memory for its two ends
// and not for each of its pages.
package spans

import (
	"slices"
	"sort"
)

// Span gives each of the pages [Low, High) the same value.
type Span[V comparable] struct {
	Low, High uint64
	Value     V
}

// Map holds spans that do not overlap. A page without a span has the zero value of V, so no span
// has that value. Spans that touch and have equal values are joined into one. The zero Map is empty.
//
// The spans stand in the leaves of a B-tree, in the order of their pages. The tree knows how
// many pages with a value are below each node. So the time of a search, a change or a count of
// pages grows with the logarithm of the number of spans.
type Map[V comparable] struct {
	root   node[V]
	count  int
	joined []Span[V] // memory that Set reuses
}

type node[V comparable] struct {
	spans []Span[V]  // in a leaf its spans; in other nodes a copy of the last span of each node below
	below []child[V] // nil in a leaf
}

type child[V comparable] struct {
	*node[V]
	pages uint64 // that have a value
}

// mostSpans is how many spans a node may hold before it is split.
const mostSpans = 128

// behind returns the index of the first span that ends behind a page, or len(n.spans) without one.
func (n *node[V]) behind(page uint64) int {
	low, high := 0, len(n.spans)
	for low < high {
		if middle := int(uint(low+high) / 2); n.spans[middle].High > page {
			high = middle
		} else {
			low = middle + 1
		}
	}
	return low
}

// behind returns the first span that ends behind a page, or nil if there is none. The span is valid
// until the next change.
func (m *Map[V]) behind(page uint64) *Span[V] {
	for n := &m.root; ; {
		switch i := n.behind(page); {
		case i == len(n.spans):
			return nil
		case n.below == nil:
			return &n.spans[i]
		default:
			n = n.below[i].node
		}
	}
}

// Len returns the number of spans.
func (m *Map[V]) Len() int { return m.count }

// At returns the value of a page, which is zero if no span holds the page.
func (m *Map[V]) At(page uint64) (v V) {
	if s := m.behind(page); s != nil && s.Low <= page {
		return s.Value
	}
	return v
}

// Each calls f for the pages [low, high) in order, cut where their value changes. It includes the
// pages of value zero. f must not change the map.
func (m *Map[V]) Each(low, high uint64, f func(low, high uint64, v V)) {
	if low >= high {
		return
	}
	var none V
	m.root.each(low, high, func(s *Span[V]) {
		if s.Low > low {
			f(low, s.Low, none)
			low = s.Low
		}
		end := min(s.High, high)
		f(low, end, s.Value)
		low = end
	})
	if low < high {
		f(low, high, none)
	}
}

// each calls f for the spans that have some of the pages [low, high).
func (n *node[V]) each(low, high uint64, f func(*Span[V])) {
	for i := n.behind(low); i < len(n.spans); i++ {
		s := &n.spans[i]
		switch {
		case n.below != nil:
			n.below[i].each(low, high, f)
		case s.Low < high:
			f(s)
		}
		if s.High >= high {
			return
		}
	}
}

// Set replaces the values of the pages [low, high) by the spans `with`. These lie in [low, high),
// in order and without overlaps. Pages between them get the value zero.
func (m *Map[V]) Set(low, high uint64, with ...Span[V]) {
	// Replace the spans that touch [low, high) too: the new spans may have to join with them.
	from, to := low, high
	joined := m.joined[:0]
	s := m.behind(max(low, 1) - 1)
	if s != nil && s.Low < low {
		from = s.Low
		joined = Join(joined, Span[V]{s.Low, low, s.Value})
	}
	for _, w := range with {
		joined = Join(joined, w)
	}
	if s != nil && s.High <= high {
		s = m.behind(high)
	}
	if s != nil && s.Low <= high {
		to = s.High
		joined = Join(joined, Span[V]{high, s.High, s.Value})
	}
	m.joined = joined
	m.count += m.root.replace(from, to, joined)
	for len(m.root.spans) > mostSpans {
		old := m.root
		m.root = node[V]{}
		m.root.put(0, 0, old.split(nil))
	}
	for len(m.root.below) == 1 {
		m.root = *m.root.below[0].node
	}
}

// Join appends a span to spans that end at or before its beginning. If it touches the last one and
// both have equal values, Join makes the last one longer. It drops a span that is empty or has the
// value zero.
func Join[V comparable](spans []Span[V], s Span[V]) []Span[V] {
	var none V
	if s.Low >= s.High || s.Value == none {
		return spans
	}
	if n := len(spans); n > 0 && spans[n-1].High == s.Low && spans[n-1].Value == s.Value {
		spans[n-1].High = s.High
		return spans
	}
	return append(spans, s)
}

// replace puts the spans `with` in the place of those in [from, to). No span crosses from or to.
// replace returns how many more spans there are now.
func (n *node[V]) replace(from, to uint64, with []Span[V]) (more int) {
	i := n.behind(from)
	if n.below == nil {
		end := i
		for end < len(n.spans) && n.spans[end].Low < to {
			end++
		}
		n.spans = slices.Replace(n.spans, i, end, with...)
		return len(with) - (end - i)
	}
	i = min(i, len(n.spans)-1)
	var some [4]child[V]
	pieces := some[:0]
	end := i
	for last := false; !last && end < len(n.spans); end++ {
		last = n.spans[end].High >= to
		more += n.below[end].replace(from, to, with)
		pieces = n.below[end].split(pieces)
		with = nil
	}
	n.put(i, end, pieces)
	for j := i + len(pieces) - 1; j >= i-1; j-- {
		n.merge(j)
	}
	return more
}

// split appends a node to pieces. It cuts a node of more than mostSpans spans into several, and
// appends nothing for an empty node.
func (n *node[V]) split(pieces []child[V]) []child[V] {
	const half = mostSpans / 2
	switch size := len(n.spans); {
	case size > mostSpans:
		for at, end := 0, half; at < size; at, end = end, end+half {
			if size-end < half {
				end = size
			}
			piece := node[V]{spans: moved(n.spans[at:end])}
			if n.below != nil {
				piece.below = moved(n.below[at:end])
			}
			pieces = append(pieces, piece.child())
		}
	case size > 0:
		pieces = append(pieces, n.child())
	}
	return pieces
}

// moved returns a copy with room for the spans that a Set may add to a full node before the node is
// split.
func moved[T any](of []T) []T {
	return append(make([]T, 0, mostSpans+2), of...)
}

func (n *node[V]) child() child[V] {
	c := child[V]{node: n}
	if n.below == nil {
		c.pages = pagesOf(n.spans)
	}
	for i := range n.below {
		c.pages += n.below[i].pages
	}
	return c
}

func pagesOf[V comparable](spans []Span[V]) (pages uint64) {
	for i := range spans {
		pages += spans[i].High - spans[i].Low
	}
	return pages
}

// put replaces the nodes [i, end) below a node by `with`.
func (n *node[V]) put(i, end int, with []child[V]) {
	n.below = slices.Replace(n.below, i, end, with...)
	if len(with) != end-i {
		n.spans = slices.Replace(n.spans, i, end, make([]Span[V], len(with))...)
	}
	for j, c := range with {
		n.spans[i+j] = c.spans[len(c.spans)-1]
	}
	if len(n.below) == 0 {
		n.below = nil // an empty leaf
	}
}

// merge joins the nodes i and i+1 below a node if both are short. Otherwise a node with a few spans
// would keep the memory of a full one.
func (n *node[V]) merge(i int) {
	if i < 0 || i+1 >= len(n.below) {
		return
	}
	a, b := n.below[i].node, n.below[i+1].node
	if len(a.spans)+len(b.spans) <= mostSpans/2 {
		a.spans = append(a.spans, b.spans...)
		a.below = append(a.below, b.below...)
		n.put(i, i+2, []child[V]{a.child()})
	}
}

// From returns how many pages from this page on have a value other than zero, and the value of this
// page.
func (m *Map[V]) From(page uint64) (pages uint64, v V) {
	pages, first := m.pagesFrom(func(n *node[V]) int { return n.behind(page) })
	if first != nil && first.Low <= page {
		return pages - (page - first.Low), first.Value
	}
	return pages, v
}

// Behind finds the first span with a value for which behind is true, and returns how many pages have
// a value from there on. behind must be true for the values of all later spans too.
func (m *Map[V]) Behind(behind func(V) bool) uint64 {
	pages, _ := m.pagesFrom(func(n *node[V]) int {
		return sort.Search(len(n.spans), func(i int) bool { return behind(n.spans[i].Value) })
	})
	return pages
}

// pagesFrom returns the first span that find chooses, and how many pages have a value from that
// span on. find returns the index of this span in a node, or the number of the node's spans if there
// is none.
func (m *Map[V]) pagesFrom(find func(*node[V]) int) (pages uint64, first *Span[V]) {
	for n := &m.root; ; {
		i := find(n)
		switch {
		case i == len(n.spans):
			return pages, nil
		case n.below == nil:
			return pages + pagesOf(n.spans[i:]), &n.spans[i]
		}
		for _, c := range n.below[i+1:] {
			pages += c.pages
		}
		n = n.below[i].node
	}
}

// All calls f for each span in order. f may change the span's value, but must not make it equal to
// that of a span that touches it.
func (m *Map[V]) All(f func(*Span[V])) { m.root.all(f) }

func (n *node[V]) all(f func(*Span[V])) {
	for i := range n.spans {
		if n.below == nil {
			f(&n.spans[i])
			continue
		}
		below := n.below[i].node
		below.all(f)
		n.spans[i] = below.spans[len(below.spans)-1]
	}
}
