package probe

import (
	"cmp"
	"errors"
	"io"
	"os"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/rlimit"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// loaded is a set of programs that run, and their maps.
type loaded struct {
	collection *ebpf.Collection
	links      []link.Link
}

// load puts programs into the kernel: typed ones, which read its structures directly, or
// where it refuses those the same programs as raw tracepoints. Prepare sets up either before
// it is loaded.
func load(typed, raw func() (*ebpf.CollectionSpec, error), prepare func(*ebpf.CollectionSpec) error) (*loaded, error) {
	if err := rlimit.RemoveMemlock(); err != nil {
		return nil, explain(err)
	}
	var first error
	for _, build := range []func() (*ebpf.CollectionSpec, error){typed, raw} {
		spec, err := build()
		if err == nil {
			err = prepare(spec)
		}
		if err != nil {
			return nil, explain(err)
		}
		l, err := start(spec)
		if err == nil {
			return l, nil
		}
		first = cmp.Or(first, err)
	}
	return nil, explain(first)
}

// start loads the programs and attaches them, each to the tracepoint of its section's name.
func start(spec *ebpf.CollectionSpec) (*loaded, error) {
	collection, err := ebpf.NewCollection(spec)
	if err != nil {
		return nil, err
	}
	l := &loaded{collection: collection}
	for name, program := range l.collection.Programs {
		if spec.Programs[name].AttachType == ebpf.AttachTraceIter {
			continue // runs when it is read
		}
		one, err := attach(program, spec.Programs[name].AttachTo)
		if err != nil {
			l.close()
			return nil, err
		}
		l.links = append(l.links, one)
	}
	return l, nil
}

func attach(program *ebpf.Program, tracepoint string) (link.Link, error) {
	if program.Type() == ebpf.RawTracepoint {
		return link.AttachRawTracepoint(link.RawTracepointOptions{Name: tracepoint, Program: program})
	}
	return link.AttachTracing(link.TracingOptions{Program: program})
}

// records runs an iterator and shows what it writes, a T each.
func records[T any](list *link.Iter, show func(*T)) error {
	in, err := list.Open()
	if err != nil {
		return explain(err)
	}
	defer in.Close()
	some := make([]T, 512)
	size := int(unsafe.Sizeof(some[0]))
	room := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(some))), len(some)*size)
	for {
		n, err := io.ReadFull(in, room)
		for i := range n / size {
			show(&some[i])
		}
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return nil
		}
		if err != nil {
			return status.Wrap(status.IO, err, "what an iterator in the kernel gives cannot be read")
		}
	}
}

// missed is how often the kernel left a program out, because it interrupted itself.
func (l *loaded) missed() (uint64, error) {
	total := uint64(0)
	for _, program := range l.collection.Programs {
		stats, err := program.Stats()
		if err != nil {
			return 0, explain(err)
		}
		total += stats.RecursionMisses
	}
	return total, nil
}

func (l *loaded) close() {
	for _, one := range l.links {
		one.Close()
	}
	if l.collection != nil {
		l.collection.Close()
	}
}

// explain gives an error of the kernel its code and the way out.
func explain(err error) error {
	switch {
	case errors.Is(err, os.ErrPermission):
		return status.Wrap(status.Permission, err, "the kernel takes no programs from this user: run it as root, or with the capabilities CAP_BPF and CAP_PERFMON")
	case errors.Is(err, ebpf.ErrNotSupported), errors.Is(err, btf.ErrNotFound), errors.Is(err, os.ErrNotExist):
		if _, missing := os.Stat("/sys/kernel/btf/vmlinux"); missing != nil {
			return status.Wrap(status.Unsupported, err, "the kernel has no BTF in /sys/kernel/btf/vmlinux: one built with CONFIG_DEBUG_INFO_BTF is needed")
		}
		return status.Wrap(status.Unsupported, err, "the kernel cannot run the programs")
	}
	return status.Wrap(status.Internal, err, "the programs were not loaded")
}
