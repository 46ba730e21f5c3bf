// Passes blocks to stages that run at the same time.

package analyse

import (
	"fmt"
	"runtime/debug"
	"sync"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// stage is one of the analyses that run at the same time. take is called with every block in order,
// by one goroutine at a time. It must not change the block, nor keep it after it returns.
type stage interface {
	take(*block) error
}

// pipeline passes blocks to stages. Each stage takes the blocks in order. A worker runs the idle
// stage that has the most blocks left to take.
type pipeline struct {
	mu      sync.Mutex
	change  sync.Cond
	lanes   []lane
	queue   []*block // blocks that at least one stage has not taken yet
	first   int      // number of the block queue[0]
	free    []*block
	err     error // the first error of a stage
	stopped bool
	workers sync.WaitGroup
}

type lane struct {
	stage stage
	next  int // number of the block to take next
	busy  bool
}

// queued is the most blocks that wait for the slowest stage.
const queued = 24

func newPipeline(stages []stage, workers int) *pipeline {
	p := &pipeline{}
	p.change.L = &p.mu
	for _, s := range stages {
		p.lanes = append(p.lanes, lane{stage: s})
	}
	for range workers {
		p.workers.Add(1)
		go p.work()
	}
	return p
}

// block returns an empty block to fill. It waits while the queue is full.
func (p *pipeline) block() (*block, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.err == nil && !p.stopped && len(p.queue) >= queued {
		p.change.Wait()
	}
	if err := p.state(); err != nil {
		return nil, err
	}
	if n := len(p.free); n > 0 {
		b := p.free[n-1]
		p.free = p.free[:n-1]
		return b, nil
	}
	return newBlock(), nil
}

func (p *pipeline) put(b *block) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.state(); err != nil {
		return err
	}
	if len(p.lanes) == 0 {
		b.clear()
		p.free = append(p.free, b)
		return nil
	}
	p.queue = append(p.queue, b)
	p.change.Broadcast()
	return nil
}

// drain waits until every stage has taken every block.
func (p *pipeline) drain() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.err == nil && !p.stopped && len(p.queue) > 0 {
		p.change.Wait()
	}
	return p.state()
}

// stop ends the workers and waits for them. Blocks may be left in the queue.
func (p *pipeline) stop() {
	p.mu.Lock()
	p.stopped = true
	p.change.Broadcast()
	p.mu.Unlock()
	p.workers.Wait()
}

func (p *pipeline) state() error {
	if p.err == nil && p.stopped {
		return errClosed
	}
	return p.err
}

var errClosed = status.New(status.InvalidState, "the analyser is closed")

func (p *pipeline) work() {
	defer p.workers.Done()
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.err == nil && !p.stopped {
		l := p.behind()
		if l == nil {
			p.change.Wait()
			continue
		}
		b := p.queue[l.next-p.first]
		l.busy = true
		p.mu.Unlock()
		err := guarded(func() error { return l.stage.take(b) })
		p.mu.Lock()
		l.busy = false
		l.next++
		if err != nil && p.err == nil {
			p.err = err
		}
		p.retire()
		p.change.Broadcast()
	}
}

// behind returns the idle lane with the most blocks left to take, or nil if there is none.
func (p *pipeline) behind() *lane {
	var most *lane
	for i := range p.lanes {
		l := &p.lanes[i]
		if !l.busy && l.next < p.first+len(p.queue) && (most == nil || l.next < most.next) {
			most = l
		}
	}
	return most
}

// retire frees the blocks that every stage has taken.
func (p *pipeline) retire() {
	least := p.lanes[0].next
	for _, l := range p.lanes[1:] {
		least = min(least, l.next)
	}
	for ; p.first < least; p.first++ {
		b := p.queue[0]
		b.clear()
		p.free = append(p.free, b)
		p.queue = p.queue[1:]
	}
}

// guarded calls f and returns its error. It turns a panic into an error.
func guarded(f func() error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = status.New(status.Internal, "panic in the analysis: %s\n%s", fmt.Sprint(r), debug.Stack())
		}
	}()
	return f()
}

// parallel calls f(worker, i) for i from 0 to n-1, on up to `workers` goroutines. After an error it
// makes no further calls and returns that error.
func parallel(workers, n int, f func(worker, i int) error) error {
	var mu sync.Mutex
	var first error
	next := 0
	claim := func(err error) int {
		mu.Lock()
		defer mu.Unlock()
		if err != nil && first == nil {
			first = err
		}
		if first != nil || next == n {
			return -1
		}
		next++
		return next - 1
	}
	var group sync.WaitGroup
	for w := range min(workers, n) {
		group.Add(1)
		go func() {
			defer group.Done()
			for i := claim(nil); i >= 0; {
				i = claim(guarded(func() error { return f(w, i) }))
			}
		}()
	}
	group.Wait()
	return first
}
