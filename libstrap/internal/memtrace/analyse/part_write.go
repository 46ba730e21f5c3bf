// Turns the stages of a partial analysis into the tables of its file.

package analyse

import (
	"cmp"
	"io"
	"slices"
	"unsafe"

	"github.com/apache/arrow/go/v17/arrow"

	"github.com/libstrap/strap/libstrap/internal/memtrace/spans"
	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
)

// reach is a value of n adjacent pages of a region or type. low is the first page. In tables of addresses
// it is an address, and with n > 1 it is the start of the first page.
type reach struct {
	number        uint32 // of the region or type
	low, n, value uint64
}

// writeTables writes the tables of a partial analysis. Stages that the kind of the trace does not need give
// tables without rows.
func (a *Analyser) writeTables(w io.Writer, metadata arrow.Metadata) error {
	if err := writeTypes(w, a.filler.types, metadata); err != nil {
		return err
	}
	s := &a.stages
	for _, t := range []struct {
		table partTable
		rows  func(add func(...uint64)) error
	}{
		{partRegions, a.partRegions},
		{partPages, reached(s.pages, (*pages).reaches, func(add func(...uint64), r *reach) {
			add(uint64(r.number), r.low, r.n)
		})},
		{partStores, reached(s.writes, (*writes).reaches, addReach)},
		{partStrides, a.partStrides},
		{partFirsts, reached(s.gaps, (*gaps).firstReaches, addReach)},
		{partLasts, reached(s.gaps, (*gaps).lastReaches, addReach)},
		{partGaps, a.partGaps},
		{partGapSums, a.partGapSums},
		{partGapLengths, a.partGapLengths},
		{partRows, a.partRows},
	} {
		if err := t.table.write(w, t.rows); err != nil {
			return err
		}
	}
	return nil
}

func addReach(add func(...uint64), r *reach) { add(uint64(r.number), r.low, r.n, r.value) }

// reached returns the rows of a table of reaches. A partial analysis has one share of each stage, or none.
func reached[S any](shares []S, of func(S) []reach, write func(func(...uint64), *reach)) func(func(...uint64)) error {
	return func(add func(...uint64)) error {
		for _, s := range shares {
			all := of(s)
			for i := range all {
				write(add, &all[i])
			}
		}
		return nil
	}
}

// byPlace sorts reaches by region or type, and by page or address.
func byPlace(v []reach) []reach {
	slices.SortFunc(v, func(a, b reach) int {
		return cmp.Or(cmp.Compare(a.number, b.number), cmp.Compare(a.low, b.low))
	})
	return v
}

// mostPages is above every page of an address. A row may name a higher page, which has no address.
const mostPages = 1 << (64 - trace.PageShift)

// reaches returns the pages of each region, adjacent ones as one reach.
func (s *pages) reaches() []reach {
	var v []reach
	for _, slot := range s.seen.slots {
		if slot.count != 0 {
			v = append(v, reach{number: slot.region, low: slot.key, n: 1})
		}
	}
	for region, long := range s.long {
		long.All(func(at *spans.Span[bool]) {
			v = append(v, reach{number: region, low: at.Low, n: at.High - at.Low})
		})
	}
	joined := v[:0]
	for _, r := range byPlace(v) {
		if last := len(joined) - 1; last >= 0 && r.low < mostPages {
			if l := &joined[last]; l.number == r.number && l.low+l.n >= r.low {
				l.n = max(l.n, r.low+r.n-l.low)
				continue
			}
		}
		joined = append(joined, r)
	}
	return joined
}

// reaches returns the addresses of each region that were stored to. The value is 1 if once, otherwise 2.
func (s *writes) reaches() []reach {
	var v []reach
	for _, slot := range s.stores.slots {
		if slot.count != 0 && slot.count != gone {
			v = append(v, reach{slot.region, slot.key, 1, uint64(slot.count)})
		}
	}
	for region, long := range s.long {
		long.All(func(at *spans.Span[uint32]) {
			v = append(v, reach{region, at.Low << trace.PageShift, at.High - at.Low, uint64(at.Value)})
		})
	}
	return byPlace(v)
}

