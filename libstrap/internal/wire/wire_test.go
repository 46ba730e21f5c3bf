package wire

import (
	"bytes"
	"os"
	"regexp"
	"strconv"
	"strings"
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

func TestDTypesAreThoseOfTheHeader(t *testing.T) {
	header, err := os.ReadFile("../../../c_include/strap.h")
	if err != nil {
		t.Fatal(err)
	}
	enum := regexp.MustCompile(`(?s)typedef int32_t strap_dtype;\nenum \{(.*?)\};`).FindSubmatch(header)
	if enum == nil {
		t.Fatal("strap.h has no enum of strap_dtype")
	}
	found := regexp.MustCompile(`STRAP_(\w+) = (\d+)`).FindAllSubmatch(enum[1], -1)
	if len(found) != int(lastDType)-1 {
		t.Errorf("%d types in strap.h, %d here", len(found), lastDType-1)
	}
	for _, f := range found {
		name, value := strings.ToLower(string(f[1])), string(f[2])
		if d := ParseDType(name); strconv.Itoa(int(d)) != value {
			t.Errorf("%s is %s in strap.h, %d here", name, value, d)
		}
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
