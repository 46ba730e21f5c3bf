package status

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"syscall"
	"testing"
)

func TestCodesSurviveWrapping(t *testing.T) {
	err := fmt.Errorf("on the way: %w", FromOS(&fs.PathError{Op: "write", Path: "x", Err: syscall.ENOSPC}, "cannot write %q", "x"))
	if !errors.Is(err, NoSpace) || errors.Is(err, IO) || CodeOf(err) != NoSpace || Errno(err) != int32(syscall.ENOSPC) {
		t.Errorf("code %v, errno %d", CodeOf(err), Errno(err))
	}
	if !strings.Contains(err.Error(), `cannot write "x": write x: no space left`) {
		t.Errorf("message %q", err)
	}
}

func TestCodeOf(t *testing.T) {
	for _, v := range []struct {
		err  error
		want Code
	}{
		{nil, OK},
		{Busy, Busy},
		{errors.New("anything"), Internal},
		{New(Timeout, "late"), Timeout},
		{FromOS(syscall.ENOENT, "x"), NotFound},
		{FromOS(syscall.EACCES, "x"), Permission},
		{FromOS(syscall.EROFS, "x"), Permission},
		{FromOS(syscall.EISDIR, "x"), InvalidArgument},
		{FromOS(syscall.ENOMEM, "x"), NoMemory},
		{FromOS(syscall.EDQUOT, "x"), NoSpace},
		{FromOS(syscall.EIO, "x"), IO},
	} {
		if got := CodeOf(v.err); got != v.want {
			t.Errorf("CodeOf(%v) = %v, want %v", v.err, got, v.want)
		}
	}
}
