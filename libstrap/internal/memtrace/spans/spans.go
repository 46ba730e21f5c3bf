// Package spans maps stretches of pages to what is known of them, so that a row of a
// trace costs memory for its two ends and not for each of its pages.
package spans

import (
	"slices"
	"sort"
)

// Span is what is known of each of the pages [Low, High).
type Span[V comparable] struct {
	Low, High uint64
	Value     V
}

// Map holds spans that do not overlap. The zero value of V says that nothing is known of a
// page and is not held; spans side by side with one value are one. The zero Map is empty.
//
// The spans stand in chunks, in the order of their pages: a search looks at the ends of the
// chunks and then into one, and a change moves the spans of one.
type Map[V comparable] struct {
	chunks []chunk[V]
	count  int
	joined []Span[V] // memory that Set uses again
}

type chunk[V comparable] struct {
	spans []Span[V] // some
	pages uint64    // in them
}

// mostSpans bounds a chunk.
const mostSpans = 256

// place is that of a span, or behind the last: the number of its chunk, and its number in there.
type place struct{ chunk, span int }

// behind finds the first span for which ends is true; it is false of those before it.
func (m *Map[V]) behind(ends func(*Span[V]) bool) place {
	c := sort.Search(len(m.chunks), func(i int) bool {
		s := m.chunks[i].spans
		return ends(&s[len(s)-1])
	})
	if c == len(m.chunks) {
		return place{c, 0}
	}
	s := m.chunks[c].spans
	return place{c, sort.Search(len(s), func(i int) bool { return ends(&s[i]) })}
}

// Len is the number of spans.
func (m *Map[V]) Len() int { return m.count }

// At is the value of a page, zero where nothing is known of it.
func (m *Map[V]) At(page uint64) (v V) {
	if m.count == 0 {
		return v
	}
	p := m.behind(func(s *Span[V]) bool { return s.High > page })
	if p.chunk < len(m.chunks) {
		if s := &m.chunks[p.chunk].spans[p.span]; s.Low <= page {
			return s.Value
		}
	}
	return v
}

// Each shows the pages [low, high) in order, cut where their value changes, also those of
// the value zero. f must not change the map.
func (m *Map[V]) Each(low, high uint64, f func(low, high uint64, v V)) {
	var none V
	p := m.behind(func(s *Span[V]) bool { return s.High > low })
	for ; low < high && p.chunk < len(m.chunks); p = (place{p.chunk + 1, 0}) {
		for _, s := range m.chunks[p.chunk].spans[p.span:] {
			if s.Low >= high {
				break
			}
			if s.Low > low {
				f(low, s.Low, none)
				low = s.Low
			}
			end := min(s.High, high)
			f(low, end, s.Value)
			if low = end; low == high {
				return
			}
		}
		if s := m.chunks[p.chunk].spans; s[len(s)-1].High >= high {
			break
		}
	}
	if low < high {
		f(low, high, none)
	}
}

// Set replaces all that is known of the pages [low, high) by the spans `with`, which lie in
// there, in order.
func (m *Map[V]) Set(low, high uint64, with ...Span[V]) {
	// Spans that touch the pages are taken along: they may go on in the new ones.
	from := m.behind(func(s *Span[V]) bool { return s.High >= low })
	to := m.behind(func(s *Span[V]) bool { return s.Low > high })
	joined := m.joined[:0]
	if from != to {
		first := m.chunks[from.chunk].spans[from.span]
		joined = Join(joined, Span[V]{first.Low, min(first.High, low), first.Value})
	}
	for _, s := range with {
		joined = Join(joined, s)
	}
	if from != to {
		end := m.end(to)
		last := m.chunks[end.chunk].spans[end.span-1]
		joined = Join(joined, Span[V]{max(last.Low, high), last.High, last.Value})
	}
	m.joined = joined
	m.splice(from, to, joined)
}

// Join appends a span to some that end before it, unless it is empty or of the value zero.
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

// end is a place as the end of the chunk before, where it is the beginning of one.
func (m *Map[V]) end(p place) place {
	if p.span == 0 && p.chunk > 0 {
		return place{p.chunk - 1, len(m.chunks[p.chunk-1].spans)}
	}
	return p
}

// splice puts spans in the places [from, to).
func (m *Map[V]) splice(from, to place, spans []Span[V]) {
	if len(m.chunks) == 0 {
		m.chunks = []chunk[V]{{}}
	}
	if from.chunk == len(m.chunks) || from == to {
		from = m.end(from)
	}
	to = m.end(to)
	for _, c := range m.chunks[from.chunk : to.chunk+1] {
		m.count -= len(c.spans)
	}
	s := m.chunks[from.chunk].spans
	if from.chunk == to.chunk {
		s = slices.Replace(s, from.span, to.span, spans...)
	} else {
		s = append(append(s[:from.span], spans...), m.chunks[to.chunk].spans[to.span:]...)
	}
	m.count += len(s)
	var pieces []chunk[V]
	for len(s) > mostSpans {
		pieces = append(pieces, chunkOf(slices.Clone(s[:mostSpans/2])))
		s = s[mostSpans/2:]
	}
	if len(s) > 0 {
		pieces = append(pieces, chunkOf(s))
	}
	if len(pieces) == 1 && from.chunk == to.chunk {
		m.chunks[from.chunk] = pieces[0]
		return
	}
	m.chunks = slices.Replace(m.chunks, from.chunk, to.chunk+1, pieces...)
}

func chunkOf[V comparable](spans []Span[V]) chunk[V] {
	c := chunk[V]{spans: spans}
	for _, s := range spans {
		c.pages += s.High - s.Low
	}
	return c
}

// From counts the pages from one on of which something is known.
func (m *Map[V]) From(page uint64) uint64 {
	p := m.behind(func(s *Span[V]) bool { return s.High > page })
	n := m.pagesFrom(p)
	if n > 0 {
		if first := &m.chunks[p.chunk].spans[p.span]; first.Low < page {
			n -= page - first.Low
		}
	}
	return n
}

// Behind counts the pages from the first span on for whose value behind is true, in a map
// in which it is true of those that follow, too.
func (m *Map[V]) Behind(behind func(V) bool) uint64 {
	return m.pagesFrom(m.behind(func(s *Span[V]) bool { return behind(s.Value) }))
}

func (m *Map[V]) pagesFrom(p place) uint64 {
	n := uint64(0)
	for c := p.chunk; c < len(m.chunks); c++ {
		n += m.chunks[c].pages
	}
	if p.span > 0 {
		for _, s := range m.chunks[p.chunk].spans[:p.span] {
			n -= s.High - s.Low
		}
	}
	return n
}

// All shows each span in order; f may change its value, and leaves neighbours different or
// apart.
func (m *Map[V]) All(f func(*Span[V])) {
	for _, c := range m.chunks {
		for i := range c.spans {
			f(&c.spans[i])
		}
	}
}
