//go:build cgo

package team_test

import (
	"sync"
	"sync/atomic"
	"testing"

	"github.com/libstrap/strap/libstrap/internal/team"
	"github.com/libstrap/strap/libstrap/internal/team/teamtest"
)

func TestWorkRunsInSeveralThreadsAtOnce(t *testing.T) {
	var together sync.WaitGroup // until three threads run work
	together.Add(3)
	var runs atomic.Int32
	teamtest.New().Run(3, func() {
		runs.Add(1)
		together.Done()
		together.Wait()
	})
	if n := runs.Load(); n != 3 {
		t.Errorf("work ran %d times, not 3", n)
	}
}

func TestWithoutATeamTheCallerWorksAlone(t *testing.T) {
	runs := 0
	team.Team{}.Run(3, func() { runs++ })
	if runs != 1 || (team.Team{}).Present() {
		t.Errorf("work ran %d times", runs)
	}
}
