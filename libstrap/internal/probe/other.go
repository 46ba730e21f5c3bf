//go:build !linux

package probe

import (
	"time"

	"github.com/libstrap/strap/libstrap/internal/status"
)

func startBlock([]string, int, time.Duration) (Collector, error) {
	return nil, status.New(status.Unsupported, "collectors run in the Linux kernel alone")
}

func startSystem() (Collector, error) { return startBlock(nil, 0, 0) }
