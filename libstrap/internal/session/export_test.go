package session

import (
	"testing"
	"time"

	"github.com/libstrap/strap/libstrap/internal/team"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// This file lends the tests in package session_test what the tests here use. Those go through an
// intake, whose package imports this one.

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

// patience is how much longer than its time limit a call may take in a test, where the machine is
// busy and the race detector is on.
const patience = 5 * time.Second

// soakTeam is a host's team of threads, where there is cgo.
var soakTeam team.Team

func (s *Session) Finished() chan struct{} { return s.life.finished }
func (s *Session) LockWriter()             { s.sink.mu.Lock() }
func (s *Session) TryLockWriter() bool     { return s.sink.mu.TryLock() }
func (s *Session) UnlockWriter()           { s.sink.unlock(s.opts.helped()) }
func (s *Session) Hurried() bool           { return s.jobs.Hurried() }
func (s *Session) Places() int             { return len(s.staging.line.places) }
func (o *Options) Split(bytes int64)       { o.split = bytes }

// TakeMemory takes all staging memory that is free, until give is called.
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
