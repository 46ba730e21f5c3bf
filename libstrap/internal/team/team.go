// Package team runs work in the threads that a host computes with. A host whose operators
// run in a team of threads leaves these waiting while its own thread captures a tensor: they
// are there, awake, and nobody else has a use for their CPUs.
package team

import "unsafe"

// Team is such threads: the address of a C function like GOMP_parallel, which runs
// work(argument) in several of them at once, the caller's among them, and returns when
// all are through. The zero value has the caller's thread alone.
type Team struct{ Parallel unsafe.Pointer }

// Present reports whether there are threads beside the caller's.
func (t Team) Present() bool { return t.Parallel != nil && available }

// Run runs work in up to n threads of the team, in the caller's if there is none. It must
// not panic.
func (t Team) Run(n int, work func()) {
	if t.Present() {
		run(t.Parallel, n, work)
	} else {
		work()
	}
}
