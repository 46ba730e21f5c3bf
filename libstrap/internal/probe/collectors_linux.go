// The collectors of Linux by their kind, and how they start from JSON.

package probe

import (
	"bytes"
	"encoding/json"

	"github.com/libstrap/strap/libstrap/internal/status"
)

var collectors = map[string]func(options []byte) (Collector, error){
	"block":    starter("block", StartBlock),
	"system":   starter("system", StartSystem),
	"syscalls": starter("syscalls", StartSyscalls),
	"off_cpu":  starter("off_cpu", StartOffCPU),
}

// starter returns a function that decodes JSON options and calls start with them. An unknown option
// is an error.
func starter[O any, C Collector](kind string, start func(O) (C, error)) func([]byte) (Collector, error) {
	return func(options []byte) (Collector, error) {
		var o O
		if len(bytes.TrimSpace(options)) > 0 {
			decoder := json.NewDecoder(bytes.NewReader(options))
			decoder.DisallowUnknownFields()
			if err := decoder.Decode(&o); err != nil {
				return nil, status.Wrap(status.InvalidArgument, err, "the options of the collector %q", kind)
			}
		}
		if err := needSelf(); err != nil {
			return nil, err
		}
		c, err := start(o)
		if err != nil {
			return nil, err // a nil C would become a Collector that is not nil
		}
		return c, nil
	}
}