func (s *gaps) firstReaches() []reach {
	var v []reach
	for t := range s.types {
		for _, r := range s.types[t].firsts {
			r.number = uint32(t)
			v = append(v, r)
		}
	}
	return byPlace(v)
}

func (s *gaps) lastReaches() []reach {
	var v []reach
	for i := range s.types {
		t := &s.types[i]
		for _, slot := range t.latest.slots {
			if slot.time != 0 && slot.time != goneTime {
				v = append(v, reach{uint32(i), slot.key, 1, slot.time - 1})
			}
		}
		t.long.All(func(at *spans.Span[uint64]) {
			v = append(v, reach{uint32(i), at.Low << trace.PageShift, at.High - at.Low, at.Value - 1})
		})
	}
	return byPlace(v)
}

func (a *Analyser) partRegions(add func(...uint64)) error {
	for i, id := range a.filler.regions.values {
		var c regionCounts
		if a.needs&needCounts != 0 {
			c = a.stages.counts[0].regions[i]
		}
		var r regionStrides
		if len(a.stages.strides) > 0 {
			r = a.stages.strides[0].regions[i]
		}
		add(
			uint64(id), uint64(a.filler.regionType[i]), c.n[0], c.n[1],
			uint64(c.first[0]), uint64(c.last[0]), uint64(c.first[1]), uint64(c.last[1]),
			uint64(r.kind), r.start.address, r.start.page, r.address, r.page, r.same, r.first, r.firsts, r.steps, r.total.lo, r.total.hi,
		)
	}
	return nil
}

// moveValues writes all strides and gaps to the file of a partial analysis.
func (a *Analyser) moveValues(w recordWriter) error {
	var r recordReader
	for _, s := range a.stages.strides {
		for i := range s.regions {
			if err := s.regions[i].copyTo(w, &s.grouper, &r); err != nil {
				return err
			}
		}
	}
	for _, s := range a.stages.gaps {
		for i := range s.types {
			for power := range s.types[i].powers {
				if err := s.types[i].powers[power].copyTo(w, &s.grouper, &r); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

func (a *Analyser) partStrides(add func(...uint64)) error {
	for _, s := range a.stages.strides {
		for i := range s.regions {
			s.regions[i].places(func(where ...uint64) { add(append([]uint64{uint64(i)}, where...)...) })
		}
	}
	return nil
}

func (a *Analyser) partGaps(add func(...uint64)) error {
	for _, s := range a.stages.gaps {
		for i := range s.types {
			for power := range s.types[i].powers {
				s.types[i].powers[power].places(func(where ...uint64) {
					add(append([]uint64{uint64(i), uint64(power)}, where...)...)
				})
			}
		}
	}
	return nil
}

func (a *Analyser) partGapSums(add func(...uint64)) error {
	for _, s := range a.stages.gaps {
		for i := range s.types {
			add(uint64(i), s.types[i].total.lo, s.types[i].total.hi)
		}
	}
	return nil
}

func (a *Analyser) partGapLengths(add func(...uint64)) error {
	for _, s := range a.stages.gaps {
		for i := range s.types {
			for length, n := range s.types[i].log2 {
				if n > 0 {
					add(uint64(i), uint64(length), n)
				}
			}
		}
	}
	return nil
}

// places calls add for the chains of a multiset whose values are all in one file.
func (v *values) places(add func(where ...uint64)) {
	placesOf(&v.narrow, add)
	if v.wide != nil {
		placesOf(v.wide, add)
	}
}

func placesOf[T uint32 | uint64](s *series[T], add func(where ...uint64)) {
	for _, c := range s.chains {
		add(uint64(unsafe.Sizeof(s.any)), uint64(c.last.at), uint64(c.last.n), uint64(c.last.groups), c.n, uint64(s.any))
	}
}

func (a *Analyser) partRows(add func(...uint64)) error {
	if !a.part.RowsKept || a.journal == nil {
		return nil
	}
	var rows []row
	var buffer []byte
	for i := range a.journal.blocks {
		var err error
		if rows, err = a.journal.blocks[i].unpack(rows[:0], a.journal.spill, &buffer); err != nil {
			return err
		}
		for _, r := range rows {
			add(uint64(r.time), r.address, r.page, r.pages, uint64(r.region), uint64(r.tag>>1), uint64(r.tag&1))
		}
	}
	return nil
}
