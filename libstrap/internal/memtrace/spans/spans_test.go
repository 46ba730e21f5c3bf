package spans

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// pages is a twin of Map with an entry for each page.
type pages map[uint64]int

func (p pages) set(low, high uint64, with ...Span[int]) {
	for page := low; page < high; page++ {
		delete(p, page)
	}
	for _, s := range with {
		for page := s.Low; page < s.High; page++ {
			if s.Value != 0 {
				p[page] = s.Value
			}
		}
	}
}

// spans returns the pages [low, high) as the longest possible spans. zero includes those of value 0.
func (p pages) spans(low, high uint64, zero bool) (out []Span[int]) {
	for page := low; page < high; page++ {
		s := Span[int]{page, page + 1, p[page]}
		switch n := len(out); {
		case s.Value == 0 && !zero:
		case n > 0 && out[n-1].High == page && out[n-1].Value == s.Value:
			out[n-1].High++
		default:
			out = append(out, s)
		}
	}
	return out
}

// checkNode checks the sizes of a node and the nodes below, and that each node has the last spans and
// numbers of pages of those below. It returns how many spans, leaves and pages there are.
func checkNode(t *testing.T, n *node[int], isRoot bool) (spans, leaves int, pages uint64) {
	t.Helper()
	if size := len(n.spans); size > mostSpans || size == 0 && !isRoot {
		t.Fatalf("a node has %d spans", size)
	}
	if n.below == nil {
		return len(n.spans), 1, pagesOf(n.spans)
	}
	if len(n.below) != len(n.spans) || isRoot && len(n.below) == 1 {
		t.Fatalf("a node has %d spans and %d nodes below", len(n.spans), len(n.below))
	}
	for i, c := range n.below {
		s, l, p := checkNode(t, c.node, false)
		if p != c.pages {
			t.Fatalf("a node has %d pages, not %d", p, c.pages)
		}
		if last := c.spans[len(c.spans)-1]; last != n.spans[i] {
			t.Fatalf("the last span of a node is %v, not %v", last, n.spans[i])
		}
		if i > 0 && len(c.spans)+len(n.below[i-1].spans) <= mostSpans/2 {
			t.Fatalf("two nodes side by side have %d and %d spans", len(n.below[i-1].spans), len(c.spans))
		}
		spans, leaves, pages = spans+s, leaves+l, pages+p
	}
	return spans, leaves, pages
}

func compare(t *testing.T, r *rand.Rand, m *Map[int], twin pages, top uint64) {
	t.Helper()
	checkNode(t, &m.root, true)
	var all []Span[int]
	m.All(func(s *Span[int]) { all = append(all, *s) })
	if want := twin.spans(0, top, false); !slices.Equal(all, want) {
		t.Fatalf("%v, not %v", all, want)
	}
	if m.Len() != len(all) {
		t.Fatalf("%d spans, not %d", m.Len(), len(all))
	}
	low := r.Uint64N(top)
	high := low + r.Uint64N(top-low)
	var seen []Span[int]
	m.Each(low, high, func(low, high uint64, v int) { seen = append(seen, Span[int]{low, high, v}) })
	if want := twin.spans(low, high, true); !slices.Equal(seen, want) {
		t.Fatalf("in [%d, %d): %v, not %v", low, high, seen, want)
	}
	page := r.Uint64N(top)
	if m.At(page) != twin[page] {
		t.Fatalf("page %d is %d, not %d", page, m.At(page), twin[page])
	}
	n := uint64(0)
	for at := range twin {
		if at >= page {
			n++
		}
	}
	if pages, v := m.From(page); pages != n || v != twin[page] {
		t.Fatalf("%d pages from %d on, which is %d, not %d and %d", pages, page, v, n, twin[page])
	}
}

