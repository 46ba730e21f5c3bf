package session

import (
	"math"
	"unsafe"

	"github.com/libstrap/strap/libstrap/internal/codec"
	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// MaxDims is the most dimensions of a tensor, STRAP_MAX_DIMS.
const MaxDims = 64

// Tensor is what Enqueue captures: elements in foreign memory and what the index
// is to say of them.
type Tensor struct {
	Layer      uint32
	DType      wire.DType
	Shape      []int64
	Strides    []int64 // in elements; nil: contiguous, row-major
	Data       unsafe.Pointer
	Step       int64
	Token      int64
	Call       uint32
	Transform  string
	Parameters string
	Thread     uint64
	TimeNS     int64

	// Cursor names a tensor that is half enqueued; see Enqueue.
	Cursor uint64
}

// elements validates t and counts its elements.
func (t *Tensor) elements() (int64, error) {
	if !t.DType.Valid() {
		return 0, status.New(status.InvalidArgument, "dtype = %d is no element type", t.DType)
	}
	if len(t.Shape) > MaxDims {
		return 0, status.New(status.InvalidArgument, "ndim = %d: at most %d", len(t.Shape), MaxDims)
	}
	if t.Strides != nil && len(t.Strides) != len(t.Shape) {
		return 0, status.New(status.InvalidArgument,
			"%d strides for %d dimensions", len(t.Strides), len(t.Shape))
	}
	n := int64(1)
	empty := false
	for i, length := range t.Shape {
		if length < 0 {
			return 0, status.New(status.InvalidArgument, "shape[%d] = %d is negative", i, length)
		}
		if length == 0 {
			empty = true
			continue
		}
		if n > math.MaxInt64/int64(t.DType.Size())/length {
			return 0, status.New(status.InvalidArgument, "shape %v has more bytes than memory can", t.Shape)
		}
		n *= length
	}
	if empty {
		return 0, nil
	}
	if t.Strides != nil {
		if err := t.checkStrides(); err != nil {
			return 0, err
		}
	}
	if t.Data == nil {
		return 0, status.New(status.InvalidArgument, "data is NULL for shape %v", t.Shape)
	}
	return n, nil
}

// checkStrides refuses strides that reach beyond what an address can.
func (t *Tensor) checkStrides() error {
	reach := int64(math.MaxInt64) / int64(t.DType.Size())
	for i, stride := range t.Strides {
		steps := t.Shape[i] - 1
		if steps == 0 || stride == 0 {
			continue
		}
		if stride == math.MinInt64 || max(stride, -stride) > reach/steps {
			return status.New(status.InvalidArgument,
				"strides[%d] = %d with shape[%d] = %d reaches out of memory", i, stride, i, t.Shape[i])
		}
		reach -= max(stride, -stride) * steps
	}
	return nil
}

// copyElements puts the elements [start, start+count), row-major, into dst as
// the stored type. Float32 stored as float16 adds to st.
func (t *Tensor) copyElements(dst []byte, stored wire.DType, start, count int64, st *codec.Stats) {
	if count == 0 {
		return
	}
	size := int64(t.DType.Size())
	to := unsafe.Pointer(unsafe.SliceData(dst))
	if stored == t.DType {
		if t.Strides == nil {
			copy(dst, unsafe.Slice((*byte)(unsafe.Add(t.Data, start*size)), count*size))
		} else {
			codec.Gather(to, t.Data, int(size), t.Shape, t.Strides, start, count)
		}
		return
	}
	if t.Strides == nil {
		codec.Float32ToFloat16(to, unsafe.Add(t.Data, start*size), int(count), st)
		return
	}
	var piece [4096]float32
	for done := int64(0); done < count; {
		n := min(count-done, int64(len(piece)))
		codec.Gather(unsafe.Pointer(&piece), t.Data, int(size), t.Shape, t.Strides, start+done, n)
		codec.Float32ToFloat16(unsafe.Add(to, done*2), unsafe.Pointer(&piece), int(n), st)
		done += n
	}
}

// contiguous reports whether row-major strides describe shape.
func contiguous(shape, strides []int64) bool {
	expected := int64(1)
	for i := len(shape) - 1; i >= 0; i-- {
		if shape[i] != 1 && strides[i] != expected {
			return false
		}
		expected *= shape[i]
	}
	return true
}
