// The types of Parquet in which columns of Arrow are stored.

package parquet

import (
	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/parquet"
	"github.com/apache/arrow/go/v17/parquet/schema"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// schemaOf returns the Parquet schema of the columns. A dictionary becomes its value type, because
// Parquet has no dictionary types. It returns InvalidArgument for a type that cannot be written.
func schemaOf(columns *arrow.Schema) (*schema.GroupNode, error) {
	nodes := make(schema.FieldList, columns.NumFields())
	for i, field := range columns.Fields() {
		valueType := field.Type
		if d, ok := valueType.(*arrow.DictionaryType); ok {
			valueType = d.ValueType
		}
		physical, logical, ok := formOf(valueType)
		if !ok {
			return nil, status.New(status.InvalidArgument, "column %s is %v: flatten it, or cast it to a type that can be written: "+
				"bool, integers, float32, float64, text, binary, date32, timestamps in ms, us or ns, or a dictionary of these", field.Name, field.Type)
		}
		repetition := parquet.Repetitions.Required
		if field.Nullable {
			repetition = parquet.Repetitions.Optional
		}
		node, err := schema.NewPrimitiveNodeLogical(field.Name, repetition, logical, physical, -1, -1)
		if err != nil {
			return nil, status.Wrap(status.Internal, err, "column %s", field.Name)
		}
		nodes[i] = node
	}
	return schema.NewGroupNode("schema", parquet.Repetitions.Repeated, nodes, -1)
}

var timeUnits = map[arrow.TimeUnit]schema.TimeUnitType{
	arrow.Millisecond: schema.TimeUnitMillis, arrow.Microsecond: schema.TimeUnitMicros, arrow.Nanosecond: schema.TimeUnitNanos,
}

// formOf returns how Parquet stores the values of a type, and the logical type that marks them.
// https://github.com/apache/parquet-format/blob/master/LogicalTypes.md
func formOf(t arrow.DataType) (physical parquet.Type, logical schema.LogicalType, ok bool) {
	switch t := t.(type) {
	case *arrow.NullType:
		return parquet.Types.Int32, schema.NullLogicalType{}, true
	case *arrow.BooleanType:
		return parquet.Types.Boolean, schema.NoLogicalType{}, true
	case *arrow.Float32Type:
		return parquet.Types.Float, schema.NoLogicalType{}, true
	case *arrow.Float64Type:
		return parquet.Types.Double, schema.NoLogicalType{}, true
	case *arrow.StringType, *arrow.LargeStringType:
		return parquet.Types.ByteArray, schema.StringLogicalType{}, true
	case *arrow.BinaryType, *arrow.LargeBinaryType:
		return parquet.Types.ByteArray, schema.NoLogicalType{}, true
	case *arrow.Date32Type:
		return parquet.Types.Int32, schema.DateLogicalType{}, true
	case *arrow.TimestampType:
		unit, ok := timeUnits[t.Unit]
		// Forced, so that readers that know only the older annotations see a time too.
		return parquet.Types.Int64, schema.NewTimestampLogicalTypeForce(t.TimeZone != "", unit), ok
	}
	if !arrow.IsInteger(t.ID()) {
		return 0, nil, false
	}
	bits := t.(arrow.FixedWidthDataType).BitWidth()
	physical = parquet.Types.Int32
	if bits == 64 {
		physical = parquet.Types.Int64
	}
	return physical, schema.NewIntLogicalType(int8(bits), arrow.IsSignedInteger(t.ID())), true
}
