package stopwatch

import (
	"sync"
	"testing"
	"time"
)

func TestLapsAddUp(t *testing.T) {
	var s Stopwatch
	if got := s.Total(); got != 0 {
		t.Fatalf("a new one is at %v", got)
	}
	began := time.Now()
	first, second := s.Start(), s.Start()
	time.Sleep(20 * time.Millisecond)
	if got := s.Total(); got < 40*time.Millisecond || got > 2*time.Since(began) {
		t.Errorf("two laps under way for 20 ms are %v", got)
	}
	first()
	second()
	total := s.Total()
	if took := time.Since(began); total < 40*time.Millisecond || total > 2*took {
		t.Errorf("two laps within %v took %v", took, total)
	}
	time.Sleep(time.Millisecond)
	if got := s.Total(); got != total {
		t.Errorf("%v, and %v without a lap", total, got)
	}
}

func TestTotalNeverFalls(t *testing.T) {
	var s Stopwatch
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			for range 1000 {
				s.Start()()
			}
		})
	}
	stop := make(chan struct{})
	go func() { all.Wait(); close(stop) }()
	for last := time.Duration(0); ; {
		now := s.Total()
		if now < last {
			t.Fatalf("%v after %v", now, last)
		}
		last = now
		select {
		case <-stop:
			return
		default:
		}
	}
}
