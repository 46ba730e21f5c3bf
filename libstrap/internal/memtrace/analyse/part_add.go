// Adds a partial analysis to the stages of an analysis.

package analyse

import (
	"slices"

	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
)

// addPart adds a partial analysis to the stages, behind the parts that were added before.
func (a *Analyser) addPart(r *partReader) error {
	p := &addedPart{Analyser: a, partReader: r}
	for _, add := range []func() error{
		p.addTypes, p.addRegions, p.addPages, p.addStores, p.addStrides, p.addFirsts, p.addLasts,
		p.addGaps, p.addGapSums, p.addGapLengths, p.addRows,
	} {
		if err := add(); err != nil {
			return err
		}
	}
	return nil
}

// addedPart is a partial analysis that is being added. typeOf and regionOf have the numbers of its types
// and regions in the analysis.
type addedPart struct {
	*Analyser
	*partReader
	typeOf, regionOf []uint32
}

func (p *addedPart) addTypes() error {
	types, _, err := p.types()
	for _, name := range types {
		p.typeOf = append(p.typeOf, p.filler.typeOf(name))
	}
	return err
}

// mapped returns the number in the analysis of a region or type of the part.
func (p *addedPart) mapped(to []uint32, number uint64) (uint32, error) {
	if number >= uint64(len(to)) {
		return 0, p.corrupt("it has %d regions or types, and names number %d", len(to), number)
	}
	return to[number], nil
}

func (p *addedPart) addRegions() error {
	return p.read(partRegions, func(c [][]uint64) error {
		for i, id := range c[0] {
			kind, err := p.mapped(p.typeOf, c[1][i])
			if err != nil {
				return err
			}
			region, fresh := p.filler.regions.number(int64(id))
			if fresh {
				p.filler.regionType = append(p.filler.regionType, kind)
			}
			p.regionOf = append(p.regionOf, region)
			n := [2]uint64{c[2][i], c[3][i]}
			if p.needs&needCounts != 0 {
				p.stages.counts[0].merge(region, regionCounts{
					n:     n,
					first: [2]int64{int64(c[4][i]), int64(c[6][i])},
					last:  [2]int64{int64(c[5][i]), int64(c[7][i])},
				})
			}
			if len(p.stages.strides) == 0 {
				continue
			}
			earliest, err := p.mapped(p.typeOf, c[8][i])
			if err != nil {
				return err
			}
			p.stages.strides[0].merge(region, &regionStrides{
				n: n[0] + n[1], kind: earliest,
				start: spot{c[9][i], c[10][i]}, address: c[11][i], page: c[12][i],
				same: c[13][i], first: c[14][i], firsts: c[15][i], steps: c[16][i],
				total: sum{lo: c[17][i], hi: c[18][i]},
			})
		}
		if len(p.stages.strides) > 0 {
			return p.stages.strides[0].spillOver()
		}
		return nil
	})
}

func (s *counts) merge(region uint32, with regionCounts) {
	s.grow(int(region) + 1)
	r := &s.regions[region]
	for op := range with.n {
		r.n[op] += with.n[op]
		r.first[op] = min(r.first[op], with.first[op])
		r.last[op] = max(r.last[op], with.last[op])
	}
}

// merge adds the accesses of a part to a region, without the strides that are in records.
func (s *strides) merge(region uint32, with *regionStrides) {
	s.regions = grown(s.regions, int(region)+1)
	r := &s.regions[region]
	switch r.n {
	case 0:
		r.kind, r.start, r.first = with.kind, with.start, with.first
	case 1:
		r.first = distance(with.start.address, r.address)
		fallthrough
	default:
		s.step(r, with.start.address, with.start.page)
	}
	r.n += with.n
	r.address, r.page = with.address, with.page
	r.same += with.same
	r.steps += with.steps
	r.total.merge(with.total)
	s.addFirstStrides(r, with.first, with.firsts)
}

// fewFirsts is the most strides of one length that become values of their own. The median reads all values
// of the region for each run of others, and nearly every part has a stride of its own as its first.
const fewFirsts = 64

// addFirstStrides adds n strides of the length that a part has as first. Their sum is counted already.
func (s *strides) addFirstStrides(r *regionStrides, length, n uint64) {
	if length == r.first {
		r.firsts += n
		return
	}
	if n <= fewFirsts {
		for range n {
			r.values.add(length, &s.store)
		}
		return
	}
	if at := slices.IndexFunc(r.others, func(o run) bool { return o.value == length }); at >= 0 {
		r.others[at].n += n
		return
	}
	r.others = append(r.others, run{length, n})
}

// reaches reads a table of reaches. If it has no column of values, their value is 0.
func (p *addedPart) reaches(t partTable, to []uint32, each func(*reach) error) error {
	return p.read(t, func(c [][]uint64) error {
		for i, number := range c[0] {
			n, err := p.mapped(to, number)
			if err != nil {
				return err
			}
			r := reach{number: n, low: c[1][i], n: c[2][i]}
			if len(c) > 3 {
				r.value = c[3][i]
			}
			if err := each(&r); err != nil {
				return err
			}
		}
		return nil
	})
}

func (p *addedPart) addPages() error {
	return p.reaches(partPages, p.regionOf, func(r *reach) error {
		s := p.Analyser.stages.pages[0]
		s.regions = grown(s.regions, int(r.number)+1)
		if r.n >= longRow {
			s.row(r.low, r.low+r.n, r.number)
			return nil
		}
		for page := r.low; page-r.low < r.n; page++ {
			s.access(page, r.number)
		}
		return nil
	})
}

