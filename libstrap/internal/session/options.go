// The options of a capture, and their checks.

package session

import (
	"cmp"
	"math"
	"strings"

	"github.com/libstrap/strap/libstrap/internal/arena"
	"github.com/libstrap/strap/libstrap/internal/codec"
	"github.com/libstrap/strap/libstrap/internal/index"
	"github.com/libstrap/strap/libstrap/internal/memory"
	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/stream"
	"github.com/libstrap/strap/libstrap/internal/team"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// KeepAll as Options.Cut keeps every complete packet of a resumed stream.
const KeepAll = stream.KeepAll

const (
	maxWorkers   = 256
	streamSuffix = ".stream" // of documented payloads only

	// underflowBound is the largest normalised error that float16 may have in a session without an
	// error bound. Values that are normal numbers in float16 lose at most float16Share.
	underflowBound = 1e-2

	// splitBytes is the most source bytes of one packet. It leaves room below wire.MaxPayload for the
	// bytes that a codec adds to incompressible data.
	splitBytes = math.MaxUint32 - 64<<20
)

// Options of a capture; see strap_open_options in strap.h for their meaning.
type Options struct {
	Codec       codec.Kind
	Level       int   // of the codec, 0 is its default
	Workers     int   // compression threads, 1 to 256
	MaxMemory   int64 // bytes of staging memory
	DropOnFull  bool  // leave tensors out instead of waiting for room
	Resume      bool  // append to the stream
	Cut         int64 // with Resume: length to cut the stream to, or KeepAll
	Overwrite   bool  // replace whatever file stands at the path; not with Resume
	KeepFloat32 bool  // no downcast to float16
	Rank        int32 // noted in the index

	// CaptureID is the id that a stream must have to be resumed; "" accepts any. Only with Resume.
	CaptureID string

	// Yield lets the workers rest while the caller computes; see backlog. With Ring it is ignored.
	Yield bool
	// BurstBytes is how much of the staging memory Open touches. Workers that yield rest until as
	// many bytes wait for them.
	BurstBytes int64

	// ErrorBound is the largest normalised squared error of a packet. Above 0 the mantissas of 16-bit
	// floats are rounded as far as the bound allows. With codec.Archive it is the bound of the
	// archive, and 0 becomes codec.ArchiveDefaultBound.
	ErrorBound float64

	// Team helps to copy large tensors. With Yield, and without DropOnFull, it also makes packets.
	Team team.Team

	// Intake is where small tensors wait; nil: none wait. With DropOnFull it must be nil, because the
	// host is to learn at once that a tensor was left out.
	Intake IntakeBuffer

	// Ring keeps the last steps in the staging memory. Streams are written by dumps alone.
	Ring bool
	// RingSteps and RingSeconds bound the steps of the ring, and their age; 0: they do not.
	RingSteps   int
	RingSeconds float64
	// RingFile is the path of a file that the ring is kept in, so that it outlives a process that is killed;
	// "": the ring is in memory. The end of the session removes the file.
	RingFile string
	// RingOutlier is how many times the usual largest magnitude of its layer a tensor has to have for an
	// Alarm; 0: magnitudes are not looked at.
	RingOutlier float64

	Files stream.Files // nil: those of the system

	split int64 // for tests; 0: splitBytes

	// Validate derives the following.

	// rounding is the error bound of the rounding while elements are copied; 0: they are not rounded.
	// An archive rounds values later, in its own way.
	rounding float64
	// mostLost is the largest normalised error that float16 may have against float32.
	mostLost float64
	// findsRaw is set if compressing finds out at little cost that a packet stays raw.
	findsRaw bool
}

// IntakeBuffer is memory in which small tensors wait. The host copies them there without entering
// this package. Each is contiguous, not converted, and has elements of at most 16 KiB.
type IntakeBuffer interface {
	// Admit lets the buffer take tensors of the layers below this id that are of no request, or of
	// one from least to requests. With layers 0 it takes no tensor.
	Admit(layers, least, requests uint32)
	// Taken returns how many tensors were taken, and the bytes of their elements. It works after
	// Close too. All threads may call it, also under locks.
	Taken() (tensors, bytes uint64)
	// Hold makes the buffer take no tensor until Next returns false.
	Hold()
	// Next holds the buffer, describes the next tensor in t, oldest first, and returns true. Shape and
	// elements stay where they are until Next returns false. If no tensor is left, Next empties the
	// buffer, lets it take tensors again, and returns false.
	Next(t *Tensor) bool
	// Close frees the buffer for another session.
	Close()
}

func (o *Options) validate(path string) error {
	if o.Workers < 1 || o.Workers > maxWorkers {
		return status.New(status.InvalidArgument, "workers = %d: give 1 to %d", o.Workers, maxWorkers)
	}
	if o.MaxMemory < arena.MinLimit {
		return status.New(status.InvalidArgument,
			"max_memory_bytes = %d: give at least %d", o.MaxMemory, arena.MinLimit)
	}
	if o.BurstBytes < 0 || o.BurstBytes > o.MaxMemory {
		return status.New(status.InvalidArgument,
			"burst_bytes = %d: give 0 to max_memory_bytes, %d", o.BurstBytes, o.MaxMemory)
	}
	if !(o.ErrorBound >= 0 && o.ErrorBound < 1) {
		return status.New(status.InvalidArgument,
			"error_bound = %g: give a share of the squared values above 0 and below 1, or 0 for no rounding",
			o.ErrorBound)
	}
	if o.Codec == codec.Archive && o.ErrorBound > codec.ArchiveMaxBound {
		return status.New(status.InvalidArgument,
			"error_bound = %g: an archive takes 0 to %g", o.ErrorBound, codec.ArchiveMaxBound)
	}
	if o.RingSteps < 0 || !(o.RingSeconds >= 0) || !o.Ring && (o.RingSteps != 0 || o.RingSeconds != 0) {
		return status.New(status.InvalidArgument,
			"ring_steps = %d, ring_seconds = %g: give at least 0, and with a ring only", o.RingSteps, o.RingSeconds)
	}
	if o.RingFile != "" && !o.Ring {
		return status.New(status.InvalidArgument, "ring_file = %.80q: give it with a ring only", o.RingFile)
	}
	if o.RingOutlier != 0 && (!o.Ring || !(o.RingOutlier > 1)) {
		return status.New(status.InvalidArgument,
			"ring_outlier = %g: give more than 1, and with a ring only, or 0", o.RingOutlier)
	}
	if o.Ring && o.Resume {
		return status.New(status.InvalidArgument, "mode: a ring has no stream to resume")
	}
	if o.CaptureID != "" && !o.Resume {
		return status.New(status.InvalidArgument,
			"capture_id = %.80q: give NULL for a new capture, whose id is drawn", o.CaptureID)
	}
	if o.Overwrite && o.Resume {
		return status.New(status.InvalidArgument,
			"overwrite = 1: give 0 to resume a stream, which is never overwritten")
	}
	if o.CaptureID != "" && !index.IsCaptureID(o.CaptureID) {
		return status.New(status.InvalidArgument,
			"capture_id = %.80q: give 32 hexadecimal digits, or NULL for none", o.CaptureID)
	}
	if o.Codec == codec.Archive && strings.HasSuffix(path, streamSuffix) {
		return status.New(status.InvalidArgument, "%q: a file named %s holds payloads that every "+
			"reader knows; name an archive otherwise, for example %q", path, streamSuffix,
			strings.TrimSuffix(path, streamSuffix)+".archive")
	}
	if o.split == 0 {
		o.split = splitBytes
	}
	if o.Codec != codec.Archive {
		o.rounding = o.ErrorBound
	} else if o.ErrorBound == 0 {
		o.ErrorBound = codec.ArchiveDefaultBound
	}
	o.mostLost = cmp.Or(o.ErrorBound, underflowBound)
	o.findsRaw = o.Codec == codec.LZ4 && o.Level == 0
	return nil
}

// memoryLimit returns the bytes that a capture may take: what was asked for, and at most half of the
// memory that the machine and the control group of the process have left.
func memoryLimit(asked int64) int64 {
	if left, ok := memory.Available(); ok {
		asked = min(asked, left/2)
	}
	return max(asked, arena.MinLimit)
}

// helped reports whether callers and their team make packets when many wait.
func (o *Options) helped() bool { return o.Yield && o.Team.Present() && !o.DropOnFull }

// stored returns the type that values of type t are stored as.
func (o *Options) stored(t wire.DType) wire.DType {
	if t == wire.Float32 && !o.KeepFloat32 {
		return wire.Float16
	}
	return t
}

// takesConverted returns an error if float16 that the caller made from float32 is refused.
func (o *Options) takesConverted() error {
	if o.KeepFloat32 {
		return status.New(status.InvalidArgument,
			"conversion: this session stores float32 as it is (keep_float32): hand that over")
	}
	return nil
}

// bounded reports whether the error of a packet has a bound; an archive's always has.
func (o *Options) bounded() bool { return o.ErrorBound > 0 }
