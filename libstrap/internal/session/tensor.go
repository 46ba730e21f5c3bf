// The tensor that Enqueue captures, and its checks.

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

// Tensor is what Enqueue captures: elements in memory of the host, and what the index says of them.
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
	Conversion *Conversion // nil: the host has not converted the values

	// Cursor is 0, or what a Timeout of Enqueue left for the repeated call.
	Cursor uint64

	// fromIntake marks a tensor that waited in the intake, whose buffer has counted it. It is enqueued
	// also while the session is closing, and no other packets are made within the call.
	fromIntake bool
}

// Conversion describes a tensor whose values the caller has converted itself: it made the float16 of
// float32 on a device that has the values at hand.
type Conversion struct {
	Source wire.DType  // of the values before
	Loss   codec.Stats // of the whole tensor
}

// check validates t and returns the number of its elements. It sets Strides to nil if they describe
// contiguous elements.
func (t *Tensor) check(o *Options) (elems int64, err error) {
	if elems, err = t.elements(); err != nil {
		return 0, err
	}
	if t.Strides != nil && contiguous(t.Shape, t.Strides) {
		t.Strides = nil
	}
	if t.Conversion != nil {
		err = t.checkConversion(o, elems)
	}
	return elems, err
}

// elements validates t without its conversion, and counts its elements.
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

// text returns the bytes of the tensor's own text.
func (t *Tensor) text() int { return len(t.Transform) + len(t.Parameters) }

// checkStrides refuses strides that reach beyond the range of an address.
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

// checkConversion validates the conversion. elems is the number of the tensor's elements.
func (t *Tensor) checkConversion(o *Options, elems int64) error {
	c := t.Conversion
	if err := o.takesConverted(); err != nil {
		return err
	}
	switch {
	case t.DType != wire.Float16:
		return status.New(status.InvalidArgument,
			"dtype = %d with a conversion: only float16 values are taken as converted", t.DType)
	case c.Source != wire.Float32:
		return status.New(status.InvalidArgument,
			"conversion.source = %d: float16 values are taken as converted from float32 alone", c.Source)
	case c.Loss.Count < 0 || c.Loss.Count > elems:
		return status.New(status.InvalidArgument,
			"conversion.values = %d: the tensor has %d elements", c.Loss.Count, elems)
	}
	for _, e := range []struct {
		name  string
		value float64
	}{
		{"square_error", c.Loss.SquareError},
		{"square_sum", c.Loss.SquareSum},
		{"max_error", c.Loss.MaxError},
	} {
		if !(e.value >= 0 && e.value <= math.MaxFloat64) {
			return status.New(status.InvalidArgument,
				"conversion.%s = %g: give a finite number that is not negative", e.name, e.value)
		}
		if e.value > 0 && c.Loss.Count == 0 {
			return status.New(status.InvalidArgument,
				"conversion.%s = %g of no values: conversion.values is 0", e.name, e.value)
		}
	}
	return nil
}

// source returns the type of the captured values.
func (t *Tensor) source() wire.DType {
	if t.Conversion != nil {
		return t.Conversion.Source
	}
	return t.DType
}
