// Stands in for the collectors on systems other than Linux, where none works.

//go:build !linux

package probe

import "github.com/libstrap/strap/libstrap/internal/status"

var collectors = map[string]func(options []byte) (Collector, error){
	"block":    unsupported,
	"system":   unsupported,
	"syscalls": unsupported,
	"off_cpu":  unsupported,
}

func unsupported([]byte) (Collector, error) {
	return nil, status.New(status.Unsupported, "collectors run in the Linux kernel alone")
}
