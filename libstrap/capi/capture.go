// The functions of the C API that open a capture, take its tensors and close it.

package main

/*
#include "strap.h"
*/
import "C"

import (
	"errors"
	"math"
	"time"
	"unsafe"

	"github.com/libstrap/strap/libstrap/internal/codec"
	"github.com/libstrap/strap/libstrap/internal/session"
	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/team"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

func timeout(ms C.int32_t) time.Duration { return time.Duration(ms) * time.Millisecond }

// onSession runs f on an open session; a panic poisons the session.
func onSession(h C.strap_session, e *C.strap_error, f func(*session.Session) error) C.strap_status {
	return guarded(e, func() error {
		s, err := sessions.get(uint64(h))
		if err != nil {
			return err
		}
		return s.Guard(func() error { return f(s) })
	})
}

//export strapgoOpen
func strapgoOpen(path *C.char, o *C.strap_open_options, out *C.strap_session, e *C.strap_error) C.strap_status {
	return guarded(e, func() error {
		opts, err := openOptions(o)
		if err != nil {
			return err
		}
		id := sessions.next()
		if !opts.DropOnFull {
			id, opts.Intake = openIntake(id)
		}
		s, err := session.Open(C.GoString(path), opts)
		if err != nil {
			closeIntake(id)
			return err
		}
		sessions.put(id, s)
		*out = C.strap_session(id)
		return nil
	})
}

func openOptions(o *C.strap_open_options) (session.Options, error) {
	none := session.Options{}
	switch {
	case o.codec < 0 || o.codec > C.STRAP_CODEC_ARCHIVE:
		return none, status.New(status.InvalidArgument, "codec = %d: give a STRAP_CODEC_ value", o.codec)
	case o.on_full != C.STRAP_ON_FULL_BLOCK && o.on_full != C.STRAP_ON_FULL_DROP:
		return none, status.New(status.InvalidArgument, "on_full = %d: give a STRAP_ON_FULL_ value", o.on_full)
	case o.mode != C.STRAP_MODE_CREATE && o.mode != C.STRAP_MODE_RESUME:
		return none, status.New(status.InvalidArgument, "mode = %d: give a STRAP_MODE_ value", o.mode)
	case o.overwrite != 0 && o.overwrite != 1:
		return none, status.New(status.InvalidArgument, "overwrite = %d: give 0 or 1", o.overwrite)
	case o.workers_yield != 0 && o.workers_yield != 1:
		return none, status.New(status.InvalidArgument, "workers_yield = %d: give 0 or 1", o.workers_yield)
	case o.ring != 0 && o.ring != 1:
		return none, status.New(status.InvalidArgument, "ring = %d: give 0 or 1", o.ring)
	case o.keep_float32 != 0 && o.keep_float32 != 1:
		return none, status.New(status.InvalidArgument, "keep_float32 = %d: give 0 or 1", o.keep_float32)
	}
	cut := int64(session.KeepAll)
	if o.resume_offset != C.STRAP_KEEP_ALL {
		if o.resume_offset > math.MaxInt64 {
			return none, status.New(status.InvalidArgument, "resume_offset = %d is no file offset", o.resume_offset)
		}
		cut = int64(o.resume_offset)
	}
	id := beginning(o.capture_id, 80) // a longer one is refused as this is
	if o.capture_id != nil && id == "" {
		return none, status.New(status.InvalidArgument, "capture_id is empty: give 32 hexadecimal digits, or NULL for none")
	}
	if o.ring_file != nil && *o.ring_file == 0 {
		return none, status.New(status.InvalidArgument, "ring_file is empty: give a path, or NULL for none")
	}
	return session.Options{
		Codec:       codec.Kind(o.codec),
		Level:       int(o.level),
		Workers:     int(o.workers),
		MaxMemory:   int64(min(uint64(o.max_memory_bytes), math.MaxInt64)),
		DropOnFull:  o.on_full == C.STRAP_ON_FULL_DROP,
		Resume:      o.mode == C.STRAP_MODE_RESUME,
		Cut:         cut,
		Overwrite:   o.overwrite == 1,
		KeepFloat32: o.keep_float32 == 1,
		Rank:        int32(o.rank),
		ErrorBound:  float64(o.error_bound),
		Yield:       o.workers_yield == 1,
		Team:        team.Team{Parallel: unsafe.Pointer(o.team)},
		BurstBytes:  int64(min(uint64(o.burst_bytes), math.MaxInt64)),
		CaptureID:   id,
		Ring:        o.ring == 1,
		RingSteps:   int(o.ring_steps),
		RingSeconds: float64(o.ring_seconds),
		RingFile:    C.GoString(o.ring_file),
		RingOutlier: float64(o.ring_outlier),
		Files:       files{},
	}, nil
}

//export strapgoRoll
func strapgoRoll(h C.strap_session, path *C.char, overwrite, timeoutMS C.int32_t, e *C.strap_error) C.strap_status {
	return onSession(h, e, func(s *session.Session) error {
		if overwrite != 0 && overwrite != 1 {
			return status.New(status.InvalidArgument, "overwrite = %d: give 0 or 1", overwrite)
		}
		_, err := s.Roll(C.GoString(path), overwrite == 1, timeout(timeoutMS))
		return err
	})
}

//export strapgoDump
func strapgoDump(h C.strap_session, path *C.char, overwrite, timeoutMS C.int32_t, e *C.strap_error) C.strap_status {
	return onSession(h, e, func(s *session.Session) error {
		if overwrite != 0 && overwrite != 1 {
			return status.New(status.InvalidArgument, "overwrite = %d: give 0 or 1", overwrite)
		}
		_, err := s.BeginDump(C.GoString(path), overwrite == 1, timeout(timeoutMS))
		return err
	})
}

//export strapgoDumpEnd
func strapgoDumpEnd(h C.strap_session, timeoutMS C.int32_t, e *C.strap_error) C.strap_status {
	return onSession(h, e, func(s *session.Session) error { return s.EndDump(timeout(timeoutMS)) })
}

//export strapgoStepEnd
func strapgoStepEnd(h C.strap_session, step C.int64_t, timeoutMS C.int32_t, e *C.strap_error) C.strap_status {
	return onSession(h, e, func(s *session.Session) error { return s.EndStep(int64(step), timeout(timeoutMS)) })
}

//export strapgoAlarm
func strapgoAlarm(h C.strap_session, out *C.strap_alarm_t, timeoutMS C.int32_t, e *C.strap_error) C.strap_status {
	rang := false
	code := onSession(h, e, func(s *session.Session) error {
		var first session.Alarm
		var err error
		if first, rang, err = s.Alarm(timeout(timeoutMS)); !rang {
			return err
		}
		out.layer, out.request, out.call = C.uint32_t(first.Layer), C.uint32_t(first.Request), C.uint32_t(first.Call)
		out.step, out.token = C.int64_t(first.Step), C.int64_t(first.Token)
		out.element, out.value = C.int64_t(first.Element), C.double(first.Value)
		out.time_ns, out.thread = C.int64_t(first.TimeNS), C.uint64_t(first.Thread)
		out.usual = C.double(first.Usual)
		return nil
	})
	if code == C.STRAP_OK && !rang {
		return C.STRAP_END
	}
	return code
}

//export strapgoCaptureID
func strapgoCaptureID(h C.strap_session, id *C.char, size C.size_t, e *C.strap_error) C.strap_status {
	return onSession(h, e, func(s *session.Session) error {
		if size < C.STRAP_CAPTURE_ID_BYTES {
			return status.New(status.InvalidArgument,
				"size = %d: give at least STRAP_CAPTURE_ID_BYTES, %d", size, C.STRAP_CAPTURE_ID_BYTES)
		}
		to := unsafe.Slice((*byte)(unsafe.Pointer(id)), C.STRAP_CAPTURE_ID_BYTES)
		to[copy(to, s.CaptureID())] = 0
		return nil
	})
}

//export strapgoLayer
func strapgoLayer(h C.strap_session, model, name *C.char, nameLen C.size_t, path *C.char, out *C.uint32_t, e *C.strap_error) C.strap_status {
	return onSession(h, e, func(s *session.Session) error {
		if nameLen > wire.MaxName {
			return status.New(status.InvalidArgument, "name_len = %d: at most %d", nameLen, wire.MaxName)
		}
		of, err := text(model, "model", session.MaxText)
		if err != nil {
			return err
		}
		place, err := text(path, "path", wire.MaxName)
		if err != nil {
			return err
		}
		id, err := s.Layer(of, C.GoStringN(name, C.int(nameLen)), place)
		*out = C.uint32_t(id)
		return err
	})
}

//export strapgoRequest
func strapgoRequest(h C.strap_session, name *C.char, nameLen C.size_t, out *C.uint32_t, e *C.strap_error) C.strap_status {
	return onSession(h, e, func(s *session.Session) error {
		if nameLen > session.MaxText {
			return status.New(status.InvalidArgument, "name_len = %d: at most %d", nameLen, session.MaxText)
		}
		id, err := s.Request(C.GoStringN(name, C.int(nameLen)))
		*out = C.uint32_t(id)
		return err
	})
}

//export strapgoEnqueue
func strapgoEnqueue(h C.strap_session, c *C.strap_tensor, thread C.uint64_t, now C.int64_t, timeoutMS C.int32_t, e *C.strap_error) C.strap_status {
	dropped := false
	code := onSession(h, e, func(s *session.Session) error {
		t, err := tensor(c)
		if err != nil {
			return err
		}
		t.Thread, t.TimeNS = uint64(thread), int64(now)
		err = s.Enqueue(&t, timeout(timeoutMS))
		c.cursor = C.uint64_t(t.Cursor)
		if dropped = errors.Is(err, session.ErrDropped); dropped {
			return nil
		}
		return err
	})
	if dropped {
		return C.STRAP_DROPPED
	}
	return code
}

// tensor reads what C describes; shape and strides stay in C memory.
func tensor(c *C.strap_tensor) (session.Tensor, error) {
	if c.ndim < 0 || c.ndim > C.STRAP_MAX_DIMS {
		return session.Tensor{}, status.New(status.InvalidArgument,
			"ndim = %d: give 0 to %d", c.ndim, C.STRAP_MAX_DIMS)
	}
	if c.ndim > 0 && c.shape == nil {
		return session.Tensor{}, status.New(status.InvalidArgument, "shape is NULL, ndim = %d", c.ndim)
	}
	if c.dtype < 0 || c.dtype > math.MaxUint8 {
		return session.Tensor{}, status.New(status.InvalidArgument, "dtype = %d is no STRAP_ type", c.dtype)
	}
	t := session.Tensor{
		Layer:   uint32(c.layer),
		DType:   wire.DType(c.dtype),
		Shape:   unsafe.Slice((*int64)(unsafe.Pointer(c.shape)), int(c.ndim)),
		Data:    c.data,
		Step:    int64(c.step),
		Token:   int64(c.token),
		Call:    uint32(c.call),
		Request: uint32(c.request),
		Cursor:  uint64(c.cursor),
	}
	var err error
	if t.Transform, err = text(c.transform, "transform", session.MaxText); err != nil {
		return session.Tensor{}, err
	}
	if t.Parameters, err = text(c.parameters, "parameters", session.MaxText); err != nil {
		return session.Tensor{}, err
	}
	if c.strides != nil {
		t.Strides = unsafe.Slice((*int64)(unsafe.Pointer(c.strides)), int(c.ndim))
	}
	if c.conversion != nil {
		if t.Conversion, err = conversion(c.conversion); err != nil {
			return session.Tensor{}, err
		}
	}
	return t, nil
}

func conversion(c *C.strap_conversion) (*session.Conversion, error) {
	if c.source < 0 || c.source > math.MaxUint8 {
		return nil, status.New(status.InvalidArgument, "conversion.source = %d is no STRAP_ type", c.source)
	}
	return &session.Conversion{Source: wire.DType(c.source), Loss: codec.Stats{
		Count:       int64(min(uint64(c.values), math.MaxInt64)),
		SquareError: float64(c.square_error),
		SquareSum:   float64(c.square_sum),
		MaxError:    float64(c.max_error),
	}}, nil
}

//export strapgoAbandon
func strapgoAbandon(h C.strap_session, cursor C.uint64_t, e *C.strap_error) C.strap_status {
	return onSession(h, e, func(s *session.Session) error {
		return s.Abandon(uint64(cursor))
	})
}

//export strapgoNote
func strapgoNote(h C.strap_session, layer C.uint32_t, step, token C.int64_t, call C.uint32_t, message *C.char, thread C.uint64_t, now C.int64_t, e *C.strap_error) C.strap_status {
	return onSession(h, e, func(s *session.Session) error {
		return s.Note(&session.Tensor{
			Layer: uint32(layer), Step: int64(step), Token: int64(token), Call: uint32(call),
			Thread: uint64(thread), TimeNS: int64(now),
		}, beginning(message, session.MaxText))
	})
}

//export strapgoFlush
func strapgoFlush(h C.strap_session, cursor *C.uint64_t, timeoutMS C.int32_t, e *C.strap_error) C.strap_status {
	return onSession(h, e, func(s *session.Session) error {
		return s.Flush((*uint64)(cursor), timeout(timeoutMS))
	})
}

//export strapgoCheckpoint
func strapgoCheckpoint(h C.strap_session, cursor *C.uint64_t, timeoutMS C.int32_t, offset *C.uint64_t, e *C.strap_error) C.strap_status {
	return onSession(h, e, func(s *session.Session) error {
		covered, err := s.Checkpoint((*uint64)(cursor), timeout(timeoutMS))
		*offset = C.uint64_t(covered)
		return err
	})
}

//export strapgoStats
func strapgoStats(h C.strap_session, out *C.strap_stats_t, e *C.strap_error) C.strap_status {
	return onSession(h, e, func(s *session.Session) error {
		st := s.Stats()
		out.workers = C.uint32_t(st.Workers)
		out.packets = C.uint64_t(st.Packets)
		out.tensors = C.uint64_t(st.Tensors)
		out.raw_bytes = C.uint64_t(st.RawBytes)
		out.stored_bytes = C.uint64_t(st.StoredBytes)
		out.file_bytes = C.uint64_t(st.FileBytes)
		out.dropped = C.uint64_t(st.Dropped)
		out.dropped_bytes = C.uint64_t(st.DroppedBytes)
		out.failed = C.uint64_t(st.Failed)
		out.overflowed = C.uint64_t(st.Overflowed)
		out.stalls = C.uint64_t(st.Stalls)
		out.stall_ns = C.uint64_t(st.StallNS)
		out.queued_packets = C.uint64_t(st.QueuedPackets)
		out.queued_bytes = C.uint64_t(st.QueuedBytes)
		out.memory_bytes = C.uint64_t(st.MemoryBytes)
		out.memory_peak = C.uint64_t(st.MemoryPeak)
		out.memory_limit = C.uint64_t(st.MemoryLimit)
		out.write_ns = C.uint64_t(st.WriteNS)
		out.converted = C.uint64_t(st.Convert.Count)
		out.square_error = C.double(st.Convert.SquareError)
		out.square_sum = C.double(st.Convert.SquareSum)
		out.max_error = C.double(st.Convert.MaxError)
		out.failure = C.strap_status(status.CodeOf(st.Failure))
		out.writer_thread = C.int32_t(st.WriterThread)
		out.yield_ns, out.repeated = C.uint64_t(st.YieldNS), C.uint64_t(st.Repeated)
		out.underflowed = C.uint64_t(st.Underflowed)
		out.ring_steps, out.ring_packets = C.uint64_t(st.Ring.Steps), C.uint64_t(st.Ring.Packets)
		out.ring_bytes = C.uint64_t(st.Ring.Bytes)
		out.ring_gone_steps, out.ring_gone_packets = C.uint64_t(st.Ring.GoneSteps), C.uint64_t(st.Ring.GonePackets)
		out.ring_oldest_step, out.ring_oldest_ns = C.int64_t(st.Ring.OldestStep), C.int64_t(st.Ring.OldestTimeNS)
		out.ring_gone_step = C.int64_t(st.Ring.GoneStep)
		return nil
	})
}

//export strapgoClose
func strapgoClose(h C.strap_session, timeoutMS C.int32_t, e *C.strap_error) C.strap_status {
	return onSession(h, e, func(s *session.Session) error {
		err := s.Close(timeout(timeoutMS))
		if !errors.Is(err, status.Timeout) {
			if _, gone := sessions.remove(uint64(h)); gone != nil {
				return gone // another thread closed it meanwhile and has the answer
			}
		}
		return err
	})
}

//export strapgoDiscard
func strapgoDiscard(h C.strap_session, lost *C.uint64_t, e *C.strap_error) C.strap_status {
	return guarded(e, func() error {
		s, err := sessions.remove(uint64(h))
		if err != nil {
			return err
		}
		*lost = C.uint64_t(s.Discard())
		return nil
	})
}
