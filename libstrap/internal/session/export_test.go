package session

import (
	"testing"
	"time"

	"github.com/libstrap/strap/libstrap/internal/team"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// This file exports the helpers of the tests here to those in package session_test. Those tests use
// package intake, which imports this package, so they cannot be in it.

const (
	Forever   = forever
	Patience  = patience
	KeptFor   = keptFor
	IdleAfter = idleAfter
)

var (
	Enqueue      = enqueue
	Flush        = flush
	Checkpoint   = checkpoint
	Finish       = finish
	MustLayer    = mustLayer
	CheckThreads = checkThreads
	Numbered     = numbered
	FillMemory   = fillMemory
	KeepPlaces   = keepPlaces
	StopTicks    = stopTicks
	Resting      = resting
	Halves       = halves
	Float32s     = float32s
	TensorOf     = tensorOf[float32]
	BytesOf      = bytesOf[float32]
	Soon         = soon[struct{}]
	ReadCapture  = func(t testing.TB, path string) ([]wire.Row, [][]byte) { return read(t, path) }
	SoakTeam     = func() team.Team { return soakTeam }
)

// patience is how much longer than its time limit a call may take in a test. The machine may be
// busy, and the race detector on.
const patience = 5 * time.Second

// soakTeam is a host's team of threads. Without cgo it is the zero Team.
var soakTeam team.Team

func (s *Session) Finished() chan struct{} { return s.life.finished }
func (s *Session) LockWriter()             { s.sink.mu.Lock() }
func (s *Session) TryLockWriter() bool     { return s.sink.mu.TryLock() }
func (s *Session) UnlockWriter()           { s.sink.unlock(s.opts.helped()) }
func (s *Session) Hurried() bool           { return s.jobs.Hurried() }
func (s *Session) Places() int             { return len(s.staging.line.places) }
func (o *Options) Split(bytes int64)       { o.split = bytes }

// TakeMemory takes all free staging memory. Call give to free it again.
func (s *Session) TakeMemory() (give func(), err error) {
	var taken []func()
	give = func() {
		for _, free := range taken {
			free()
		}
	}
	for {
		region, ok, err := s.arena.TryAlloc(64, 0)
		if !ok || err != nil {
			return give, err
		}
		taken = append(taken, func() { s.arena.Free(region) })
	}
}