func (p *addedPart) addStores() error {
	return p.reaches(partStores, p.regionOf, func(r *reach) error {
		s := p.stages.writes[0]
		s.regions = grown(s.regions, int(r.number)+1)
		for range min(r.value, 2) {
			r.each(func(address uint64) {
				s.access(hashPair(address, r.number), address, r.number)
			}, func(low, high uint64) {
				s.row(low, high, r.number)
			})
		}
		return nil
	})
}

// each calls single with the addresses of a reach, or long with its pages [low, high) if they are many.
func (r *reach) each(single func(address uint64), long func(low, high uint64)) {
	if r.n >= longRow {
		long(r.low>>trace.PageShift, r.low>>trace.PageShift+r.n)
		return
	}
	for i := range r.n {
		single(r.low + i<<trace.PageShift)
	}
}

func (p *addedPart) addStrides() error {
	return p.read(partStrides, func(c [][]uint64) error {
		s := p.stages.strides[0]
		for i, number := range c[0] {
			region, err := p.mapped(p.regionOf, number)
			if err != nil {
				return err
			}
			if err := p.addChain(&s.regions[region].values, c[1:], i); err != nil {
				return err
			}
		}
		return nil
	})
}

// addChain adds values that stay in the file of the part. columns has where they are, in row i.
func (p *addedPart) addChain(v *values, columns [][]uint64, i int) error {
	width, last, n, all := columns[0][i], recordPlace{at: int64(columns[1][i])}, columns[4][i], columns[5][i]
	if columns[2][i] > mostRecord || columns[3][i] > groupValues {
		return p.corrupt("a record has %d values and %d groups", columns[2][i], columns[3][i])
	}
	last.n, last.groups = uint32(columns[2][i]), uint32(columns[3][i])
	switch {
	case width == 4 && all>>32 == 0:
		v.narrow.chains = append(v.narrow.chains, chain{p.records, last, n})
		v.narrow.any |= uint32(all)
	case width == 8 && last.groups == 0:
		w := v.wider()
		w.chains = append(w.chains, chain{p.records, last, n})
		w.any |= all
	default:
		return p.corrupt("values of %d bytes with the bits %#x, in %d groups", width, all, last.groups)
	}
	return nil
}

// addFirsts counts the gaps between the last access to each address in the parts before and the first one
// in this part.
func (p *addedPart) addFirsts() error { return p.addAccesses(partFirsts) }

// addLasts makes the last access to each address in this part the latest one. Between it and the first one
// there is no gap of its own: addGaps counts the gaps within the part.
func (p *addedPart) addLasts() error {
	for _, s := range p.stages.gaps {
		s.silent = true
		defer func() { s.silent = false }()
	}
	return p.addAccesses(partLasts)
}

func (p *addedPart) addAccesses(t partTable) error {
	return p.reaches(t, p.typeOf, func(r *reach) error {
		s := p.stages.gaps[0]
		s.types = grown(s.types, int(r.number)+1)
		of := &s.types[r.number]
		r.each(func(address uint64) {
			s.access(of, hash(address), address, r.value)
		}, func(low, high uint64) {
			s.row(of, low, high, r.value)
		})
		if s.held > s.limit {
			return s.spillOver()
		}
		return nil
	})
}

func (p *addedPart) addGaps() error {
	return p.gaps(partGaps, func(t *typeGaps, c [][]uint64, i int) error {
		power := c[1][i]
		if power >= powers {
			return p.corrupt("a gap counts 1 << %d times", power)
		}
		v := &t.powers[power]
		v.narrow.power = int(power)
		return p.addChain(v, c[2:], i)
	})
}

func (p *addedPart) addGapSums() error {
	return p.gaps(partGapSums, func(t *typeGaps, c [][]uint64, i int) error {
		t.total.merge(sum{lo: c[1][i], hi: c[2][i]})
		return nil
	})
}

func (p *addedPart) addGapLengths() error {
	return p.gaps(partGapLengths, func(t *typeGaps, c [][]uint64, i int) error {
		length := c[1][i]
		if length >= uint64(len(t.log2)) {
			return p.corrupt("a gap of 1 << %d ns", length)
		}
		t.log2[length] += c[2][i]
		return nil
	})
}

// gaps reads a table of gaps. It calls each with the type of row i, and with all columns.
func (p *addedPart) gaps(t partTable, each func(of *typeGaps, columns [][]uint64, i int) error) error {
	return p.read(t, func(c [][]uint64) error {
		s := p.stages.gaps[0]
		for i, number := range c[0] {
			kind, err := p.mapped(p.typeOf, number)
			if err != nil {
				return err
			}
			s.types = grown(s.types, int(kind)+1)
			if err := each(&s.types[kind], c, i); err != nil {
				return err
			}
		}
		return nil
	})
}

// addRows adds the kept rows to the journal.
func (p *addedPart) addRows() error {
	b := newBlock()
	flush := func() error {
		if b.n == 0 {
			return nil
		}
		defer b.clear()
		return p.journal.take(b)
	}
	err := p.read(partRows, func(c [][]uint64) error {
		for i := range c[0] {
			region, err := p.mapped(p.regionOf, c[4][i])
			if err != nil {
				return err
			}
			kind, err := p.mapped(p.typeOf, c[5][i])
			if err != nil {
				return err
			}
			b.append(&row{
				time: int64(c[0][i]), address: c[1][i], page: c[2][i], pages: c[3][i],
				region: region, tag: kind<<1 | uint32(c[6][i]&1),
			})
			if b.n == blockRows {
				if err := flush(); err != nil {
					return err
				}
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	return flush()
}
