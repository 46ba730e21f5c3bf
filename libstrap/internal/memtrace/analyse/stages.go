// Chooses the stages that the tables need.

package analyse

// need is a set of stages.
type need uint

const (
	needCounts need = 1 << iota
	needWrites
	needPages
	needBandwidth
	needStrides
	needGaps
	needPageWindows
	needDistances

	anyOrder = needCounts | needWrites | needPages | needBandwidth
	inOrder  = needStrides | needGaps | needPageWindows | needDistances
)

// stages are the stages of an analysis. A slice has the shares of one stage.
type stages struct {
	counts      []*counts
	writes      []*writes
	pages       []*pages
	bandwidth   *bandwidth
	strides     []*strides
	gaps        []*gaps
	pageWindows *pageWindows
	distances   *distances
}

// newStages makes new stages for the tables: those in the set `which` that a table needs.
func (a *Analyser) newStages(which need) []stage {
	var all []stage
	each := func(n need, make func(share)) {
		if which&n&a.needs == 0 {
			return
		}
		for mine := range uint64(1) << a.shardBits() {
			make(share{mine, a.shardBits()})
		}
	}
	s := &a.stages
	if which&inOrder != 0 {
		s.strides, s.gaps = nil, nil
	}
	each(needCounts, func(sh share) {
		s.counts = append(s.counts, &counts{share: sh})
		all = append(all, s.counts[sh.mine])
	})
	each(needWrites, func(sh share) {
		s.writes = append(s.writes, &writes{share: sh})
		all = append(all, s.writes[sh.mine])
	})
	each(needPages, func(sh share) {
		s.pages = append(s.pages, &pages{share: sh})
		all = append(all, s.pages[sh.mine])
	})
	each(needStrides, func(sh share) {
		s.strides = append(s.strides, &strides{share: sh, store: a.store(1 << a.shardBits())})
		all = append(all, &untilLate{s.strides[sh.mine]})
	})
	each(needGaps, func(sh share) {
		s.gaps = append(s.gaps, &gaps{share: sh, store: a.store(1 << a.shardBits()), edges: a.part != nil && !a.merging})
		all = append(all, &untilLate{s.gaps[sh.mine]})
	})
	wanted := which & a.needs
	if wanted&needBandwidth != 0 {
		s.bandwidth = newBandwidth(a.options.Windows)
		all = append(all, s.bandwidth)
	}
	if wanted&needPageWindows != 0 {
		s.pageWindows = newPageWindows(a.options.Windows)
		all = append(all, &untilLate{s.pageWindows})
	}
	if wanted&needDistances != 0 {
		s.distances = &distances{}
		all = append(all, &untilLate{s.distances})
	}
	return all
}

// orderedStage is a stage that needs the rows in the order of time.
type orderedStage interface {
	stage
	// forget frees all that the stage keeps.
	forget()
}

// untilLate ends an ordered stage at the block with the first late row. replay runs the stage anew.
type untilLate struct{ orderedStage }

func (u *untilLate) take(b *block) error {
	if !b.late {
		return u.orderedStage.take(b)
	}
	u.forget()
	return nil
}

func (s *strides) forget() { s.regions, s.store = nil, store{spill: s.spill} }
func (s *gaps) forget()    { s.types, s.store = nil, store{spill: s.spill} }
