// Loads programs into the kernel, and attaches them to their tracepoints.

package probe

import (
	"cmp"
	"errors"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// loaded is a set of attached programs and their maps.
type loaded struct {
	collection *ebpf.Collection
	links      []link.Link
}

// load loads programs and attaches them. It tries the typed programs first, which read the kernel's
// structures directly. If the kernel refuses those, it tries the same programs as raw tracepoints.
// prepare changes each spec before it is loaded. The programs named in `first` are attached before
// the others.
func load(typed, raw func() (*ebpf.CollectionSpec, error), prepare func(*ebpf.CollectionSpec) error, first ...string) (*loaded, error) {
	_ = rlimit.RemoveMemlock() // if this fails and matters, loading fails with an explanation
	var refused error
	for _, build := range []func() (*ebpf.CollectionSpec, error){typed, raw} {
		spec, err := build()
		if err == nil {
			err = prepare(spec)
		}
		if err != nil {
			return nil, explain(err)
		}
		l, err := start(spec, first...)
		if err == nil {
			return l, nil
		}
		refused = cmp.Or(refused, err)
	}
	return nil, explain(refused)
}

// start loads the programs and attaches each to the tracepoint that its section names. The programs
// named in `first` are attached before the others.
func start(spec *ebpf.CollectionSpec, first ...string) (*loaded, error) {
	collection, err := ebpf.NewCollection(spec)
	if err != nil {
		return nil, err
	}
	l := &loaded{collection: collection}
	names := slices.Sorted(maps.Keys(spec.Programs))
	slices.SortStableFunc(names, func(a, b string) int {
		return slices.Index(first, b) - slices.Index(first, a)
	})
	for _, name := range names {
		if spec.Programs[name].AttachType == ebpf.AttachTraceIter {
			continue // runs when it is read
		}
		one, err := attach(l.collection.Programs[name], spec.Programs[name].AttachTo)
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

// records runs an iterator and calls show with each record T that it writes.
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
		// The kernel returns EAGAIN after a million elements without output, and continues at the
		// next read.
		if err != nil && !errors.Is(err, unix.EAGAIN) {
			return status.Wrap(status.IO, err, "what an iterator in the kernel gives cannot be read")
		}
	}
}

// missed returns how often the kernel skipped a program because it was already running on that
// core.
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

// detach stops the programs and keeps their counts.
func (l *loaded) detach() {
	for _, one := range l.links {
		one.Close()
	}
	l.links = nil
}

func (l *loaded) close() {
	l.detach()
	if l.collection != nil {
		l.collection.Close()
	}
}

// setcap is the command that gives the program strap-probe the capabilities. Every user who may run
// it gets them.
const setcap = `sudo setcap cap_bpf,cap_perfmon+ep "$(command -v strap-probe)"`

// explain turns an error of the kernel into one with a status code and a way out.
func explain(err error) error { return look("/").explain(err) }

func (h host) explain(err error) error {
	var verifier *ebpf.VerifierError
	unfit := errors.As(err, &verifier) && len(verifier.Log) > 0 // the verifier rejected the program, often with EACCES
	refused := errors.Is(err, os.ErrPermission) && !unfit
	switch {
	case refused && len(h.missing) > 0:
		return status.Wrap(status.Permission, os.ErrPermission, "the kernel takes no programs from this user, who lacks %s: run it as root, or strap-probe after once: %s", strings.Join(h.missing, " and "), setcap)
	case refused && h.userNamespace:
		return status.Wrap(status.Permission, os.ErrPermission, "the kernel takes no programs from a user namespace, as of a container without root: run it outside, or in a container with --privileged --userns=host")
	case h.lockdown == "confidentiality":
		return status.Wrap(status.Unsupported, err, "the kernel is locked down and lets no program read its memory: boot it with lockdown=integrity (cat /"+lockdownFile+" shows what is chosen)")
	case refused && h.memlockCounts():
		return status.Wrap(status.Permission, err, "the kernel gives programs no more than the %d KiB of RLIMIT_MEMLOCK: ulimit -l unlimited (as root), or LimitMEMLOCK=infinity in a unit of systemd", h.memlock>>10)
	case refused:
		return status.Wrap(status.Permission, err, "the kernel takes no programs although the capabilities are there: a seccomp filter or a security module forbids bpf(), as a container's may (docker run --security-opt seccomp=unconfined)")
	case unfit, errors.Is(err, ebpf.ErrNotSupported), errors.Is(err, btf.ErrNotFound), errors.Is(err, os.ErrNotExist), errors.Is(err, unix.ENOSYS):
		if !h.hasBTF {
			return status.Wrap(status.Unsupported, err, "the kernel has no BTF in /"+btfFile+": one built with CONFIG_DEBUG_INFO_BTF is needed")
		}
		if h.olderThan(5, 12) {
			return status.Wrap(status.Unsupported, err, "Linux %s cannot run the programs: 5.12 or newer is needed", h.release)
		}
		return status.Wrap(status.Unsupported, err, "the kernel cannot run the programs")
	}
	return status.Wrap(status.Internal, err, "the programs were not loaded")
}
