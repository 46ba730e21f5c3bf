// Package ringfile keeps the packets of a ring in a file that outlives its process.
//
// A process maps the file and copies packets into it. If the process is killed, the kernel keeps all that
// the process has stored, in the order in which each thread stored it. So a record that is whole in the
// file was whole in the process, and no sync is needed. A crash of the machine keeps no such order: then
// the checksums tell what is whole.
//
// The file has a head of HeadSize bytes, and then the arena of a session. All numbers are little endian:
//
//	0    8  magic "strapRNG"
//	8    4  version, 1
//	12   4  CRC-32C of the bytes from 16 to HeadSize
//	16   8  bytes of the file
//	24  16  id of the capture
//	40   4  rank of the process
//	44   4  number of the process
//	48   8  when the process began the file, ns since 1970
//	56      zeros
//
// A packet is a record (record.go) and its elements. It begins at a multiple of Align.
package ringfile

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"io"
	"math"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/libstrap/strap/libstrap/internal/crc32c"
	"github.com/libstrap/strap/libstrap/internal/pages"
	"github.com/libstrap/strap/libstrap/internal/partial"
	"github.com/libstrap/strap/libstrap/internal/status"
)

const (
	// HeadSize is the bytes in front of the arena.
	HeadSize = 4096
	// Align is the alignment of records in the file.
	Align = 64

	magic   = "strapRNG"
	version = 1
	idSize  = 16
)

// Head says which process filled the file.
type Head struct {
	Size      int64 // of the file
	CaptureID string
	Rank      int32
	PID       int32
	Began     time.Time
}

// File is the file of a running session.
type File struct {
	// Memory is the mapped file. The arena begins at HeadSize.
	Memory *pages.Memory
	key    key

	home  string // the path, absolute
	f     *os.File
	files partial.Files
}

// Create makes the file, gives it all its memory, maps it, and locks it until Remove.
//
// Errors: Busy if a living process records into the file; InvalidState if a process left it that did not
// end by itself; InvalidArgument if another file is at the path; NoSpace if the file system has no room;
// Unsupported if it cannot reserve room or lock files.
func Create(path string, size int64, captureID string, rank int32, files partial.Files) (*File, error) {
	home, err := filepath.Abs(path)
	if err != nil {
		return nil, status.FromOS(err, "cannot create the ring file %q", path)
	}
	if files == nil {
		files = partial.Plain(0o600)
	}
	f, err := files.Open(home, os.O_RDWR|os.O_CREATE|os.O_EXCL|syscall.O_NOFOLLOW)
	if errors.Is(err, os.ErrExist) {
		return nil, taken(home)
	}
	if err != nil {
		return nil, status.FromOS(err, "cannot create the ring file %q", path)
	}
	r := &File{home: home, f: f, files: files}
	if err := r.fill(size, captureID, rank); err != nil {
		return nil, errors.Join(err, os.Remove(home), files.Close(f))
	}
	return r, nil
}

func (r *File) fill(size int64, captureID string, rank int32) (err error) {
	if err := lock(r.f, syscall.LOCK_EX); err != nil {
		return err
	}
	if err := r.f.Chmod(0o600); err != nil { // it has the values of all tensors
		return status.FromOS(err, "cannot set the permissions of %q", r.home)
	}
	if err := reserve(r.f, size); err != nil {
		if errors.Is(err, errors.ErrUnsupported) {
			return status.Wrap(status.Unsupported, err, "the file system of %q reserves no room: "+
				"give a path on another one, for example in /dev/shm", r.home)
		}
		return status.FromOS(err, "no room for the %d bytes of the ring file %q: "+
			"give less memory, or a path on another file system", size, r.home)
	}
	if r.Memory, err = pages.MapFile(r.f, int(size)); err != nil {
		return status.FromOS(err, "cannot map the ring file %q", r.home)
	}
	r.Memory.Touch(int(size)) // before the head is written
	head := Head{Size: size, CaptureID: captureID, Rank: rank, PID: int32(os.Getpid()), Began: time.Now()}
	if r.key, err = newKey(captureID); err != nil {
		r.Memory.Release(0)
		return err
	}
	head.put(r.Memory.Bytes)
	return nil
}

// Remove removes the file, unless another file has taken its place, and unlocks it. The memory stays
// mapped.
func (r *File) Remove() error {
	var err error
	if own, statErr := r.f.Stat(); statErr == nil {
		if now, statErr := os.Lstat(r.home); statErr == nil && os.SameFile(own, now) {
			err = os.Remove(r.home)
		}
	}
	if closeErr := r.files.Close(r.f); err == nil {
		err = closeErr
	}
	if err != nil {
		return status.FromOS(err, "cannot remove the ring file %q", r.home)
	}
	return nil
}

