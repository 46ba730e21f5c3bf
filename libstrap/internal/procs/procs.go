// Package procs keeps apart how many processors the process has, and how many threads may run Go code.
//
// The Go runtime has one number for both, GOMAXPROCS. A thread that waits in a system call, or that has
// returned to the host, keeps its place among the threads until the runtime's monitor takes it back. The
// monitor is slow here; see capi/threads.c. So whoever makes threads that wait asks for more places.
package procs

import (
	"runtime"
	"sync"
)

// Count is how many goroutines can compute at the same time: the value of GOMAXPROCS at the start.
var Count = runtime.GOMAXPROCS(0)

var mu sync.Mutex

// Need raises GOMAXPROCS to n, if it is less.
func Need(n int) {
	mu.Lock()
	defer mu.Unlock()
	if runtime.GOMAXPROCS(0) < n {
		runtime.GOMAXPROCS(n)
	}
}
