//go:build !race

package session

import "sync"

// mutex is a sync.Mutex with a rank, which builds for the race detector check.
type mutex[R rank] struct{ sync.Mutex }