// A map holds the same as its twin of single pages, with few spans and with many leaves.
func TestAMapIsItsPages(t *testing.T) {
	seeds := uint64(60)
	if testing.Short() {
		seeds = 6
	}
	for seed := range seeds {
		r := rand.New(rand.NewPCG(seed, 1))
		top := []uint64{12, 100, 5000}[seed%3]
		longest := []uint64{3, top/2 + 1}[seed/3%2]
		var m Map[int]
		twin := pages{}
		for range 1500 {
			low := r.Uint64N(top)
			high := min(low+r.Uint64N(longest), top)
			var with []Span[int]
			for at := low; at < high; {
				end := at + 1 + r.Uint64N(high-at)
				with = append(with, Span[int]{at, end, r.IntN(4)})
				at = end + r.Uint64N(2)
			}
			m.Set(low, high, with...)
			twin.set(low, high, with...)
			if r.IntN(30) == 0 || top == 12 {
				compare(t, r, &m, twin, top)
			}
		}
		compare(t, r, &m, twin, top)
	}
}

// Spans that need three levels of nodes are added and removed in any order. Their memory goes with
// them.
func TestAMapOfManySpans(t *testing.T) {
	if testing.Short() {
		t.Skip("tens of thousands of spans, and no goroutines")
	}
	const top = 60_000
	r := rand.New(rand.NewPCG(1, 1))
	var m Map[int]
	twin := pages{}
	set := func(low, high uint64, with ...Span[int]) {
		m.Set(low, high, with...)
		twin.set(low, high, with...)
	}
	for _, page := range r.Perm(top / 2) {
		low := 2 * uint64(page)
		set(low, low+1, Span[int]{low, low + 1, 1 + r.IntN(3)})
	}
	if m.Len() != top/2 || m.root.below[0].below == nil {
		t.Errorf("%d spans on fewer than three levels", m.Len())
	}
	compare(t, r, &m, twin, top)
	m.All(func(s *Span[int]) { s.Value += 10 })
	for page := range twin {
		twin[page] += 10
	}
	compare(t, r, &m, twin, top)

	var many []Span[int] // many spans in one Set
	for page := uint64(20_001); page < 40_000; page += 2 {
		many = append(many, Span[int]{page, page + 1, 1})
	}
	set(20_000, 40_000, many...)
	compare(t, r, &m, twin, top)

	for _, page := range r.Perm(top) {
		if page%1000 != 0 {
			set(uint64(page), uint64(page)+1)
		}
		if page%5000 == 1 {
			compare(t, r, &m, twin, top)
		}
	}
	if spans, leaves, _ := checkNode(t, &m.root, true); spans != 40 || leaves > 2 {
		t.Errorf("%d spans are left in %d leaves", spans, leaves)
	}
	set(0, top)
	compare(t, r, &m, twin, top)
}

func TestBehindCountsThePagesOfTheSpansThatFollow(t *testing.T) {
	var m Map[int]
	for i := range uint64(1000) { // 3 of each 4 pages; the values ascend
		m.Set(4*i, 4*i+3, Span[int]{4 * i, 4*i + 3, int(i) + 1})
	}
	for _, limit := range []int{0, 1, 500, 999, 1000, 5000} {
		n := m.Behind(func(v int) bool { return v > limit })
		if want := 3 * uint64(max(0, 1000-limit)); n != want {
			t.Errorf("behind %d: %d pages, not %d", limit, n, want)
		}
	}
}

// A terabyte, or the whole address space, takes one span for each piece that it is cut into.
func TestMemoryIsBySpans(t *testing.T) {
	var m Map[int]
	m.Set(0, 1<<52, Span[int]{0, 1 << 52, 1})
	m.Set(1<<20, 1<<40, Span[int]{1 << 20, 1 << 40, 2})
	if pages, _ := m.From(0); m.Len() != 3 || m.At(1<<51) != 1 || m.At(1<<30) != 2 || pages != 1<<52 {
		t.Errorf("%d spans, %d, %d, %d pages", m.Len(), m.At(1<<51), m.At(1<<30), pages)
	}
	m.Set(0, 1<<52)
	if pages, _ := m.From(0); m.Len() != 0 || pages != 0 {
		t.Errorf("%d spans are left", m.Len())
	}
}

func BenchmarkSet(b *testing.B) {
	r := rand.New(rand.NewPCG(1, 1))
	var m Map[uint64]
	for i := uint64(1); b.Loop(); i++ {
		low := r.Uint64N(1 << 22)
		m.Set(low, low+1, Span[uint64]{low, low + 1, i})
	}
	b.ReportMetric(float64(m.Len()), "spans")
}
