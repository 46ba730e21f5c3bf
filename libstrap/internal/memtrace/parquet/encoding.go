// Chooses the encoding of a column by its first values.

package parquet

import (
	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"
	"github.com/apache/arrow/go/v17/parquet"
)

// looked is how many values decide the encoding of a column, at most.
const looked = 8192

// encodingOf chooses the encoding of column i by its first values. 64-bit numbers of which more
// than a quarter are distinct are stored as differences if they never fall, else as they are: a
// dictionary would cost time and space. All other columns get a dictionary.
func encodingOf(rows []arrow.Record, i int) parquet.Encoding {
	if len(rows) == 0 {
		return parquet.Encodings.PlainDict
	}
	a := rows[0].Column(i)
	n := min(a.Len(), looked)
	at := numbers(a)
	if at == nil || a.NullN() == a.Len() {
		return parquet.Encodings.PlainDict
	}
	rising, different := true, map[int64]bool{}
	for row := range n {
		if a.IsNull(row) {
			rising = false
			continue
		}
		v := at(row)
		rising = rising && (row == 0 || at(row-1) <= v)
		different[v] = true
	}
	switch {
	case len(different) <= n/4:
		return parquet.Encodings.PlainDict
	case rising:
		return parquet.Encodings.DeltaBinaryPacked
	default:
		return parquet.Encodings.Plain
	}
}

// numbers returns a function that gives the values of a column of 64-bit numbers, or nil for other
// types.
func numbers(a arrow.Array) func(int) int64 {
	switch a := a.(type) {
	case *array.Int64:
		return a.Value
	case *array.Uint64:
		return func(i int) int64 { return int64(a.Value(i)) }
	case *array.Timestamp:
		return func(i int) int64 { return int64(a.Value(i)) }
	default:
		return nil
	}
}
