package stream

import (
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

// cpuTime returns the CPU time of this process: in the kernel, and in all.
func cpuTime(b *testing.B) (kernel, all time.Duration) {
	b.Helper()
	var r syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &r); err != nil {
		b.Fatal(err)
	}
	kernel = time.Duration(r.Stime.Nano())
	return kernel, kernel + time.Duration(r.Utime.Nano())
}

// BenchmarkWriter writes and syncs files of 1 GiB in TMPDIR, which should be on a disk. It reports
// the CPU time for each GB.
func BenchmarkWriter(b *testing.B) {
	const size = 1 << 30
	p := packet("model.layers.0.mlp", make([]byte, 256<<10))
	for i := range p[64:] {
		p[64+i] = byte(i*i>>7 + i)
	}
	for _, mode := range []string{"direct", "buffered"} {
		b.Run(mode, func(b *testing.B) {
			b.SetBytes(size)
			kernel, all := cpuTime(b)
			for range b.N {
				w, err := Create(filepath.Join(b.TempDir(), "a.stream"), Options{}, nil)
				if err != nil {
					b.Fatal(err)
				}
				if mode == "buffered" {
					w.disk.direct = nil
				} else if w.disk.direct == nil {
					b.Skip("TMPDIR is on a file system without direct I/O")
				}
				for w.Offset() < size && err == nil {
					err = w.Append(p)
				}
				if err == nil {
					err = w.Sync()
				}
				if err != nil {
					b.Fatal(err)
				}
				if err := w.Close(); err != nil {
					b.Fatal(err)
				}
			}
			kernelAfter, allAfter := cpuTime(b)
			gb := float64(size) / 1e9 * float64(b.N)
			b.ReportMetric((kernelAfter-kernel).Seconds()/gb, "kernel-s/GB")
			b.ReportMetric((allAfter-all).Seconds()/gb, "cpu-s/GB")
		})
	}
}
