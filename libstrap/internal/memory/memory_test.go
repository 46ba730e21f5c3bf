package memory

import (
	"errors"
	"math"
	"strings"
	"testing"

	"github.com/libstrap/strap/libstrap/internal/status"
)

func TestAvailableMemoryIsPlausible(t *testing.T) {
	left, ok := Available()
	if !ok {
		t.Skip("this system does not tell its free memory")
	}
	if left < 1<<20 || left > 1<<50 {
		t.Fatalf("%d bytes are left", left)
	}
}

func TestABudgetEnds(t *testing.T) {
	b := Limit(100)
	for range 10 {
		if err := b.Take(10); err != nil {
			t.Fatal(err)
		}
	}
	err := b.Take(1)
	if !errors.Is(err, status.NoMemory) || !strings.Contains(err.Error(), "takes 101 bytes of memory, and may take 100") {
		t.Errorf("byte 101 of 100: %v", err)
	}
	if err := b.Take(math.MaxInt64); !errors.Is(err, status.NoMemory) {
		t.Errorf("more than can be counted: %v", err)
	}
}

func TestABudgetIsHalfOfWhatIsLeft(t *testing.T) {
	left, ok := Available()
	if !ok {
		t.Skip("this system does not tell its free memory")
	}
	var b Budget
	if err := b.Take(Free); err != nil || b.limited {
		t.Errorf("the first bytes: %v; asked: %v", err, b.limited)
	}
	if err := b.Take(left); !errors.Is(err, status.NoMemory) {
		t.Errorf("all that is left: %v", err)
	}
}
