// Package team runs work in the threads in which a host computes. A host that runs its operators in a
// team of threads lets them wait while one thread captures a tensor. These threads are awake, and nobody
// else uses their CPUs.
package team

import "unsafe"

// Team is a team of threads. Parallel is the address of a C function like GOMP_parallel: it runs
// work(argument) in the calling thread and in other threads at once, and returns when all have returned.
// The zero value has the calling thread alone.
type Team struct{ Parallel unsafe.Pointer }

// Present reports whether the team has other threads than the calling one.
func (t Team) Present() bool { return t.Parallel != nil && available }

// Run runs work in up to n threads of the team, or in the calling thread if there is no team. work must
// not panic.
func (t Team) Run(n int, work func()) {
	if t.Present() {
		run(t.Parallel, n, work)
	} else {
		work()
	}
}
