// The mutex of builds without the race detector, which does not check its rank.

//go:build !race

package session

import "sync"

// mutex is a sync.Mutex with a rank, which builds for the race detector check.
type mutex[R rank] struct{ sync.Mutex }
