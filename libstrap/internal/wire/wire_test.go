package wire

import (
	"bytes"
	"testing"
)

func TestHeaderIsPythonsBigEndianHI(t *testing.T) {
	var b [HeaderSize]byte
	PutHeader(b[:], 0x0102, 0x03040506)
	if !bytes.Equal(b[:], []byte{1, 2, 3, 4, 5, 6}) {
		t.Fatalf("% x", b)
	}
	if n, d := Header(b[:]); n != 0x0102 || d != 0x03040506 {
		t.Fatalf("%x, %x", n, d)
	}
}

func TestDTypesHaveNamesAndSizes(t *testing.T) {
	seen := map[string]bool{}
	for d := Float32; d < lastDType; d++ {
		if d.Size() == 0 || seen[d.String()] || ParseDType(d.String()) != d {
			t.Errorf("dtype %d: %q of %d bytes", d, d, d.Size())
		}
		seen[d.String()] = true
	}
	for _, d := range []DType{0, lastDType, 255} {
		if d.Valid() || d.Size() != 0 || d.String() != "invalid" {
			t.Errorf("dtype %d is taken for one", d)
		}
	}
	if ParseDType("float12") != 0 {
		t.Error("float12 is taken for a type")
	}
}

func TestRowNamesAndLengths(t *testing.T) {
	r := Row{Layer: "h.0", Path: "[1]", Offset: 7, Length: 100}
	if r.Name() != "h.0[1]" || r.PayloadLen() != 100-6-6 {
		t.Errorf("%q, %d", r.Name(), r.PayloadLen())
	}
	r.Transform = TransformOverflow
	if r.Name() != "h.0[1]!float32" {
		t.Errorf("twin %q", r.Name())
	}
	r.Offset = -1
	if r.PayloadLen() != 0 {
		t.Errorf("a row without a packet has %d bytes", r.PayloadLen())
	}
}
