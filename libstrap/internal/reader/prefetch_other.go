//go:build !linux

package reader

import "os"

// willNeed does nothing: only Linux is asked to read ahead.
func willNeed(_ *os.File, _, _ int64) {}
