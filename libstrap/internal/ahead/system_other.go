// Stands in for system_linux.go on other systems: no advice, and no reads past the page cache.

//go:build !linux

package ahead

import (
	"errors"
	"os"
)

// Only Linux is asked to read ahead.

func willNeed(*os.File, Part)     {}
func adviseRandom(*os.File, bool) {}
func cached(*os.File, Part) bool  { return false }

type direct struct{}

func openDirect(*os.File) (direct, error) { return direct{}, errors.ErrUnsupported }

func (direct) read([]byte, int64) (int, error) { return 0, errors.ErrUnsupported }
func (direct) close()                          {}
