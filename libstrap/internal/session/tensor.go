package session

import (
	"math"
	"unsafe"

	"github.com/libstrap/strap/libstrap/internal/codec"
	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

const (
	// MaxDims is the most dimensions of a tensor, STRAP_MAX_DIMS.
	MaxDims = 64
	// MaxText is the most bytes of a transform with its parameters, and of a model's name.
	MaxText = 64 << 10
)

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
	Request    uint32 // from Request, 0: none
	Transform  string
	Parameters string
	Thread     uint64
	TimeNS     int64
	Conversion *Conversion // nil: the values are as captured

	// FromIntake marks a tensor of at most 16 KiB that the Intake held. The Intake has counted it.
	// Enqueue takes it also while the session is closing, and makes no other packets within the
	// call.
	FromIntake bool

	// Cursor names a tensor that is half enqueued; see Enqueue.
	Cursor uint64
}

// elements validates t, but for its conversion, and counts its elements.
func (t *Tensor) elements() (int64, error) {
	if !t.DType.Valid() {
		return 0, status.New(status.InvalidArgument, "dtype = %d is no element type", t.DType)
	}
	if len(t.Shape) > MaxDims {
		return 0, status.New(status.InvalidArgument, "ndim = %d: at most %d", len(t.Shape), MaxDims)
	}
	if n := t.text(); n > MaxText {
		return 0, status.New(status.InvalidArgument,
			"transform and parameters have %d bytes: at most %d", n, MaxText)
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

// text is how many bytes of text are the tensor's own.
func (t *Tensor) text() int { return len(t.Transform) + len(t.Parameters) }

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

// mantissaOf is that of a stored type that can be rounded to fewer bits, 0 of the others.
func mantissaOf(stored wire.DType) codec.Mantissa {
	switch stored {
	case wire.Float16:
		return codec.Float16
	case wire.BFloat16:
		return codec.BFloat16
	default:
		return 0
	}
}

// measure is what a packet lost of its values.
type measure struct {
	converted codec.Stats
	bits      int // of mantissa that they were rounded to; 0: they were not
}

// copying is how elements get into a packet.
type copying struct {
	bound float64 // of the error of rounding, 0: values are not rounded
	by    codec.Copier
}

// measured reports whether what is stored is compared with the values.
func (t *Tensor) measured(stored wire.DType, bound float64) bool {
	return stored != t.DType || bound > 0 && mantissaOf(stored) > 0
}

// copyElements puts the elements [start, start+count), row-major, into dst as the
// stored type, and returns to how many bits of mantissa they were rounded, 0 where
// they were not: as few as keep the squared error within the bound, where that is above
// 0. It adds to st where the error is measured.
func (t *Tensor) copyElements(dst []byte, stored wire.DType, start, count int64, how copying, st *codec.Stats) int {
	full := mantissaOf(stored)
	if full == 0 || how.bound == 0 {
		t.copyRounded(dst, stored, start, count, int(full), how.by, st)
		return 0
	}
	for bits := full.LeastBits(how.bound); ; bits++ {
		var own codec.Stats
		t.copyRounded(dst, stored, start, count, bits, how.by, &own)
		if own.Within(how.bound) || bits >= int(full) {
			st.Add(&own)
			return bits % int(full)
		}
	}
}

// copyRounded is copyElements with the bits that are given, for types that have them.
func (t *Tensor) copyRounded(dst []byte, stored wire.DType, start, count int64, bits int, by codec.Copier, st *codec.Stats) {
	if count == 0 {
		return
	}
	size := int64(t.DType.Size())
	to := unsafe.Pointer(unsafe.SliceData(dst))
	full := mantissaOf(stored)
	asIs := stored == t.DType && bits >= int(full)
	if t.Strides != nil {
		if asIs {
			codec.Gather(to, t.Data, int(size), t.Shape, t.Strides, start, count)
		} else {
			t.copyPieces(to, stored, start, count, bits, st)
		}
		return
	}
	from := unsafe.Add(t.Data, start*size)
	switch {
	case asIs:
		by.Copy(to, from, int(count*size))
	case stored == t.DType:
		by.Round(full, to, from, int(count), bits, st)
	default:
		by.Float32ToFloat16(to, from, int(count), bits, st)
	}
}

// copyPieces gathers strided elements before it converts or rounds them.
func (t *Tensor) copyPieces(to unsafe.Pointer, stored wire.DType, start, count int64, bits int, st *codec.Stats) {
	var piece [4096]float32
	at, size := unsafe.Pointer(&piece), t.DType.Size()
	for done := int64(0); done < count; {
		n := min(count-done, int64(len(piece)))
		codec.Gather(at, t.Data, size, t.Shape, t.Strides, start+done, n)
		dst := unsafe.Add(to, done*int64(stored.Size()))
		if stored == t.DType {
			mantissaOf(stored).Round(dst, at, int(n), bits, st)
		} else {
			codec.Float32ToFloat16(dst, at, int(n), bits, st)
		}
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
