// Stands in for huge_linux.go on other systems: asks for nothing.

//go:build !linux

package analyse

func adviseHuge([]byte) {}
