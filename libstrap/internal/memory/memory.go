// Package memory reads how much memory this process may still take, and refuses allocations beyond
// it.
package memory

import (
	"math"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// Free is how many bytes a Budget grants without asking the system.
const Free = 4 << 20

// Budget counts bytes before they are allocated for untrusted files. Go ends the process if memory
// runs out, so a Budget refuses the bytes first. Above Free, it grants half of what the process can
// still take: Go's heap can grow to twice the live bytes before it is collected. The zero value is
// ready for use.
type Budget struct {
	used, limit int64
	limited     bool // limit is known
}

// Limit returns a Budget of at most limit bytes.
func Limit(limit int64) *Budget { return &Budget{limit: limit, limited: true} }

// Take counts n more bytes. The error is NoMemory if they may not be allocated.
func (b *Budget) Take(n int64) error {
	if n > math.MaxInt64-b.used {
		n = math.MaxInt64 - b.used
	}
	if !b.limited && b.used+n > Free {
		b.limited, b.limit = true, math.MaxInt64
		if left, ok := Available(); ok {
			b.limit = b.used + left/2
		}
	}
	if b.limited && b.used+n > b.limit {
		return status.New(status.NoMemory,
			"it takes %d bytes of memory, and may take %d, half of what this process can still have", b.used+n, b.limit)
	}
	b.used += n
	return nil
}
