// Encodes columns of text, and merges the dictionaries of their records.

package parquet

import (
	"slices"
	"strings"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"
	"github.com/apache/arrow/go/v17/arrow/memory"
	"github.com/apache/arrow/go/v17/parquet"
	"github.com/apache/arrow/go/v17/parquet/metadata"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// textColumn merges the dictionaries of the records. Parquet has one dictionary for each column of a
// row group; it is written when all values are known.
type textColumn struct {
	base
	codes  [][]int32 // the code of each row's text, record by record; -1 is a null
	byText map[string]int32
	texts  []string
}

func (c *textColumn) add(chunk arrow.Array) error {
	rows := chunk.(*array.Dictionary)
	codes, err := codesOf(rows)
	if err != nil {
		return err
	}
	at := textsOf(rows.Dictionary())
	const notYet = -1
	byIndex := slices.Repeat([]int32{notYet}, rows.Dictionary().Len())
	for i, index := range codes {
		if index < 0 {
			continue
		}
		if byIndex[index] == notYet {
			byIndex[index] = c.code(at(int(index)))
		}
		codes[i] = byIndex[index]
	}
	c.codes = append(c.codes, codes)
	return nil
}

// code returns the code of a text. New texts get the next code.
func (c *textColumn) code(text string) int32 {
	code, ok := c.byText[text]
	if !ok {
		if c.byText == nil {
			c.byText = map[string]int32{}
		}
		text = strings.Clone(text) // its memory is released with the record
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

// end writes the dictionary and then the codes. It sets the statistics itself, because Arrow makes
// none from codes.
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
		// Arrow ends a page only after a batch. So statistics that are set before a batch
		// belong to the page of the batch.
		for codes := range slices.Chunk(record, batchSize) {
			if err := c.writeCodes(codes, least, greatest); err != nil {
				return err
			}
		}
	}
	return c.base.end()
}

func (c *textColumn) writeCodes(codes []int32, least, greatest parquet.ByteArray) error {
	indices := indicesOf(codes)
	defer indices.Release()
	levels, err := c.definitionLevels(indices)
	if err != nil {
		return err
	}
	nulls := indices.NullN()
	statistics := c.out.PageStatistics().(*metadata.ByteArrayStatistics)
	statistics.IncNulls(int64(nulls))
	statistics.IncNumValues(int64(len(codes) - nulls))
	if nulls < len(codes) {
		statistics.SetMinMax(least, greatest)
	}
	return c.out.WriteDictIndices(indices, levels, nil)
}
