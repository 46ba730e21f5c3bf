// Machines without a table of names show system calls as numbers.

//go:build !amd64 && !arm64

package probe

// syscallNames are none: the calls of this kind of machine show as numbers.
var syscallNames map[uint32]string
