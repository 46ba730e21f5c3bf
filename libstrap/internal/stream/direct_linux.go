// Opens files for writes past the page cache, and allocates disk blocks, by calls of Linux.

package stream

import (
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// maxAlign is the largest alignment that direct writes use.
const maxAlign = 64 << 10

// openDirect opens the file f at path for writes past the page cache (direct writes). Offset, length and
// memory address of each write must be multiples of align. It returns nil if the file system has no
// direct writes, or has no storage behind the page cache.
func openDirect(path string, f *os.File) (direct *os.File, align int) {
	var fs unix.Statfs_t
	if unix.Fstatfs(int(f.Fd()), &fs) != nil || fs.Type == unix.TMPFS_MAGIC || fs.Type == unix.RAMFS_MAGIC {
		return nil, 0 // the file is in the page cache alone
	}
	align = os.Getpagesize()
	var st unix.Statx_t
	err := unix.Statx(int(f.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_DIOALIGN, &st)
	if err == nil && st.Mask&unix.STATX_DIOALIGN != 0 { // Linux 6.1
		if st.Dio_offset_align == 0 {
			return nil, 0
		}
		align = max(align, int(st.Dio_offset_align), int(st.Dio_mem_align))
	}
	if align > maxAlign || align&(align-1) != 0 {
		return nil, 0
	}
	direct, err = os.OpenFile(path, os.O_WRONLY|syscall.O_DIRECT|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, 0
	}
	if !sameFile(f, direct) {
		direct.Close()
		return nil, 0
	}
	return direct, align
}

func sameFile(f, g *os.File) bool {
	a, err := f.Stat()
	if err != nil {
		return false
	}
	b, err := g.Stat()
	return err == nil && os.SameFile(a, b)
}

// preallocate allocates disk blocks for n bytes at offset at. The file's size stays the same.
func preallocate(f *os.File, at, n int64) error {
	return unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_KEEP_SIZE, at, n)
}

// freeBytes returns the free bytes of f's file system, or 0 if they are not known.
func freeBytes(f *os.File) int64 {
	var fs unix.Statfs_t
	if unix.Fstatfs(int(f.Fd()), &fs) != nil {
		return 0
	}
	return int64(fs.Bavail) * fs.Bsize
}
