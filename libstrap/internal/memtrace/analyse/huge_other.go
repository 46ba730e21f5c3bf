//go:build !linux

package analyse

func adviseHuge([]byte) {}
