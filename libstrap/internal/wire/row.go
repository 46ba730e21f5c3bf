// A row of the index.

package wire

// Row is one row of the index. It describes a packet of the stream, or a tensor without a packet: then
// Offset is negative and Error has the reason. docs/STREAM_FORMAT.md lists the columns. Package index
// maps them to Arrow.
type Row struct {
	Sequence    uint64  // number in the order of enqueue, from 0
	Offset      int64   // of the packet's first byte in the stream; -1: no packet
	Length      uint64  // of the whole packet: header, name and payload
	Part, Parts uint32  // number of this part of a split tensor, and of all parts; 0 and 1 if not split
	Model       string  // name of the instrumented model; may be empty
	Layer       string  // module name; empty for the root module
	Path        string  // position of the tensor in the module's output, "" for the first tensor
	Call        uint32  // number of the module's call within the step, from 0
	Step        int64   // number of the outermost forward call, from 0; -1: unknown
	Token       int64   // tokens recorded when the step began; -1: unknown
	Request     string  // name of the request that the tensor was made for, or ""
	Rank        int32   // process rank in a distributed run
	Thread      uint64  // operating system thread that enqueued the tensor
	Shape       []int64 // of the whole tensor, split or not
	Source      DType   // element type of the tensor
	Stored      DType   // element type of the payload
	Codec       string  // "none", "lz4", "zstd" or "archive"
	Transform   string  // name of a transform of the values beside the float16 downcast, or ""
	Parameters  string  // of the transform: a JSON object, or ""
	CRC         uint32  // CRC-32C of the payload as stored
	TimeNS      int64   // CLOCK_MONOTONIC at enqueue, nanoseconds
	MSE         float64 // mean squared error of the stored values; NaN: not applicable
	MeanSquare  float64 // mean of the squares of the same values; NaN: not applicable
	Mantissa    int8    // bits of mantissa that the values were rounded to; 0: not rounded
	Error       string  // why there is no packet; "" if there is a packet
}

// TransformOverflow is the Transform of the float32 packet whose name has OverflowSuffix.
const TransformOverflow = "overflow_float32"

// Name returns the name of the row's packet.
func (r *Row) Name() string {
	if r.Transform == TransformOverflow {
		return r.Layer + r.Path + OverflowSuffix
	}
	return r.Layer + r.Path
}

// PayloadLen returns the bytes of the row's payload in the stream, or 0 if there is no packet.
func (r *Row) PayloadLen() uint64 {
	if head := uint64(HeaderSize + len(r.Name())); r.Offset >= 0 && r.Length > head {
		return r.Length - head
	}
	return 0
}
