// Package stopwatch adds up the time that things take, those under way included.
package stopwatch

import (
	"sync"
	"time"
)

// Stopwatch is the sum of laps, which may overlap. The zero value has none. It is safe for
// use by several goroutines.
type Stopwatch struct {
	mu   sync.Mutex
	done time.Duration // of the laps that have ended
	open int           // laps under way
	at   time.Duration // sum of when they began, since epoch
}

// Laps are numbers since then, so that those under way can be added up.
var epoch = time.Now()

// Start begins a lap; the function that it gives ends it, and is to be called once.
func (s *Stopwatch) Start() (stop func()) { return s.StartAt(time.Now()) }

// StartAt is Start for a lap that began already.
func (s *Stopwatch) StartAt(at time.Time) (stop func()) {
	began := at.Sub(epoch)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.open++
	s.at += began
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.open--
		s.at -= began
		s.done += time.Since(epoch) - began
	}
}

// Total is the sum of all laps; of those under way, until now.
func (s *Stopwatch) Total() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.done + time.Duration(s.open)*time.Since(epoch) - s.at
}