// taken says why a file at the path is not replaced.
func taken(path string) error {
	f, head, err := Open(path)
	if errors.Is(err, status.Corrupt) {
		return status.Wrap(status.InvalidArgument, err, "%q is no ring file: give a path where no file is", path)
	}
	if err != nil {
		return err
	}
	f.Close()
	return status.New(status.InvalidState, "%q was left by process %d, which did not end by itself: "+
		"`strap salvage ring %s OUT.stream` writes its last steps; then remove the file, or rename it", path, head.PID, path)
}

// Open opens the file of a dead process to read it, and locks it against salvages that remove it. Errors:
// NotFound; Busy if its process lives; InvalidArgument if it is no regular file; Corrupt if it is no ring
// file.
func Open(path string) (f *os.File, head Head, err error) {
	// O_NONBLOCK: do not wait for a FIFO; it is refused below.
	f, err = os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, head, status.FromOS(err, "cannot open the ring file %q", path)
	}
	if head, err = check(f, path); err != nil {
		f.Close()
		return nil, head, err
	}
	return f, head, nil
}

func check(f *os.File, path string) (head Head, err error) {
	info, err := f.Stat()
	if err != nil {
		return head, status.FromOS(err, "cannot stat the ring file %q", path)
	}
	if !info.Mode().IsRegular() {
		return head, status.New(status.InvalidArgument, "%q is no regular file (%s), so it is no ring file",
			path, info.Mode().Type())
	}
	if err := lock(f, syscall.LOCK_SH); err != nil {
		return head, err
	}
	b := make([]byte, HeadSize)
	if _, err := f.ReadAt(b, 0); err != nil && !errors.Is(err, io.EOF) {
		return head, status.FromOS(err, "cannot read the ring file %q", path)
	}
	return parseHead(b, path)
}

// lock locks the file in one of the ways of flock.
func lock(f *os.File, how int) error {
	err := syscall.Flock(int(f.Fd()), how|syscall.LOCK_NB)
	// A process that looks at the file takes the lock for a moment.
	for tries := 0; tries < 20 && errors.Is(err, syscall.EWOULDBLOCK); tries++ {
		time.Sleep(time.Millisecond)
		err = syscall.Flock(int(f.Fd()), how|syscall.LOCK_NB)
	}
	if errors.Is(err, syscall.EWOULDBLOCK) {
		return status.Wrap(status.Busy, err, "%q is the ring file of a process that lives: give another path, "+
			"or have that process write a dump", f.Name())
	}
	if err != nil {
		return status.Wrap(status.Unsupported, err, "cannot lock the ring file %q: "+
			"give a path on another file system, for example in /dev/shm", f.Name())
	}
	return nil
}

func (h *Head) put(b []byte) {
	le := binary.LittleEndian
	id, _ := hex.DecodeString(h.CaptureID) // newKey has checked it
	le.PutUint32(b[8:], version)
	le.PutUint64(b[16:], uint64(h.Size))
	copy(b[24:24+idSize], id)
	le.PutUint32(b[40:], uint32(h.Rank))
	le.PutUint32(b[44:], uint32(h.PID))
	le.PutUint64(b[48:], uint64(h.Began.UnixNano()))
	le.PutUint32(b[12:], crc32c.Checksum(b[16:HeadSize]))
	copy(b, magic) // last: a file without it is none
}

func parseHead(b []byte, path string) (h Head, err error) {
	le := binary.LittleEndian
	if string(b[:8]) != magic {
		return h, status.New(status.Corrupt, "%q is no ring file: it begins with %q", path, b[:8])
	}
	if v := le.Uint32(b[8:]); v != version {
		return h, status.New(status.Unsupported, "%q is a ring file of version %d: this library reads version %d",
			path, v, version)
	}
	if want, got := le.Uint32(b[12:]), crc32c.Checksum(b[16:HeadSize]); want != got {
		return h, status.New(status.Corrupt, "the head of the ring file %q is damaged: its checksum is %08x, not %08x",
			path, got, want)
	}
	size := le.Uint64(b[16:])
	if size > math.MaxInt64 {
		return h, status.New(status.Corrupt, "the head of the ring file %q claims %d bytes", path, size)
	}
	return Head{
		Size: int64(size), CaptureID: hex.EncodeToString(b[24 : 24+idSize]),
		Rank: int32(le.Uint32(b[40:])), PID: int32(le.Uint32(b[44:])), Began: time.Unix(0, int64(le.Uint64(b[48:]))),
	}, nil
}
