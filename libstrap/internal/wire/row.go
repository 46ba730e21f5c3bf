package wire

// Row is one line of the index: a packet of the stream, or a tensor that did
// not become one (Offset < 0) with the reason in Error. docs/STREAM_FORMAT.md
// lists the columns; package index maps them to Arrow.
type Row struct {
	Sequence    uint64  // place in enqueue order, from 0
	Offset      int64   // of the packet's first byte in the stream; -1: no packet
	Length      uint64  // of the whole packet: header, name and payload
	Part, Parts uint32  // this packet's share of a split tensor; 0 of 1 for most
	Model       string  // name given to the instrumented model, may be empty
	Layer       string  // module name; the root's is empty
	Path        string  // place of the tensor in the module's output, "" for the first
	Call        uint32  // which call of the module within the step, from 0
	Step        int64   // outermost forward call, from 0; -1: unknown
	Token       int64   // tokens recorded when the step began; -1: unknown
	Request     string  // what the tensor was made for, "" for nothing named
	Rank        int32   // process rank in a distributed run
	Thread      uint64  // operating system thread that enqueued the tensor
	Shape       []int64 // of the whole tensor, split or not
	Source      DType   // element type of the tensor
	Stored      DType   // element type of the payload
	Codec       string  // "none", "lz4", "zstd" or "archive"
	Transform   string  // what was done to the values beyond the float16 downcast, "" for nothing
	Parameters  string  // of the transform, a JSON object, "" for none
	CRC         uint32  // CRC-32C of the payload as stored
	TimeNS      int64   // CLOCK_MONOTONIC at enqueue, nanoseconds
	MSE         float64 // mean squared error of the stored values; NaN: not applicable
	MeanSquare  float64 // mean of the squares of the values that MSE is over; NaN likewise
	Mantissa    int8    // bits of mantissa that the values were rounded to; 0: not rounded
	Error       string  // why there is no packet, "" where there is one
}

// TransformOverflow marks the float32 twin of a float16 packet, also of one whose values are too small.
const TransformOverflow = "overflow_float32"

// Name is the packet name that belongs to the row.
func (r *Row) Name() string {
	if r.Transform == TransformOverflow {
		return r.Layer + r.Path + OverflowSuffix
	}
	return r.Layer + r.Path
}

// PayloadLen is the length of the row's payload in the stream; 0 where there is
// no packet.
func (r *Row) PayloadLen() uint64 {
	if head := uint64(HeaderSize + len(r.Name())); r.Offset >= 0 && r.Length > head {
		return r.Length - head
	}
	return 0
}
