package filelimit

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

func TestAWriteBeyondTheLimitFails(t *testing.T) {
	if !Alone(t) {
		return
	}
	path := filepath.Join(t.TempDir(), "a")
	lift := Set(t, 3)
	if err := os.WriteFile(path, []byte("abcd"), 0o600); !errors.Is(err, syscall.EFBIG) {
		t.Errorf("error %v, want EFBIG", err)
	}
	if got, _ := os.ReadFile(path); string(got) != "abc" {
		t.Errorf("%q, want what fits", got)
	}
	lift()
	if err := os.WriteFile(path, []byte("abcd"), 0o600); err != nil {
		t.Error(err)
	}
}
