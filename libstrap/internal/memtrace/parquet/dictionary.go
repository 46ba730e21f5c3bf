// Turns dictionary arrays into codes, and codes into arrays.

package parquet

import (
	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"
	"github.com/apache/arrow/go/v17/arrow/bitutil"
	"github.com/apache/arrow/go/v17/arrow/memory"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// codesOf returns for each row the index of its word in the dictionary, or -1 for a null. It returns
// InvalidArgument if an index lies outside the dictionary.
func codesOf(rows *array.Dictionary) ([]int32, error) {
	words := rows.Dictionary()
	nulls, nullWords := rows.NullN(), words.NullN()
	indices, direct := rows.Indices().(*array.Int32)
	codes := make([]int32, rows.Len())
	for i := range codes {
		if nulls > 0 && rows.IsNull(i) {
			codes[i] = -1
			continue
		}
		var word int
		if direct {
			word = int(indices.Value(i))
		} else {
			word = rows.GetValueIndex(i)
		}
		if word < 0 || word >= words.Len() {
			return nil, status.New(status.InvalidArgument, "row %d is word %d of a dictionary of %d", i, word, words.Len())
		}
		codes[i] = int32(word)
		// An array of type null has no bitmap, so IsNull does not know its nulls.
		if nullWords > 0 && (nullWords == words.Len() || words.IsNull(word)) {
			codes[i] = -1
		}
	}
	return codes, nil
}

// indicesOf makes an array from codes, with a null for each -1. It takes over the memory of codes
// and changes it.
func indicesOf(codes []int32) arrow.Array {
	bits := make([]byte, bitutil.BytesForBits(int64(len(codes))))
	nulls := 0
	for i, code := range codes {
		if code < 0 {
			codes[i] = 0
			nulls++
		} else {
			bitutil.SetBit(bits, i)
		}
	}
	data := array.NewData(arrow.PrimitiveTypes.Int32, len(codes),
		[]*memory.Buffer{memory.NewBufferBytes(bits), memory.NewBufferBytes(arrow.Int32Traits.CastToBytes(codes))}, nil, nulls, 0)
	defer data.Release()
	return array.NewInt32Data(data)
}
