package session

import (
	"math"

	"github.com/libstrap/strap/libstrap/internal/codec"
	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// Conversion is what the caller did to a tensor's values before it handed them over: it
// made the float16 of float32 itself, on a device that has the values at hand.
type Conversion struct {
	Source wire.DType  // of the values before
	Loss   codec.Stats // of the whole tensor
}

// checkConversion validates the conversion of a tensor of so many elements.
func (t *Tensor) checkConversion(o *Options, elems int64) error {
	c := t.Conversion
	switch {
	case o.KeepFloat32:
		return status.New(status.InvalidArgument,
			"conversion: this session stores float32 as it is (keep_float32): hand that over")
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

// source is the type of the values that were captured.
func (t *Tensor) source() wire.DType {
	if t.Conversion != nil {
		return t.Conversion.Source
	}
	return t.DType
}

// left is what an error bound leaves for rounding after the conversion. With r^2 for the
// normalised error of the conversion, the squares of what it made are at most (1 + r)^2
// times those of the values; so the norms of both errors together stay within the bound.
func (c *Conversion) left(bound float64) float64 {
	if c == nil || c.Loss.SquareError == 0 {
		return bound
	}
	r := math.Sqrt(c.Loss.SquareError / c.Loss.SquareSum) // infinite where there is no sum
	root := (math.Sqrt(bound) - r) / (1 + r)
	if !(root > 0) {
		return 0
	}
	return root * root
}

// joined is what share of the tensor lost by the conversion and by rounding behind it. As
// nobody measured both at once, their errors count as if they went in one direction, which
// is the most that they can be together. A packet that is not all of the tensor gets an even
// share of the conversion's error. That is no bound for this packet, as its values may have
// lost more than the others. It is one for all packets of the tensor together.
func (c *Conversion) joined(share float64, rounding *codec.Stats) codec.Stats {
	l := codec.Stats{
		Count:       max(int64(math.Ceil(float64(c.Loss.Count)*share)), rounding.Count),
		SquareError: c.Loss.SquareError * share,
		SquareSum:   c.Loss.SquareSum * share,
		MaxError:    c.Loss.MaxError + rounding.MaxError,
	}
	l.SquareError += rounding.SquareError + 2*math.Sqrt(l.SquareError*rounding.SquareError)
	return l
}
