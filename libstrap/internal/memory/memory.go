// Package memory tells how much memory this process may still take, and counts
// against it what is about to be allocated.
package memory

import (
	"math"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// Free is what a Budget gives without asking the system.
const Free = 4 << 20

// Budget counts bytes that are about to be allocated for what others wrote. Go ends the
// process where memory is missing, so the bytes are refused before. Beyond Free, they may
// be half of what the process can still take: Go's heap can grow to twice what is in use
// before it is collected. The zero value is ready for use.
type Budget struct {
	used, limit int64
	limited     bool // limit is known
}

// Limit makes a Budget of at most limit bytes.
func Limit(limit int64) *Budget { return &Budget{limit: limit, limited: true} }

// Take counts n more bytes. The error is NoMemory where they may not be allocated.
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
