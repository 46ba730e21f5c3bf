package parquet

import (
	"slices"
	"strings"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"
	"github.com/apache/arrow/go/v17/arrow/bitutil"
	"github.com/apache/arrow/go/v17/arrow/memory"
	"github.com/apache/arrow/go/v17/parquet"
	"github.com/apache/arrow/go/v17/parquet/metadata"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// textColumn brings the dictionaries of the records together: Parquet has one for
// a column of a row group, written when all its values are known.
type textColumn struct {
	plainColumn
	codes  [][]int32 // the text of each row, record by record; -1 is none
	byText map[string]int32
	texts  []string
}

func (c *textColumn) add(chunk arrow.Array) error {
	rows := chunk.(*array.Dictionary)
	dictionary := rows.Dictionary()
	at := textsOf(dictionary)
	indices, direct := rows.Indices().(*array.Int32)
	const notYet = -2
	byIndex := slices.Repeat([]int32{notYet}, dictionary.Len())
	codes := make([]int32, rows.Len())
	for i := range codes {
		if rows.IsNull(i) {
			codes[i] = -1
			continue
		}
		var index int
		if direct {
			index = int(indices.Value(i))
		} else {
			index = rows.GetValueIndex(i)
		}
		if byIndex[index] == notYet {
			byIndex[index] = -1
			if dictionary.IsValid(index) {
				byIndex[index] = c.code(at(index))
			}
		}
		codes[i] = byIndex[index]
	}
	c.codes = append(c.codes, codes)
	return nil
}

// code numbers the texts as they come.
func (c *textColumn) code(text string) int32 {
	code, ok := c.byText[text]
	if !ok {
		if c.byText == nil {
			c.byText = map[string]int32{}
		}
		text = strings.Clone(text) // the dictionary's own goes with the record
		code = int32(len(c.texts))
		c.byText[text] = code
		c.texts = append(c.texts, text)
	}
	return code
}

func textsOf(a arrow.Array) func(int) string {
	switch a := a.(type) {
	case *array.Binary:
		return a.ValueString
	case *array.LargeBinary:
		return a.ValueString
	case *array.LargeString:
		return a.Value
	default:
		return a.(*array.String).Value
	}
}

// end writes the dictionary and then the codes, as pqarrow does with a dictionary
// array but for the statistics: arrow v17 gives columns that cannot be null a
// negative number of nulls, and does not count the empty text as the least.
func (c *textColumn) end() error {
	encoder, ok := c.out.CurrentEncoder().(interface{ PutDictionary(arrow.Array) error })
	if !ok {
		return status.New(status.Internal, "%T takes no dictionary", c.out.CurrentEncoder())
	}
	texts := array.NewStringBuilder(memory.DefaultAllocator)
	defer texts.Release()
	texts.AppendValues(c.texts, nil)
	dictionary := texts.NewArray()
	defer dictionary.Release()
	if err := encoder.PutDictionary(dictionary); err != nil {
		return err
	}
	var least, greatest parquet.ByteArray
	if len(c.texts) > 0 {
		least, greatest = parquet.ByteArray(slices.Min(c.texts)), parquet.ByteArray(slices.Max(c.texts))
	}
	for _, record := range c.codes {
		// Arrow looks for the end of a page after each batch, so that what is counted
		// before one belongs to its page.
		for codes := range slices.Chunk(record, batchSize) {
			if err := c.writeCodes(codes, least, greatest); err != nil {
				return err
			}
		}
	}
	return c.plainColumn.end()
}

func (c *textColumn) writeCodes(codes []int32, least, greatest parquet.ByteArray) error {
	indices := indicesOf(codes)
	defer indices.Release()
	nulls := indices.NullN()
	if !c.field.Nullable && nulls > 0 {
		return errNulls(nulls)
	}
	statistics := c.out.PageStatistics().(*metadata.ByteArrayStatistics)
	statistics.IncNulls(int64(nulls))
	statistics.IncNumValues(int64(len(codes) - nulls))
	if nulls < len(codes) {
		statistics.SetMinMax(least, greatest)
	}
	return c.out.WriteDictIndices(indices, c.definitionLevels(indices), nil)
}

// indicesOf makes an array of codes, of which it takes the memory.
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
