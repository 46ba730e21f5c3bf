package reader_test

import (
	"testing"

	"github.com/libstrap/strap/libstrap/internal/reader"
	"github.com/libstrap/strap/libstrap/internal/status"
)

func TestPrefetchTakesAnyRowsThatThereAre(t *testing.T) {
	c := crowd(t, 1000)
	c.note("layer.0", "no room")
	path := save(t, c.stream, c.rows)
	for _, o := range []reader.Options{{}, {IgnoreIndex: true}} {
		r := open(t, path, o)
		check(t, r.Prefetch(nil))
		check(t, r.Prefetch([]uint64{999, 3, 3, 0, 500}))
		if err := r.Prefetch([]uint64{1, 1 << 63}); status.CodeOf(err) != status.NotFound {
			t.Errorf("%v", err)
		}
	}
	check(t, open(t, path, reader.Options{}).Prefetch([]uint64{1000})) // a row without a packet
}
