// Package stopwatch sums durations, including those still running.
package stopwatch

import (
	"sync"
	"time"
)

// Stopwatch sums laps, which may overlap. The zero value has no laps. Several goroutines may use it
// at once.
type Stopwatch struct {
	mu   sync.Mutex
	done time.Duration // of the laps that have ended
	open int           // laps under way
	at   time.Duration // sum of the start times of the laps under way, since epoch
}

// epoch is the zero of start times. As durations since epoch, start times can be summed.
var epoch = time.Now()

// Start begins a lap. The caller must call stop once, which ends it.
func (s *Stopwatch) Start() (stop func()) { return s.StartAt(time.Now()) }

// StartAt is Start for a lap that began at an earlier time.
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

// Total returns the sum of all laps. A lap under way counts until now.
func (s *Stopwatch) Total() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.done + time.Duration(s.open)*time.Since(epoch) - s.at
}
