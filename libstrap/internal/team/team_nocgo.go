// Stands in for team_cgo.go in builds without cgo, which have no team.

//go:build !cgo

package team

import "unsafe"

// available is false: without cgo Go cannot call a C function.
const available = false

func run(unsafe.Pointer, int, func()) { panic("team: there is none") }
